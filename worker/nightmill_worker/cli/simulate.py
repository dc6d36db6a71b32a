"""`nightmill simulate`: what a file would take on a device, before it is rented."""

import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status

if TYPE_CHECKING:
    from nightmill_worker.simulate.fleet import FleetSize


class Duration(click.ParamType[float]):
    """Hours, minutes and seconds: 7h30m, 90m, 45s."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse to seconds."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", str(value).strip())
        hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
        total = 3600.0 * hours + 60.0 * minutes + seconds
        if not total:
            self.fail(f"{value!r} is no time; write 7h30m, 90m or 45s", param, ctx)
        return total


_DEVICES = ("h200", "cpu")
_MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.1-8b")


@click.command(epilog="Example: nightmill simulate --trace lengths.csv --device h200 --policy both --within 2h")
@click.option(
    "--trace",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="CSV (or .csv.gz) with ContextTokens,GeneratedTokens; see below.",
)
@click.option("--device", type=click.Choice(_DEVICES), default="h200", show_default=True, help="Whose roofline.")
@click.option("--model", type=click.Choice(_MODELS), default="qwen3-0.6b", show_default=True, help="Whose sizes.")
@click.option(
    "--policy",
    type=click.Choice(["static", "continuous", "both"]),
    default="continuous",
    show_default=True,
    help="static: groups of --max-num-seqs in file order, each ends with its longest row.",
)
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True, help="Sequences at once.")
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1), default=8192, show_default=True, help="Tokens a step."
)
@click.option("--pool-tokens", type=click.IntRange(1), default=None, help="KV pool; default: what the device has left.")
@click.option(
    "--swap-tokens",
    "host_tokens",
    type=click.IntRange(0),
    default=None,
    help="Host pool for KV of rows that give way; 0: compute it again.  [default: a fourth of the pool]",
)
@click.option(
    "--within",
    "within_s",
    type=Duration(),
    metavar="TIME",
    default=None,
    help="Also say how many devices do it in so long: 90m, 7h30m.",
)
@click.option("--page-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a KV page.")
@click.option(
    "--known-lengths/--unknown-lengths",
    "is_length_known",
    default=True,
    show_default=True,
    help="Whether the scheduler knows how long answers get (as with ignore_eos).",
)
@click.option(
    "--admission",
    type=click.Choice(["growth", "reserve", "greedy"]),
    default="growth",
    show_default=True,
    help="By predicted growth; as if every answer got max-tokens long; or as long as prompts fit.",
)
@click.option(
    "--order",
    type=click.Choice(["planned", "arrival"]),
    default="planned",
    show_default=True,
    help="By prefix, blend and length; or first come, first served.",
)
@click.option(
    "--eviction",
    type=click.Choice(["future", "lru"]),
    default="future",
    show_default=True,
    help="Keep the prefixes that waiting requests need; or those used last.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=None, help="Cuts answers off; a MaxTokens column wins.")
@click.option("--json", "json_path", default=None, help="Write the figures to this file; - for stdout.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write a picture (.png, .svg)."
)
@click.option(
    "--events",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Write a CSV of what happened to each request; with --policy both, static's gets .static before the suffix.",
)
def simulate(
    trace: Path,
    policy: str,
    within_s: float | None,
    json_path: str | None,
    plot: Path | None,
    events: Path | None,
    **flags: Any,
) -> None:
    """Run a trace through the real scheduler, with a roofline instead of a device.

    \b
    Optional trace columns: PrefixId,PrefixTokens  rows with the same id share so many leading tokens
                            MaxTokens, Tier (high, normal, low), ArrivalSeconds, Job
    Example:
      nightmill simulate --trace trace.csv --device h200 --model qwen3-0.6b --policy both --plot batch.png
      nightmill simulate --trace trace.csv --model llama-3.1-8b --within 6h      how many devices, to be done by 6 a.m.
    """
    from nightmill_worker.engine.options import AdmissionRule, EvictionRule, Policy, QueueOrder
    from nightmill_worker.simulate.cost_model import DEVICES, MODELS, CostModel
    from nightmill_worker.simulate.fleet import devices_within
    from nightmill_worker.simulate.plot import pyplot, write_plot
    from nightmill_worker.simulate.report import policy_report, summary_table, write_events
    from nightmill_worker.simulate.simulation import Simulation, SimulationOptions
    from nightmill_worker.simulate.trace import read_trace

    if plot is not None:
        pyplot()  # before minutes of work, not after
    device, model = flags.pop("device"), flags.pop("model")
    cost = CostModel(DEVICES[device], MODELS[model])
    options = SimulationOptions(
        cost=cost,
        admission=AdmissionRule(flags.pop("admission")),
        order=QueueOrder(flags.pop("order")),
        eviction=EvictionRule(flags.pop("eviction")),
        **flags,
    )
    rows = read_trace(trace)
    policies = (Policy.STATIC, Policy.CONTINUOUS) if policy == "both" else (Policy(policy),)
    console = Console(stderr=True)
    results = []
    with _progress(console) as bar:
        for each in policies:
            task = bar.add_task(each.value, total=len(rows))
            results.append(Simulation(rows, options, each).run(partial(bar.advance, task)))
    reports = [
        (
            result.policy.value,
            policy_report(rows, result, cost, max_num_seqs=options.max_num_seqs, page_size=options.page_size),
        )
        for result in results
    ]
    for result in results:
        for row, reason in list(result.failed.items())[:3]:
            console.print(f"[yellow]{result.policy.value}: row {row} (from 0) can never run: {reason}")
    if plot is not None:
        write_plot(plot, results, f"{trace.name}, {model} on {device}, {options.max_num_seqs} sequences")
    if events is not None:
        for result in results:
            write_events(_events_path(events, result.policy, policy == "both"), result)
    figures: dict[str, object] = {name: report.as_json() for name, report in reports}
    if within_s is not None:
        if results[-1].policy is not Policy.CONTINUOUS:
            raise click.UsageError("--within is answered for continuous batching: leave out --policy static")
        with console.status("simulating parts of the file") as line:
            told = partial(_tell_devices, line)
            fleet = devices_within(rows, options, within_s, results[-1].recorder.clock_s, told)
        figures["fleet"] = {"within_s": within_s, **asdict(fleet)}
        console.print(_fleet_line(fleet, within_s))
    text = json.dumps(figures, indent=2)
    if json_path == "-":
        click.echo(text)
    else:
        Console().print(summary_table(reports))
        if json_path is not None:
            Path(json_path).write_text(text + "\n")


def _tell_devices(line: Status, devices: int) -> None:
    line.update(f"simulating the parts of {devices:,} devices")


def _fleet_line(fleet: "FleetSize", within_s: float) -> str:
    took = f"{fleet.devices:,} device{'s' if fleet.devices > 1 else ''}: done after {fleet.seconds / 3600:.2f} h"
    if fleet.is_enough:
        return f"{took} (asked: {within_s / 3600:.2f} h; loading the model not counted)"
    return (
        f"[yellow]{took}, and asked were {within_s / 3600:.2f} h: more devices do not make the longest answers shorter"
    )


def _events_path(path: Path, policy: str, is_one_of_two: bool) -> Path:
    return path.with_suffix(f".static{path.suffix}") if is_one_of_two and policy == "static" else path


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} requests"))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
