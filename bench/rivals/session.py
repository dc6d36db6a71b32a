"""The rounds: engines take turns on each workload while the others sleep, so that a noisy minute hits them all."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.rivals.engine_process import Answer, EngineError, EngineProcess, Ready
from bench.rivals.machine_watch import MachineWatch, Usage
from bench.rivals.rival import Rival, Run
from nightmill_worker.bench.workload import Workload

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Entrant:
    """An engine that is installed, with the child that will run it."""

    rival: Rival
    process: EngineProcess


@dataclass(frozen=True, slots=True)
class Task:
    """A workload and the file that engines read it from."""

    workload: Workload
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How often and how long."""

    rounds: int = 3
    rows: int | None = None  # of each workload
    tries: int = 3  # of a disturbed run
    minutes: float | None = None  # no round begins that would end later, by how long the one before took
    start_s: float = 600.0
    run_s: float = 900.0
    quiet_s: float = 60.0  # how long to wait for other processes before a run


@dataclass(kw_only=True)
class Session:
    """All runs of one comparison; `runs`, `ready` and `failures` are filled as it goes."""

    entrants: Sequence[Entrant]
    tasks: Sequence[Task]
    limits: Limits
    watch: MachineWatch
    say: Say
    after_round: Callable[[], None] = lambda: None
    runs: list[Run] = field(default_factory=list, init=False)
    ready: dict[str, Ready] = field(default_factory=dict, init=False)
    failures: dict[str, str] = field(default_factory=dict, init=False)
    rounds_done: int = field(default=0, init=False)
    _first_tokens: dict[str, list[int | None]] = field(default_factory=dict, init=False)

    def run(self) -> None:
        """Load all engines, run all rounds, end all engines. An engine that fails is out; the rest goes on."""
        began = time.monotonic()
        try:
            for entrant in self.entrants:
                self._start(entrant)
            self._keep_time(began)
        finally:
            for entrant in self.entrants:
                entrant.process.stop()

    def _start(self, entrant: Entrant) -> None:
        name = entrant.rival.name
        self.say(f"loading {name}")
        try:
            self.ready[name] = entrant.process.start(self.limits.start_s)
            self.say(f"{name} is ready after {self.ready[name].start_s:.1f} s")
        except EngineError as error:
            self._fail(name, f"did not load: {error}")

    def _keep_time(self, began: float) -> None:
        longest = 0.0
        for number in range(1, self.limits.rounds + 1):
            started = time.monotonic()
            ends_at = started - began + longest
            if number > 1 and self.limits.minutes is not None and ends_at > 60 * self.limits.minutes:
                self.say(f"round {number} would not end within {self.limits.minutes:g} minutes: left out")
                return
            self._round(number)
            self.rounds_done = number
            longest = max(longest, time.monotonic() - started)
            self.after_round()

    def _round(self, number: int) -> None:
        for task in self.tasks:
            # Another one begins in each round: coming first after a pause is no engine's privilege.
            turn = (number - 1) % max(1, len(self.entrants))
            for entrant in [*self.entrants[turn:], *self.entrants[:turn]]:
                is_due = entrant.rival.rounds is None or number <= entrant.rival.rounds
                if entrant.rival.name not in self.failures and is_due:
                    self._take_turn(entrant, task, number)

    def _take_turn(self, entrant: Entrant, task: Task, number: int) -> None:
        name = entrant.rival.name
        try:
            tried = []
            for attempt in range(1, self.limits.tries + 1):
                tried.append(self._run(entrant, task, number, attempt))
                if not tried[-1].is_disturbed:
                    break
            self.runs.append(min(tried, key=lambda run: run.other_cores + run.steal_cores))
        except EngineError as error:
            self._fail(name, f"{task.workload.name}, round {number}: {error}")

    def _run(self, entrant: Entrant, task: Task, number: int, attempt: int) -> Run:
        process = entrant.process
        limits = (self.limits.rows, entrant.rival.rows.get(task.workload.name))
        limit = min((n for n in limits if n is not None), default=None)
        process.prepare(task.file, limit, self.limits.start_s)
        if not self.watch.wait_until_quiet(self.limits.quiet_s):
            self.say(
                f"other processes do not leave the machine alone for {self.limits.quiet_s:.0f} s: running all the same"
            )
        before = self.watch.read(process.pid)
        answer = process.run(self.limits.run_s)
        usage = self.watch.usage(before, self.watch.read(process.pid))
        run = self._judged(entrant.rival.name, task.workload, limit, answer, usage, number, attempt)
        disturbed = f"; DISTURBED by {usage.other_cores:.2f} cores of others, {usage.steal_cores:.2f} stolen"
        self.say(
            f"round {number} {run.workload} {run.rival}: {run.tokens_per_s:.1f} tokens/s in {run.seconds:.1f} s"
            + (disturbed if run.is_disturbed else "")
            + (f"; {run.rows_wrong_length} ROWS OF THE WRONG LENGTH" if run.rows_wrong_length else "")
            + (f"; {100 * run.same_first_token:.0f}% begin as ours" if run.same_first_token is not None else "")
        )
        return run

    def _judged(
        self, name: str, workload: Workload, limit: int | None, answer: Answer, usage: Usage, number: int, attempt: int
    ) -> Run:
        rows = workload.rows[:limit]
        if len(answer.tokens) != len(rows):
            raise EngineError(f"answered {len(answer.tokens)} of {len(rows)} rows")
        pairs = list(zip(rows, answer.tokens, strict=True))
        process = next(entrant.process for entrant in self.entrants if entrant.rival.name == name)
        return Run(
            rival=name,
            workload=workload.name,
            round=number,
            attempt=attempt,
            rows=len(rows),
            is_whole=len(rows) == len(workload.rows),
            prompt_tokens=sum(len(row.prompt_ids) for row in rows),
            output_tokens=sum(min(row.max_tokens, len(tokens)) for row, tokens in pairs),
            seconds=answer.seconds,
            cpu_s=usage.tree_cpu_s,
            other_cores=usage.other_cores,
            steal_cores=usage.steal_cores,
            is_disturbed=not usage.is_quiet,
            peak_rss_bytes=self.watch.peak_rss_bytes(process.pid),
            rows_wrong_length=sum(len(tokens) != row.max_tokens for row, tokens in pairs),
            same_first_token=self._agreement(name, workload.name, answer),
            detail=answer.detail,
        )

    def _agreement(self, name: str, workload: str, answer: Answer) -> float | None:
        first: list[int | None] = [tokens[0] if tokens else None for tokens in answer.tokens]
        if name == self.entrants[0].rival.name:
            self._first_tokens[workload] = first
            return None
        ours = self._first_tokens.get(workload)
        if not ours or not first:
            return None
        compared = list(zip(ours, first, strict=False))
        return sum(a == b for a, b in compared) / len(compared)

    def _fail(self, name: str, reason: str) -> None:
        self.failures[name] = reason
        self.say(f"{name} is out: {reason}")
