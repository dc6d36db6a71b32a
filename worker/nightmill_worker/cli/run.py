"""`nightmill run`: every row of a Parquet input gets a completion, in this process."""

from typing import TYPE_CHECKING, Any

import click

from nightmill.cli.job_options import job_flags, read_job
from nightmill.cli.outcome import tell_outcome
from nightmill.cli.sections import SectionedCommand
from nightmill.cli.show import show_json, show_note
from nightmill.config import Settings
from nightmill.records import EngineOptions, JobOptions, JobSpec
from nightmill_worker.cli.run_options import engine_options, read_engine

if TYPE_CHECKING:
    from nightmill_worker.cli.progress import ProgressReporter
    from nightmill_worker.embedded import RunResult

EPILOG = """\b
Examples:
  nightmill run prompts.parquet -o answers/ --model demo
  nightmill run reviews/ -o labels/ --model HuggingFaceTB/SmolLM2-135M-Instruct \\
      --prompt-column text --system-prompt @instructions.txt --max-tokens 8

The same command again resumes what was interrupted. Ctrl-C once finishes what is running, twice stops at once."""


@click.command(cls=SectionedCommand, epilog=EPILOG)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@job_flags
@engine_options
@click.option("--json", "as_json", is_flag=True, help="The summary as one JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def run(inputs: tuple[str, ...], output: str, as_json: bool, quiet: bool, **flags: Any) -> int:
    """Answer every row of INPUT and write the completions to the output folder.

    INPUT is a Parquet file, a folder of them, a quoted glob, or a .jsonl file in OpenAI's batch form. Each row gives
    one output row, with all its columns, in the same order: a completion, or an error_code that says why not.
    """
    spec, options = read_job(inputs, output, flags)
    engine = read_engine(flags)
    from nightmill_worker.cli.progress import terminal_reporter
    from nightmill_worker.drain import Drain

    drain = Drain()
    with drain.signals(), terminal_reporter(quiet=quiet) as reporter:
        result = _run(spec, options, engine, reporter, drain, in_process=flags["in_process"])
    if as_json:
        show_json(result.summary.as_json())
    if not quiet:
        _show_summary(result)
    return tell_outcome(result.job)


def _run(
    spec: JobSpec,
    options: JobOptions,
    engine: EngineOptions,
    reporter: "ProgressReporter",
    drain: Any,
    *,
    in_process: bool,
) -> "RunResult":
    settings = Settings.from_env()
    with drain.breakable():
        reporter.phase("starting")
        from nightmill_worker.cores import limit_feeder
        from nightmill_worker.engine_start import EarlyEngine, RunOptions
        from nightmill_worker.loaded_model import load_model

        model = load_model(spec.model, engine, progress=reporter.phase, pins=not in_process)
        run_options = RunOptions(engine=engine, in_process=in_process)
        early = EarlyEngine(model, run_options)
    with early:
        with drain.breakable():
            # What takes its time to import comes while the engine loads.
            from nightmill_worker.embedded import EmbeddedRun

            if model.cores is not None:
                limit_feeder(model.cores)
        embedded = EmbeddedRun(model, run_options, settings, reporter, drain, early)
        return embedded.run(spec, options)


def _show_summary(result: "RunResult") -> None:
    from rich.console import Console

    from nightmill_worker.cli.summary import summary_table

    console = Console(stderr=True, highlight=False)
    with console.capture() as table:
        console.print(summary_table(result.job, result.summary))
    show_note(table.get().rstrip("\n"))
