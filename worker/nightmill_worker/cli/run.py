"""`nightmill run`: every row of a Parquet input gets a completion, in this process."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nightmill.cli.show import show_json, show_note
from nightmill.config import Settings
from nightmill.errors import ExitCode, RowError
from nightmill.records import EngineOptions, JobOptions, JobSpec, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill.states import JobStatus
from nightmill_worker.cli.run_options import engine_options, input_options, job_options, model_options, sampling_options
from nightmill_worker.cli.sections import SectionedCommand

if TYPE_CHECKING:
    from nightmill_worker.cli.progress import ProgressReporter
    from nightmill_worker.embedded import RunResult

EPILOG = """\b
Examples:
  nightmill run prompts.parquet -o answers/ --model demo
  nightmill run reviews/ -o labels/ --model HuggingFaceTB/SmolLM2-135M-Instruct \\
      --prompt-column text --system-prompt @instructions.txt --max-tokens 8

The same command again resumes what was interrupted. Ctrl-C once finishes what is running, twice stops at once."""


_SAMPLING_FLAGS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "ignore_eos"),
)


@click.command(cls=SectionedCommand, epilog=EPILOG)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@input_options
@model_options
@sampling_options
@job_options
@engine_options
@click.option("--json", "as_json", is_flag=True, help="The summary as one JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def run(inputs: tuple[str, ...], output: str, as_json: bool, quiet: bool, **flags: Any) -> int:
    """Answer every row of INPUT and write the completions to the output folder.

    INPUT is a Parquet file, a folder of them, a quoted glob, or a .jsonl file in OpenAI's batch form. Each row gives
    one output row, with all its columns, in the same order: a completion, or an error_code that says why not.
    """
    _refuse_bad_text({"INPUT": inputs, "output": output, **flags})
    spec, options, engine = _read_flags(inputs, output, flags)
    from nightmill_worker.cli.progress import terminal_reporter
    from nightmill_worker.drain import Drain

    drain = Drain()
    with drain.signals(), terminal_reporter(quiet=quiet) as reporter:
        result = _run(spec, options, engine, reporter, drain, in_process=flags["in_process"])
    if as_json:
        show_json(result.summary.as_json())
    if not quiet:
        _show_summary(result)
    return _exit_code(result)


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
        from nightmill_worker.embedded import EmbeddedRun, RunOptions
        from nightmill_worker.loaded_model import load_model

        model = load_model(spec.model, engine, progress=reporter.phase)
    embedded = EmbeddedRun(model, RunOptions(engine=engine, in_process=in_process), settings, reporter, drain)
    return embedded.run(spec, options)


def _read_flags(
    inputs: tuple[str, ...], output: str, flags: dict[str, Any]
) -> tuple[JobSpec, JobOptions, EngineOptions]:
    model = ModelSpec(
        model=flags["model"],
        revision=flags["revision"],
        dtype=flags["dtype"],
        load_format=flags["load_format"],
        max_model_len=flags["max_model_len"],
    )
    spec = JobSpec(
        inputs=inputs,
        output=output,
        model=model,
        sampling=_sampling(flags),
        seed=flags["seed"],
        prompt_column=flags["prompt_column"],
        messages_column=flags["messages_column"],
        system_prompt=_text_or_file(flags["system_prompt"]),
        chat=flags["chat"],
        output_column=flags["output_column"],
        output_prefix=flags["output_prefix"],
        strict=flags["strict"],
        allow_duplicate_ids=flags["allow_duplicate_ids"],
        check_ids=flags["check_ids"],
    )
    options = JobOptions(
        shard_rows=flags["shard_rows"],
        max_failed_rows=flags["max_failed_rows"],
        idempotency_key=flags["idempotency_key"],
        expires_in_s=flags["expires_in"],
    )
    engine = EngineOptions(
        page_size=flags["page_size"],
        max_num_seqs=flags["max_num_seqs"],
        max_num_batched_tokens=flags["max_num_batched_tokens"],
        enable_prefix_caching=flags["enable_prefix_caching"],
        enable_shared_attention=flags["enable_shared_attention"],
        pool_bytes=flags["kv_cache_memory_bytes"],
        swap_bytes=flags["swap_space"],
        num_threads=flags["num_threads"],
    )
    return spec, options, engine


def _refuse_bad_text(flags: dict[str, Any]) -> None:
    """Bytes that are no UTF-8 reach us as surrogates, which no file and no database of ours can hold."""
    for name, value in flags.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not text.isascii() and text != text.encode(errors="replace").decode():
                flag = name if name.isupper() else "--" + name.replace("_", "-")
                raise click.UsageError(f"{flag} is not valid UTF-8: {text!r}")


def _sampling(flags: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**{name: flags[name] for name in _SAMPLING_FLAGS})
    except RowError as error:
        raise click.UsageError(error.message) from error


def _text_or_file(value: str | None) -> str | None:
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--system-prompt {value}: {error}") from error


def _show_summary(result: "RunResult") -> None:
    from rich.console import Console

    from nightmill_worker.cli.summary import summary_table

    console = Console(stderr=True, highlight=False)
    with console.capture() as table:
        console.print(summary_table(result.job, result.summary))
    show_note(table.get().rstrip("\n"))


def _exit_code(result: "RunResult") -> int:
    job = result.job
    match job.status:
        case JobStatus.COMPLETED if job.rows.completed == 0:
            show_note("every row failed: `nightmill errors` shows why")
            return ExitCode.ROWS_FAILED
        case JobStatus.COMPLETED:
            return ExitCode.DONE
        case JobStatus.CANCELLED | JobStatus.EXPIRED:
            show_note(f"job {job.job_id} is {job.status.value}: what was finished is in {job.spec.output}")
            return ExitCode.CANCELLED
        case _:
            code = ExitCode.ROWS_FAILED if job.error_code == "error_budget_exceeded" else ExitCode.FAILED
            show_note(f"job {job.job_id} failed ({job.error_code}): {job.error_message}")
            show_note(f"  What was finished is in {job.spec.output}; run into another output to try again.")
            return code
