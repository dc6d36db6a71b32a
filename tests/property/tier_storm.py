"""Tier storms: random work of every tier on a random engine, with a watch on who gets what and who gives way.

`python -m tests.property.tier_storm --storms 1000` runs the storms with seeds 0 to 999; `--steps N` goes on until so
many engine steps have run. The drill compares each answer with the oracle and audits the engine at every step.
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import click

from nightmill.errors import EngineError
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill.tier_weights import TierWeights
from nightmill_worker.engine.audit import audit_loop
from nightmill_worker.engine.drill import Drill
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.options import AdmissionRule, EvictionRule, LoopOptions, PreemptionMode, QueueOrder
from nightmill_worker.engine.preemption import PreemptionCause
from nightmill_worker.engine.request import FinishReason, Request
from nightmill_worker.engine.sequence import Sequence
from nightmill_worker.engine.victims import MAX_PREEMPTIONS

VOCAB = 97
FAIL_TOKEN = VOCAB - 1
MAX_MODEL_LEN = 96
MAX_TOKENS = 24
_MODES = (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)  # AUTO follows a clock
_HIGH = Tier.HIGH


def _letters(token_ids: Any) -> str:
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


class StormWatch:
    """Sees each decision of a loop as it is made and objects to those that break the tiers' rules."""

    def __init__(self, drill: Drill) -> None:
        self._loop = drill.loop
        self._drill = drill
        self.waits: dict[str, list[int]] = {}  # steps from arrival to first admission, by tier and what it met
        self._first_of_high: set[int] = set()  # arrived when no other of tier high was there
        self.num_taken: Counter[int] = Counter()  # by request, for higher tiers
        self.arrived_at: dict[int, int] = {}  # step
        self._num_taken_now = 0  # victims in this step
        self._lag = dict.fromkeys(Tier, 0.0)
        self._excess = dict.fromkeys(Tier, 0.0)
        self.worst_lag = dict.fromkeys(Tier, 0.0)
        self.steps = 0
        self._account, self._take_off = self._loop.shares.account, self._loop.preemption.take_off
        self._schedule = self._loop.scheduler.schedule
        self._loop.shares.account = self._on_account  # type: ignore[method-assign]
        self._loop.preemption.take_off = self._on_take_off  # type: ignore[method-assign]
        self._loop.scheduler.schedule = self._on_schedule  # type: ignore[method-assign]

    def note_arrival(self, request: Request) -> None:
        """A request is about to be added."""
        self.arrived_at[request.request_id] = self.steps
        others = [sequence for sequence in self._loop._live.values() if sequence.request.tier is _HIGH]
        if request.tier is _HIGH and not others:
            self._first_of_high.add(request.request_id)

    def _on_schedule(self, *, ahead: bool = False) -> Any:
        self._num_taken_now = 0
        waiting = self._loop.queue.head(_HIGH.rank)
        was_known = waiting is not None and self.arrived_at[waiting.request.request_id] <= self.steps
        starving = [tier for tier in (Tier.NORMAL, Tier.LOW) if self._loop.shares.is_starving(tier)]
        schedule = self._schedule(ahead=ahead)
        for request_id in self._loop.scheduler._started:
            tier = self._drill._requests[request_id].tier
            met = "alone" if request_id in self._first_of_high else "others"
            self.waits.setdefault(f"{tier.value}, {met}", []).append(self.steps - self.arrived_at[request_id])
        if ahead and not len(schedule.rows):
            return schedule  # it is decided when the step in flight has ended
        if was_known and not starving and not self._num_taken_now and schedule.outgrown is None:
            self._check_nobody_could_give_high_a_slot(waiting, sum(schedule.counts.tolist()))
        self.steps += 1
        return schedule

    def _check_nobody_could_give_high_a_slot(self, waiting: Sequence, num_tokens: int) -> None:
        """High still waits, nobody was taken from, and the step had tokens left: then no slot could be had."""
        loop, table = self._loop, self._loop.table
        if self._loop.queue.head(_HIGH.rank) is not waiting or num_tokens >= loop.options.max_num_batched_tokens:
            return
        if table.has_free_row:
            return  # it waits for pages
        for row in table.rows().tolist():
            sequence = table.sequence(row)
            left = int(table.max_total[row] - table.num_tokens[row])
            _require(
                sequence.request.tier is _HIGH
                or loop.shares.deficit(sequence.request.tier) > 0
                or left <= table.page_size
                or table.num_tokens[row] < table.immune_until[row]
                or sequence.num_preemptions >= MAX_PREEMPTIONS,
                f"request {waiting.request.request_id} of tier high waits for nobody's slot",
            )

    def _on_take_off(self, sequence: Sequence, cause: PreemptionCause, mode: PreemptionMode | None = None) -> None:
        tier, table = sequence.request.tier, self._loop.table
        if cause is PreemptionCause.TIER:
            self._num_taken_now += 1
            self.num_taken[sequence.request.request_id] += 1
            _require(tier is not _HIGH, "nobody takes from the highest tier")
            _require(self._loop.shares.deficit(tier) <= 0, f"{tier} is below its share and keeps what it has (I13)")
            _require(sequence.num_preemptions < MAX_PREEMPTIONS, "preemptions of a sequence are bounded (I13)")
        elif cause is PreemptionCause.MEMORY:
            self._num_taken_now += 1
            lowest = max(table.sequence(row).request.tier.rank for row in table.rows().tolist())
            _require(tier.rank == lowest, "memory is taken from the lowest tier that runs")
        self._take_off(sequence, cause, mode)

    def _on_account(self, computed: Mapping[Tier, int], wanting: Collection[Tier]) -> None:
        """How far behind its share a tier ever was, over any run of steps in which it had work undone."""
        self._account(computed, wanting)
        total = sum(computed.values())
        for tier in Tier:
            if tier not in wanting:
                self._lag[tier] = 0.0
                continue
            owed = self._loop.shares.share(tier) * total
            self._lag[tier] = max(0.0, self._lag[tier] + owed - computed.get(tier, 0))
            self.worst_lag[tier] = max(self.worst_lag[tier], self._lag[tier])

    def check(self, options: LoopOptions) -> None:
        """I13: no tier is ever more than a window of its share behind, and what it takes for a place to come free."""
        drain = options.max_num_seqs * MAX_MODEL_LEN
        for tier, lag in self.worst_lag.items():
            share = self._loop.shares.share(tier)
            allowed = share * (options.share_window_tokens + drain) + options.max_num_batched_tokens
            _require(
                lag <= allowed, f"{tier} gets its share over a window (I13): {lag:.0f} behind, {allowed:.0f} allowed"
            )


class TierStorm:
    """One random engine and the weather on it.

    Raises:
        EngineError: from `run`, when an invariant breaks.
    """

    def __init__(self, seed: int, *, num_requests: int | None = None, ahead: bool = False) -> None:
        """`ahead`: steps overlap."""
        self._rng = rng = random.Random(seed)
        self.options = replace(self._draw_options(), async_scheduling=ahead)
        page_size = rng.choice([2, 4, 4, 8])
        tokens = rng.choice([100, 200, 400, 1500])
        config = FakeRunnerConfig(
            num_pages=1 + tokens // page_size,
            page_size=page_size,
            vocab_size=VOCAB,
            fail_token=FAIL_TOKEN,
            num_host_pages=rng.choice([0, 8, tokens // page_size]),
            device_seed=seed if ahead else None,
        )
        self.drill = Drill(config, self.options, _letters)
        self.watch = StormWatch(self.drill)
        self._left = num_requests or rng.randint(20, 70)
        self._prefixes = [tuple(rng.randrange(FAIL_TOKEN) for _ in range(48)) for _ in range(3)]
        self._tiers = rng.choice([(1, 1, 1), (1, 3, 8), (1, 0, 5), (5, 1, 1), (0, 1, 1)])
        self._rush = rng.choice([0.15, 0.4, 0.8])  # chance of an arrival between two steps
        self._harm = rng.choice([0.0, 0.02, 0.1])  # chance of a cancel, a preemption, an eviction
        self._cancelled: set[int] = set()

    def run(self) -> int:
        """Let it blow over: steps taken."""
        rng, drill = self._rng, self.drill
        while self._left or drill.loop.has_work:
            while self._left and rng.random() < self._rush:
                self._arrive()
            if rng.random() < self._harm:
                self._harm_somebody()
            drill.step()
            if self.watch.steps > 50_000:
                raise EngineError("invariant broken: the work ends")
        answers = drill.drain()
        for request_id, answer in answers.items():
            if answer.finish_reason is FinishReason.ABORT:
                _require(request_id in self._cancelled, f"request {request_id} was not cancelled")
            elif answer.finish_reason is FinishReason.ERROR:
                _require("fail token" in (answer.error or ""), f"request {request_id} failed: {answer.error}")
        self.watch.check(self.options)
        return self.watch.steps

    def _draw_options(self) -> LoopOptions:
        rng = self._rng
        max_num_seqs = rng.choice([1, 2, 3, 5, 8])
        usual = rng.random() < 0.6  # as by default
        drain = max_num_seqs * MAX_MODEL_LEN
        return LoopOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 3, 20, 100]),
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=rng.random() < 0.8,
            order=QueueOrder.PLANNED if usual else rng.choice(list(QueueOrder)),
            admission=AdmissionRule.GROWTH if usual else rng.choice(list(AdmissionRule)),
            eviction=EvictionRule.FUTURE if usual else rng.choice(list(EvictionRule)),
            preemption=rng.choice(_MODES),
            tier_shares=rng.choice([TierWeights(), TierWeights(), TierWeights(high=1, normal=1, low=1)]),
            share_window_tokens=4 * drain,
            max_bypass_tokens=rng.choice([None, 1, 200]),
        )

    def _arrive(self) -> None:
        rng = self._rng
        self._left -= 1
        request_id = self._left
        own = [rng.randrange(FAIL_TOKEN) for _ in range(rng.choice([1, 2, 5, 20]))]
        if rng.random() < 0.03:
            own[-1] = FAIL_TOKEN
        max_tokens = rng.randint(1, MAX_TOKENS)
        request = Request(
            request_id=request_id,
            job_id=rng.choice("abc"),
            tier=rng.choices(list(Tier), self._tiers)[0],
            prompt=(*rng.choice(self._prefixes)[: rng.choice([0, 0, 7, 16, 48])], *own),
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, 0, max_tokens]),
                stop=rng.choice([(), (), (), ("ab", "q")]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            ),
            seed=rng.getrandbits(64),
            eos_token_ids=rng.choice([(), tuple(range(0, VOCAB, 12))]),
        )
        self.watch.note_arrival(request)
        self.drill.add(request)

    def _harm_somebody(self) -> None:
        rng, drill = self._rng, self.drill
        known = list(drill._requests)
        if not known:
            return
        someone = rng.choice(known)
        what = rng.randrange(4)
        if what == 0:
            self._cancelled.add(someone)
            drill.cancel(someone)
        elif what == 1 and rng.random() < 0.2:
            job_id = rng.choice("abc")
            self._cancelled.update(key for key in known if drill._requests[key].job_id == job_id)
            drill.loop.cancel_job(job_id)
        elif what == 2 and drill.loop.index is not None:
            drill.loop.index.evict(min(rng.randint(1, 30), drill.loop.pool.num_cached))
            audit_loop(drill.loop)
        else:
            drill.preempt(someone, rng.choice(_MODES))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise EngineError(f"invariant broken: {what}")


@click.command()
@click.option("--storms", type=int, default=1000, show_default=True)
@click.option("--steps", type=int, default=0, help="Go on until so many steps have run.")
@click.option("--first-seed", type=int, default=0)
@click.option("--ahead", is_flag=True, help="Steps overlap.")
def main(storms: int, steps: int, first_seed: int, ahead: bool) -> None:
    """Run storms and say what was seen."""
    started, num_steps, count = time.process_time(), 0, 0
    totals: Counter[str] = Counter()
    waits: dict[str, list[int]] = {}
    while count < storms or num_steps < steps:
        storm = TierStorm(first_seed + count, ahead=ahead)
        try:
            num_steps += storm.run()
        except Exception:  # whatever it is: say which storm it was, and fail
            click.echo(f"storm {first_seed + count} after {storm.watch.steps} steps: {storm.options}", err=True)
            raise
        count += 1
        stats = storm.drill.loop.stats()
        totals.update(
            requests=len(storm.drill.answers),
            finished=stats.finished,
            cancelled=stats.aborted,
            failed=stats.errors,
            preempted_for_tier=stats.preemptions_tier,
            preempted_for_memory=stats.preemptions_memory,
            swapped=stats.preemptions_swap,
            most_taken_from_one=0,
        )
        totals["most_taken_from_one"] = max(totals["most_taken_from_one"], *storm.watch.num_taken.values() or [0])
        for name, values in storm.watch.waits.items():
            waits.setdefault(name, []).extend(values)
    seconds = time.process_time() - started
    click.echo(f"{count:,} storms, {num_steps:,} steps, {seconds:.0f} s of one core; {dict(totals)}")
    for name, values in sorted(waits.items()):
        values.sort()
        at = [values[int(q * (len(values) - 1))] for q in (0.5, 0.9, 0.99, 1.0)]
        click.echo(
            f"steps until first admitted, {name} ({len(values):,}): p50 {at[0]}, p90 {at[1]}, p99 {at[2]}, most {at[3]}"
        )


if __name__ == "__main__":
    sys.exit(main())
