"""`nightmill bench`: how fast, against static batching and against transformers, in one run."""

from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

WORKLOADS = ("W1", "W2", "W3")


@click.command(epilog="Example: nightmill bench --workload W1,W2 --policy both --json figures.json")
@click.option("--workload", default="W1,W2,W3", show_default=True, help="Workloads, by comma: W1, W2, W3.")
@click.option(
    "--policy",
    type=click.Choice(["continuous", "static", "both"]),
    default="continuous",
    show_default=True,
    help="Continuous batching, static batches in file order, or one after the other.",
)
@click.option(
    "--baseline",
    type=click.Choice(["none", "transformers"]),
    default="none",
    show_default=True,
    help="Rival beside us.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=1, show_default=True, help="Interleaved rounds; medians count."
)
@click.option("--model", default="demo", show_default=True, help="Directory, .gguf, hub id, s3://… or demo.")
@click.option("--dtype", default="auto", show_default=True, help="auto, bfloat16 or float32.")
@click.option("--quantization", type=click.Choice(["int8"]), help="int8 weights: our engine alone, and said so.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=64, show_default=True, help="Sequences at once.")
@click.option("--static-batch", type=click.IntRange(1), default=32, show_default=True, help="Rows of a static batch.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=512, show_default=True, help="Tokens a step.")
@click.option("--page-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a KV page.")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads; default: one a core.")
@click.option("--limit", type=click.IntRange(1), default=None, help="Only the first N rows: not comparable, but quick.")
@click.option(
    "--write-workloads",
    "folder",
    metavar="DIR",
    help="Only write W0 (warm-up) to W3 as .jsonl files, for the runners of other engines.",
)
@click.option("--json", "json_path", default=None, help="Write everything measured to this file; - for stdout.")
def bench(
    workload: str,
    policy: str,
    baseline: str,
    rounds: int,
    model: str,
    dtype: str,
    quantization: str | None,
    max_num_seqs: int,
    static_batch: int,
    max_num_batched_tokens: int,
    page_size: int,
    threads: int | None,
    limit: int | None,
    folder: str | None,
    json_path: str | None,
) -> None:
    """Measure generated tokens/s on the seeded workloads W1 (shared system prompt), W2 (long tail), W3 (summarise).

    Every engine gets the same token ids and must return the same number of tokens. Example:

      nightmill bench --workload W2 --policy both --baseline transformers --rounds 3
    """
    names = _names(workload)
    if folder is not None:
        _write_workloads(Path(folder), model)
        return
    from nightmill_worker.cores import claim_cores, find_cores, plan_cores
    from nightmill_worker.model.device_choice import CPU, expected_device
    from nightmill_worker.model.instruction_set import limit_instruction_set
    from nightmill_worker.model.threads import limit_spinning

    cores = find_cores()
    plan = plan_cores(cores, num_threads=threads)
    if expected_device() == CPU:
        plan = claim_cores(plan, cores)
        plan.pin()
    limit_spinning()  # as in the engine process, and before torch
    limit_instruction_set()
    # torch and the model code load only once the command is really called.
    from nightmill_worker.bench.report import comparison_table
    from nightmill_worker.bench.session import BenchOptions, BenchSession

    console = Console(stderr=True)
    session = BenchSession(
        BenchOptions(
            workloads=names,
            policies=("continuous", "static") if policy == "both" else (policy,),
            baselines=() if baseline == "none" else (baseline,),
            rounds=rounds,
            model=model,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            static_batch=static_batch,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            threads=plan.engine_threads,
            limit=limit,
            quantization=quantization,
        ),
        console.print,
    )
    with _progress(console) as bar:
        cells = session.run(_starter(bar, rounds))
    text = session.json(cells)
    if json_path == "-":
        click.echo(text)
    else:
        Console().print(comparison_table(cells))
        if json_path is not None:
            Path(json_path).write_text(text + "\n")
    wrong = [f"{c.workload} {c.engine}" for c in cells if c.rows_wrong_length]
    if wrong:
        raise click.ClickException(f"rows of the wrong length, figures are void: {', '.join(wrong)}")


def _names(workload: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in workload.split(",") if name.strip())
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown or not names:
        raise click.BadParameter(f"{', '.join(unknown) or 'none given'}; known: {', '.join(WORKLOADS)}")
    return names


def _write_workloads(folder: Path, model: str) -> None:
    from nightmill_worker.bench.workload_files import write_workloads

    for file in write_workloads(folder, model, progress=Console(stderr=True).print):
        w = file.workload
        note = "the reference rows" if w.is_reference else "warm-up" if w.name == "W0" else "other rows than published"
        tokens = f"{w.prompt_tokens:,} tokens in, {w.output_tokens:,} out"
        click.echo(f"{file.path}: {len(w.rows)} rows, {tokens}, sha256 {file.sha256} ({note})")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} rows"))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def _starter(bar: Progress, rounds: int) -> Callable[..., Callable[[int], None]]:
    task = bar.add_task("", total=None)

    def start(contender: object, workload: object, number: int) -> Callable[[int], None]:
        name = getattr(contender, "name", "transformers")
        rows = getattr(workload, "rows", ())
        bar.reset(task, total=len(rows), description=f"{getattr(workload, 'name', '')} {name} {number + 1}/{rounds}")
        return lambda count: bar.advance(task, count)

    return start
