"""The table at the end of a run."""

from rich.table import Table

from nightmill.records import JobInfo
from nightmill_worker.report import RunSummary


def summary_table(job: JobInfo, summary: RunSummary) -> Table:
    """What was done, how fast, and where the output is."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _lines(job, summary):
        table.add_row(name, value)
    return table


def _lines(job: JobInfo, s: RunSummary) -> list[tuple[str, str]]:
    lines = [("job", f"{s.job} {job.status.value}"), ("rows", f"{s.rows_ok:,} ok, {s.rows_failed:,} failed")]
    lines += [(f"  {code}", f"{count:,}") for code, count in sorted(s.error_codes.items())]
    if s.rows_resumed or s.rows_recomputed:
        lines.append(("resumed", f"{s.rows_resumed:,} rows were finished before; {s.rows_recomputed:,} computed again"))
    if s.engine_deaths:
        lines.append(("engine", f"died {_times(s.engine_deaths)} and was started again"))
    if s.preemptions:
        kept = f"{s.preemptions_swap:,} kept on the host, {s.preemptions - s.preemptions_swap:,} computed again"
        lines.append(("preempted", f"rows {_times(s.preemptions)} and resumed: {kept}"))
    lines.append(
        ("tokens", f"{s.prompt_tokens:,} prompt ({s.cached_tokens:,} cached), {s.completion_tokens:,} completion")
    )
    if s.steps:
        lines.append(("steps", f"{s.steps:,}, mean batch {s.mean_batch:.1f}"))
        share = (
            "" if s.roofline_share is None else f"; steps at {100 * s.roofline_share:.0f} % of what the device can do"
        )
        lines.append(("speed", f"{s.generated_per_s:,.0f} tokens/s generated{share}"))
    lines.append(("time", f"{s.seconds:.1f} s, peak memory {s.peak_rss_bytes / 2**20:,.0f} MiB"))
    lines.append(("output", s.output))
    return lines


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
