"""results.json, RESULTS.md and the table that is printed last."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.bound import CONTEXT, PREFILL, ROWS, SHARED, StepBound, WorkloadBound
from bench.gpu.conductor import Ending, Outcome
from bench.gpu.facts import Facts
from bench.gpu.notebook import Check, Figure, Table, number

RESULTS = "RESULTS.md"
DATA = "results.json"
_DETAIL = 400
NOT_MEASURED = "not measured on a device"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that one run has to say."""

    facts: Facts
    bounds: Sequence[WorkloadBound]  # from assumed ceilings
    steps: Sequence[StepBound] = ()  # from the same
    is_tiny: bool
    folder: Path

    def save(self, outcomes: Sequence[Outcome]) -> None:
        """Write both files; each is whole at any moment."""
        _write(self.folder / DATA, json.dumps(self._plain(outcomes), indent=1, ensure_ascii=False))
        _write(self.folder / RESULTS, "\n".join(self.markdown(outcomes)) + "\n")

    def _plain(self, outcomes: Sequence[Outcome]) -> dict[str, object]:
        return {
            "measured": self.facts.has_device and not self.is_tiny,
            "facts": asdict(self.facts),
            "bounds_by_assumed_ceilings": [asdict(b) | {"output_tokens_per_s": b.tokens_per_s} for b in self.bounds],
            "steps_by_assumed_ceilings": [asdict(step) for step in self.steps],
            "sections": [
                {
                    "name": o.section.name,
                    "what": o.section.what,
                    "ending": o.ending,
                    "seconds": round(o.seconds, 2),
                    "not_to_be_relied_on": doubts(o, outcomes),
                    **asdict(o.findings),
                    "output": o.output,
                }
                for o in outcomes
            ],
        }

    def markdown(self, outcomes: Sequence[Outcome]) -> Iterator[str]:
        """RESULTS.md, line by line."""
        yield "# Nightmill on a GPU"
        yield ""
        yield "Written by `make gpu` (`python -m bench.gpu`); do not edit."
        yield ""
        yield from self._facts()
        if outcomes:
            yield ""
            yield "| section | | ended | s | checks |"
            yield "|---|---|---|---|---|"
            for o in outcomes:
                passed = sum(check.passed for check in o.findings.checks)
                checks = f"{passed} of {len(o.findings.checks)} passed"
                yield f"| {o.section.name} | {o.section.what} | {o.ending} | {o.seconds:.0f} | {checks} |"
        for outcome in outcomes:
            yield from _section(outcome, doubts(outcome, outcomes))
        yield ""
        yield "## What could be reached at best, by arithmetic"
        yield ""
        yield (
            "From the shapes alone, with assumed ceilings of 4.3 TB/s and 790 TFLOP/s (bf16): no measurement. "
            "A step takes max(weights / bandwidth, linear FLOPs / rate) + max(KV bytes / bandwidth, attention FLOPs / "
            "rate)."
        )
        yield ""
        yield "| workload | model | GB moved | TFLOP | s at least | output tok/s at most |"
        yield "|---|---|---|---|---|---|"
        for b in self.bounds:
            yield (
                f"| {b.workload} | {b.model} | {number(b.num_bytes / 1e9)} | {number(b.flops / 1e12)} "
                f"| {number(b.seconds)} | {number(b.tokens_per_s)} |"
            )
        yield ""
        yield (
            f"Single steps, ms at least: {ROWS} decodes at {CONTEXT:,} tokens, the same with {SHARED} of them shared "
            f"by all rows, {PREFILL:,} tokens of prompts of {CONTEXT:,}; and one such row taken off: copied to the "
            "host at an assumed 55 GB/s, or computed again."
        )
        yield ""
        yield "| model | decode | decode, shared | prefill | swap | recompute |"
        yield "|---|---|---|---|---|---|"
        for step in self.steps:
            times = (step.decode_ms, step.shared_decode_ms, step.prefill_ms, step.swap_ms, step.recompute_ms)
            yield f"| {step.model} | " + " | ".join(map(number, times)) + " |"

    def _facts(self) -> Iterator[str]:
        f = self.facts
        if self.is_tiny:
            yield f"**{NOT_MEASURED.capitalize()}**: tiny shapes on a CPU, to see whether the script still works."
            yield "Times below mean nothing."
        elif not f.has_device:
            yield f"**{NOT_MEASURED.capitalize()}**: this machine has no GPU that torch can use."
            yield "Below is what the arithmetic says. Run `make gpu` on a machine with a GPU."
        yield ""
        yield f"* device: {f.device}, driver {f.driver}"
        yield f"* host: {f.cpu}, {f.num_cpus} CPUs"
        yield f"* python {f.python}, {', '.join(f'{name} {v}' for name, v in f.versions.items())}"
        yield f"* commit {f.commit}"
        yield f"* command: `{f.command}`"

    def last_table(self, outcomes: Sequence[Outcome]) -> Iterator[str]:
        """What is printed last: short, since only the end of the output may travel."""
        yield ""
        yield f"device {self.facts.device}; commit {self.facts.commit}"
        for o in outcomes:
            failed = [check for check in o.findings.checks if not check.passed]
            yield f"{o.section.name:10} {o.ending:8} {o.seconds:6.1f} s  {len(o.findings.checks)} checks"
            for check in failed[:4]:
                yield f"    FAILED {check.name}: {' '.join(check.detail.split())[-_DETAIL:]}"
            doubt = doubts(o, outcomes)
            for figure in o.findings.figures:
                if figure.is_headline:
                    yield f"    {_short(figure)}{f'  [{doubt}]' if doubt else ''}"


def doubts(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Why the figures of a section may mean nothing; empty when its checks, and those it relies on, passed."""
    by_name = {o.section.name: o for o in outcomes}
    reasons = []
    if any(not check.passed for check in outcome.findings.checks):
        reasons.append("its own checks failed")
    for name in outcome.section.relies_on:
        other = by_name.get(name)
        if other is None or other.ending is Ending.NOT_RUN:
            reasons.append(f"{name} not run")
        elif not other.has_passed:
            reasons.append(f"{name} failed")
    return ", ".join(reasons)


def _section(outcome: Outcome, doubt: str) -> Iterator[str]:
    findings = outcome.findings
    yield ""
    yield f"## {outcome.section.name}: {outcome.section.what}"
    if doubt and findings.figures:
        yield ""
        yield f"**Not to be relied on: {doubt}.**"
    if findings.figures:
        yield ""
        yield "| figure | value | | |"
        yield "|---|---|---|---|"
        for f in findings.figures:
            note = ". ".join(filter(None, [f.note, f"**{doubt}**" if doubt else ""]))
            yield f"| {f.name} | {number(f.value)} | {f.unit} | {_cell(note)} |"
    for table in findings.tables:
        yield from _table(table, doubt)
    if findings.checks:
        yield ""
        yield from (_check(check) for check in findings.checks)
    if findings.notes:
        yield ""
        yield from (f"* {_cell(note)}" for note in findings.notes)
    if outcome.output:
        yield from ("", "It said last:", "", "```", *outcome.output.splitlines()[-15:], "```")


def _table(table: Table, doubt: str) -> Iterator[str]:
    yield ""
    yield f"{table.title}{f' (**{doubt}**)' if doubt else ''}:"
    yield ""
    yield f"| {' | '.join(table.columns)} |"
    yield "|---" * len(table.columns) + "|"
    for row in table.rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _check(check: Check) -> str:
    detail = f": {_cell(check.detail[-_DETAIL:])}" if check.detail else ""
    return f"* {'passed' if check.passed else '**FAILED**'}: {check.name}{detail}"


def _short(figure: Figure) -> str:
    note = f" ({figure.note})" if figure.note else ""
    return f"{figure.name}: {number(figure.value)} {figure.unit}{note}"[:220]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text)
    scratch.replace(path)
