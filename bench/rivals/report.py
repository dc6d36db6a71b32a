"""RESULTS.md, results.json and the picture of one comparison."""

import dataclasses
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.rivals.crew import Crew
from bench.rivals.lineup import OURS
from bench.rivals.materials import Materials
from bench.rivals.picture import draw
from bench.rivals.session import Session
from bench.rivals.standing import SAME_MODEL, Cell, Verdict, cells_of, verdicts_of
from nightmill_worker.bench.machine import Machine, this_machine
from nightmill_worker.bench.roofline import Bound, workload_bound
from nightmill_worker.engine.roofline import Ceilings
from nightmill_worker.model.config import ModelConfig

_GB = 1e9
_ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a session has to say, at any moment of it."""

    session: Session
    crew: Crew
    materials: Materials
    folder: Path
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    machine: Machine = field(default_factory=this_machine)  # before this report changes files of the checkout

    @property
    def results(self) -> Path:
        """The page for people."""
        return self.folder / "RESULTS.md"

    def save(self) -> None:
        """Write all files anew."""
        data = self.folder / "rivals" / "results.json"
        picture = self.folder / "rivals" / "results.svg"
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text(json.dumps(self._plain(), indent=1, ensure_ascii=False) + "\n")
        drawn = draw(picture, self.cells())
        lines = [
            *self._head(),
            *self.tables(),
            *(("", "![generated tokens per second](rivals/results.svg)") if drawn else ()),
        ]
        self.results.write_text("\n".join([*lines, *self._foot()]) + "\n")

    def cells(self) -> list[Cell]:
        """Engine by engine, workload by workload."""
        return cells_of(self.session.runs, OURS, self._bounds())

    def verdicts(self) -> list[Verdict]:
        """Ours against the best rival."""
        return verdicts_of(self.cells(), self.session.runs, OURS)

    def tables(self) -> Iterator[str]:
        """What also goes to the terminal."""
        yield "| workload | engine | tokens/s | range | s | of the bound: sum | overlap | ours is ahead | note |"
        yield "|---|---|---|---|---|---|---|---|---|"
        best = {(v.workload, v.best_rival) for v in self.verdicts()}
        for c in self.cells():
            is_bold = c.rival == OURS or (c.workload, c.rival) in best
            rate = f"{c.tokens_per_s:.1f}"
            shares = (_percent(c.bound_share), _percent(c.overlap_share))
            speed = (f"**{rate}**" if is_bold else rate, f"{c.lowest:.1f}–{c.highest:.1f}", f"{c.seconds:.1f}")
            yield _row(c.workload, c.rival, *speed, *shares, _times(c.ahead), _note(c))
        yield ""
        yield "| workload | best rival | ours / best rival | in the rounds |"
        yield "|---|---|---|---|"
        for v in self.verdicts():
            rounds = "–" if v.lowest_ratio is None else f"{v.lowest_ratio:.2f}–{v.highest_ratio:.2f}"
            yield f"| {v.workload} | {v.best_rival or 'none'} | **{_times(v.ratio)}** | {rounds} |"
        for name, reason in (self.crew.missing | self.session.failures).items():
            yield ""
            yield f"**{name}**: {' '.join(reason.split())}"

    def _bounds(self) -> dict[str, Bound]:
        """By the ceilings that our engine measured when it loaded; none, if it does not take part."""
        ready = self.session.ready.get(OURS)
        if ready is None or "ceilings" not in ready.settings:
            return {}
        ceilings = Ceilings(**ready.settings["ceilings"])
        config = ModelConfig.from_directory(self.materials.models["safetensors"])
        slots = int(ready.settings["max_num_seqs"])
        limit = self.session.limits.rows
        found = {}
        for task in self.session.tasks:
            rows = task.workload.rows[:limit]
            workload = dataclasses.replace(task.workload, rows=rows)
            found[workload.name] = workload_bound(workload, config, ceilings, slots, "bfloat16")
        return found

    def _head(self) -> Iterator[str]:
        machine, limits = self.machine, self.session.limits
        yield "# Nightmill against other engines"
        yield ""
        yield "Written by `make bench-rivals`; do not edit. How it is kept fair: [docs/rivals.md](../docs/rivals.md)."
        yield ""
        minutes = (time.monotonic() - self.began) / 60
        yield (
            f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(self.began_at))} UTC, commit {machine.commit}, "
            f"{machine.cpu}, {self.crew.threads} threads, {_isa()}, Linux {platform.release()}; "
            f"{self.materials.model_name} in bf16; {self.session.rounds_done} of {limits.rounds} rounds in "
            f"{minutes:.1f} minutes."
        )
        if limits.rows is not None:
            yield ""
            yield f"**Only the first {limits.rows} rows of each workload: not the reference figures.**"
        yield ""
        yield (
            "Generated tokens per second of wall time, medians of the rounds. Same token ids in, exactly as many "
            "tokens out as asked for (checked row by row), greedy, prefix caches empty before each run, the other "
            "engines asleep."
        )
        yield ""

    def _foot(self) -> Iterator[str]:
        yield ""
        yield "| workload | rows | tokens in | tokens out | sha256 | sum, s | overlap, s | steps |"
        yield "|---|---|---|---|---|---|---|---|"
        bounds = self._bounds()
        for task in self.session.tasks:
            w, bound = task.workload, bounds.get(task.workload.name)
            least = ("–",) * 3
            if bound is not None:
                least = (f"{bound.sum_s:.1f}", f"{bound.overlap_s:.1f}", str(bound.steps))
            tokens = (f"{w.prompt_tokens:,}", f"{w.output_tokens:,}")
            yield _row(w.name, str(len(w.rows)), *tokens, w.sha256[:16], *least)
        yield ""
        yield (
            "The bound: `sum` adds the least time for a workload's arithmetic and for its memory traffic, `overlap` is "
            "the larger of the two. An engine that reads while it computes, or reads a shared prefix once for many "
            "rows, can be faster than `sum`. Ceilings " + _ceilings(self.session)
        )
        yield ""
        yield "| engine | | ready after, s | most memory, GB | versions | settings |"
        yield "|---|---|---|---|---|---|"
        peaks = {c.rival: c.peak_rss_bytes for c in self.cells()}
        for entrant in self.session.entrants:
            name, ready = entrant.rival.name, self.session.ready.get(entrant.rival.name)
            if ready is None:
                continue
            versions = ", ".join(f"{k} {v}" for k, v in ready.versions.items())
            settings = ", ".join(f"{k}={_short(v)}" for k, v in ready.settings.items() if k != "ceilings")
            peak = f"{peaks[name] / _GB:.1f}" if name in peaks else "–"
            yield _row(name, entrant.rival.what, f"{ready.start_s:.1f}", peak, versions, settings)

    def _plain(self) -> dict[str, Any]:
        return {
            "began_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began_at)),
            "seconds": round(time.monotonic() - self.began, 1),
            "machine": asdict(self.machine) | {"isa": _isa(), "kernel": platform.release()},
            "model": self.materials.model_name,
            "threads": self.crew.threads,
            "limits": asdict(self.session.limits),
            "rounds_done": self.session.rounds_done,
            "workloads": {
                task.workload.name: {"sha256": task.workload.sha256, "is_reference": task.workload.is_reference}
                for task in self.session.tasks
            },
            "bounds": {name: asdict(bound) for name, bound in self._bounds().items()},
            "engines": {
                entrant.rival.name: {
                    "what": entrant.rival.what,
                    "model": entrant.rival.model,
                    "environment": dict(entrant.rival.environment),
                    "rounds": entrant.rival.rounds,
                    "rows": dict(entrant.rival.rows),
                    "ready": asdict(self.session.ready[entrant.rival.name])
                    if entrant.rival.name in self.session.ready
                    else None,
                }
                for entrant in self.session.entrants
            },
            "out": self.crew.missing | self.session.failures,
            "verdicts": [asdict(v) for v in self.verdicts()],
            "cells": [asdict(c) for c in self.cells()],
            "runs": [asdict(r) | {"tokens_per_s": round(r.tokens_per_s, 2)} for r in self.session.runs],
        }


def _note(cell: Cell) -> str:
    notes = []
    if cell.rows_wrong_length:
        notes.append(f"**void: {cell.rows_wrong_length} rows of the wrong length**")
    if cell.same_first_token is not None:
        share = f"{100 * cell.same_first_token:.0f}% of rows begin as ours"
        notes.append(share if cell.same_first_token >= SAME_MODEL else f"**void: only {share}**")
    if not cell.is_whole:
        notes.append(f"first {cell.rows} rows")
    if cell.num_disturbed:
        notes.append(f"{cell.num_disturbed} of {cell.num_runs} runs disturbed")
    notes.append(f"{cell.num_runs} run{'s' if cell.num_runs > 1 else ''}")
    return ", ".join(notes)


def _ceilings(session: Session) -> str:
    ready = session.ready.get(OURS)
    if ready is None or "ceilings" not in ready.settings:
        return "as measured by our engine, which did not run."
    found = ready.settings["ceilings"]
    flops, bandwidth = found["flops"] / 1e9, found["bytes_per_s"] / 1e9
    return f"measured by our engine at its start: {flops:.0f} GFLOP/s, {bandwidth:.1f} GB/s."


def _isa() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown instruction sets"
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return " ".join(flag for flag in _ISA_FLAGS if flag in flags) or "none of " + " ".join(_ISA_FLAGS)


def _short(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
