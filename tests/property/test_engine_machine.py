"""Random operations on the engine over the fake model; after each, all invariants hold (see engine/drill.py).

Covered here: I1 to I12, I14, I15, I17, I18, under every rule of order, admission and eviction; tier_storm.py
adds I13. Planted bugs show that the machine can fail.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.property import planted_bugs

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.audit import audit_loop
from nightmill_worker.engine.drill import Drill, WatchedRunner
from nightmill_worker.engine.fairness import DEFAULT_WINDOW_TOKENS
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import AdmissionRule, EvictionRule, LoopOptions, Policy, PreemptionMode, QueueOrder
from nightmill_worker.engine.request import FinishReason, Request
from nightmill_worker.engine.residency import Match, Residency
from nightmill_worker.engine.sequence import Sequence
from nightmill_worker.engine.swap import OwnPages, Swap

VOCAB = 30
MAX_MODEL_LEN = 72
FAIL_TOKEN = VOCAB - 1
PREFIXES = tuple(tuple((i * k + k) % (VOCAB - 1) for i in range(40)) for k in (1, 2, 5))


def letters(token_ids: Any) -> str:
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


@st.composite
def prompts(draw: Any) -> tuple[int, ...]:
    """A piece of one of few prefixes and a short own part: shared pages, partial pages, whole prompts cached."""
    prefix = draw(st.sampled_from(PREFIXES))[: draw(st.integers(0, 40))]
    own = draw(st.lists(st.integers(0, VOCAB - 1 if draw(st.integers(0, 9)) == 0 else 3), max_size=8))
    return (*prefix, *own) or (1,)


@st.composite
def samplings(draw: Any) -> SamplingParams:
    max_tokens = draw(st.integers(1, 24))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.0])),
        top_k=draw(st.sampled_from([0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, 0, max_tokens // 2])),
        stop=draw(st.sampled_from([(), (), ("ab",), ("c", "dea")])),
        stop_token_ids=draw(st.sampled_from([(), (4,)])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        logprobs=draw(st.sampled_from([None, None, 1])),
    )


@st.composite
def loop_options(draw: Any) -> LoopOptions:
    max_num_seqs = draw(st.integers(1, 6))
    return LoopOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 1, 5, 100])),
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        max_prefill_chunk=draw(st.sampled_from([None, None, 1, 3, 4, 5])),
        policy=draw(st.sampled_from(["continuous", "continuous", "continuous", "static"])),
        preemption=draw(st.sampled_from(MODES)),
        # The first of each is the default.
        order=draw(st.sampled_from(list(QueueOrder))),
        admission=draw(st.sampled_from(list(AdmissionRule))),
        eviction=draw(st.sampled_from(list(EvictionRule))),
        enable_shared_attention=draw(st.sampled_from([True, True, False])),
        tier_reserve=draw(st.sampled_from([0.04, 0.0, 0.3])),
        share_window_tokens=draw(st.sampled_from([DEFAULT_WINDOW_TOKENS, 400, 20])),
        max_bypass_tokens=draw(st.sampled_from([None, 1, 40])),
    )


MODES = (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)  # AUTO follows a clock


class EngineMachine(RuleBasedStateMachine):
    """add, step, cancel, preempt, in any order, until everything is drained."""

    drill: Drill
    steps_run = 0  # over all machines, for the report of the long run

    @initialize(
        options=loop_options(),
        page_size=st.sampled_from([1, 2, 4, 7]),
        tokens=st.sampled_from([48, 80, 400]),
        host_tokens=st.sampled_from([0, 30, 400]),
    )
    def build(self, options: LoopOptions, page_size: int, tokens: int, host_tokens: int) -> None:
        self._build(options, page_size, tokens, host_tokens)

    def _build(self, options: LoopOptions, page_size: int, tokens: int, host_tokens: int) -> None:
        config = FakeRunnerConfig(
            num_pages=1 + tokens // page_size,
            page_size=page_size,
            vocab_size=VOCAB,
            fail_token=FAIL_TOKEN,
            num_host_pages=host_tokens // page_size,
        )
        self.drill = Drill(config, options, letters)
        self.next_id = 0

    @rule(
        prompt=prompts(),
        sampling=samplings(),
        tier=st.sampled_from(Tier),
        job=st.sampled_from("ab"),
        eos=st.sampled_from([(), (5, 6)]),
        count=st.integers(1, 3),
        steps=st.integers(0, 3),
    )
    def add(
        self, prompt: Any, sampling: SamplingParams, tier: Tier, job: str, eos: Any, count: int, steps: int
    ) -> None:
        for i in range(count):
            self.next_id += 1
            self.drill.add(
                Request(
                    request_id=self.next_id,
                    job_id=job,
                    tier=tier,
                    prompt=prompt if i == 0 else (*prompt, i),
                    sampling=sampling,
                    seed=self.next_id * 0x9E3779B97F4A7C15 % 2**64,
                    eos_token_ids=eos,
                )
            )
        self.step(steps)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.drill.step()

    @precondition(lambda self: self.next_id)
    @rule(back=st.integers(0, 8))
    def cancel(self, back: int) -> None:
        self.drill.cancel(max(1, self.next_id - back))

    @rule(job=st.sampled_from("ab"))
    def cancel_job(self, job: str) -> None:
        self.drill.loop.cancel_job(job)
        self.drill.step()

    @precondition(lambda self: self.next_id)
    @rule(back=st.integers(0, 8), mode=st.sampled_from(MODES))
    def preempt(self, back: int, mode: PreemptionMode) -> None:
        self.drill.preempt(max(1, self.next_id - back), mode)

    @rule(
        mode=st.sampled_from(MODES),
        cancelled=st.sets(st.integers(0, 2), max_size=2),
        evicted=st.sampled_from([0, 0, 2, 100]),
    )
    def preempt_all(self, mode: PreemptionMode, cancelled: set[int], evicted: int) -> None:
        """Everything that runs, and some of it is cancelled, and what it shared is lost meanwhile."""
        if not self.drill.loop.is_running:
            self.drill.step()
        off = [request_id for request_id in range(1, self.next_id + 1) if self.drill.preempt(request_id, mode)]
        self.drill.cancel(*(off[i] for i in cancelled if i < len(off)))
        self.evict(evicted)

    @rule(count=st.integers(1, 30))
    def evict(self, count: int) -> None:
        """As if somebody had needed the pages."""
        loop = self.drill.loop
        if loop.index is not None:
            loop.index.evict(min(count, loop.pool.num_cached))
            audit_loop(loop)

    @rule()
    def drain(self) -> None:
        self.drill.drain()

    def teardown(self) -> None:
        if hasattr(self, "drill"):
            self.drill.drain()
            type(self).steps_run += self.drill.runner.plans_seen


@st.composite
def hunting_options(draw: Any) -> LoopOptions:
    """Where the planted bugs live: sequences share pages, run side by side, and are swapped."""
    options = draw(loop_options())
    return replace(
        options,
        max_num_seqs=max(3, options.max_num_seqs),
        max_num_batched_tokens=100,
        enable_prefix_caching=True,
        policy=Policy.CONTINUOUS,
        preemption=PreemptionMode.SWAP,
        max_prefill_chunk=None,
    )


class EngineHunt(EngineMachine):
    """The machine on engines that give the bugs below a chance."""

    @initialize(options=hunting_options(), page_size=st.sampled_from([2, 4]), tokens=st.sampled_from([80, 400]))
    def build(self, options: LoopOptions, page_size: int, tokens: int) -> None:
        self._build(options, page_size, tokens, 400)


def test_engine_keeps_its_invariants():
    examples = 2 * settings.default.max_examples
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=examples, stateful_step_count=30))


@pytest.mark.long
def test_engine_keeps_its_invariants_for_long():
    before = EngineMachine.steps_run
    profile = settings.get_profile("long")
    run_state_machine_as_test(EngineMachine, settings=settings(profile, stateful_step_count=60))
    assert EngineMachine.steps_run - before > 100_000


def leak_on_abort(patch: pytest.MonkeyPatch) -> None:
    """A cancelled sequence gives its row back, but not its pages."""
    end = EngineLoop._end

    def leaky(self: EngineLoop, sequence: Sequence, reason: FinishReason, **rest: Any) -> None:
        if reason is FinishReason.ABORT and sequence.row >= 0:
            self.table.num_pages[sequence.row] = max(0, self.table.num_pages[sequence.row] - 1)
        end(self, sequence, reason, **rest)

    patch.setattr(EngineLoop, "_end", leaky)


def publish_before_compute(patch: pytest.MonkeyPatch) -> None:
    """The pages of a prompt are published on admission, before any step has filled them."""
    attach = Residency.attach

    def hasty(self: Residency, sequence: Sequence, match: Match) -> None:
        attach(self, sequence, match)
        if self._index is not None and len(sequence.nodes) > len(match.pages):
            self._publish_row(self._index, sequence.row, len(sequence.nodes))

    patch.setattr(Residency, "attach", hasty)


def stale_match(patch: pytest.MonkeyPatch) -> None:
    """What a sequence matched when it first came to the front is kept over its wait."""
    match = Residency.match
    kept: dict[Sequence, Match] = {}

    def stale(self: Residency, sequence: Sequence, *, may_wait: bool) -> Match:
        now = match(self, sequence, may_wait=may_wait)
        if sequence in kept and len(kept[sequence].pages) + kept[sequence].num_new == len(now.pages) + now.num_new:
            return kept[sequence]
        if now.wait_for is None:
            kept[sequence] = now
        return now

    patch.setattr(Residency, "match", stale)


def restore_to_the_wrong_page(patch: pytest.MonkeyPatch) -> None:
    """Of two pages restored, each gets the other's content."""
    swap_in = WatchedRunner.swap_in

    def twisted(self: WatchedRunner, host_pages: Any, pages: Any) -> None:
        swap_in(self, host_pages, pages[::-1].copy())

    patch.setattr(WatchedRunner, "swap_in", twisted)


def forget_the_lost_prefix(patch: pytest.MonkeyPatch) -> None:
    """Shared pages that were given up with the swap, and lost since, are taken for computed."""
    restore = Swap.restore

    def forgetful(self: Swap, sequence: Sequence) -> None:
        restore(self, sequence)
        row = sequence.row
        if self._table.hole_end[row]:
            self._table.num_computed[row] = self._table.hole_to[row]
            self._table.hole_end[row] = self._table.hole_to[row] = 0

    patch.setattr(Swap, "restore", forgetful)


def swap_shared_pages(patch: pytest.MonkeyPatch) -> None:
    """Pages that others hold are copied too."""

    def greedy(self: Swap, row: int) -> OwnPages:
        num_computed = int(self._table.hole_to[row] or self._table.num_computed[row])
        return OwnPages(0, -(-num_computed // self._table.page_size), num_computed)

    patch.setattr(Swap, "own_pages", greedy)


def keep_host_pages_of_the_cancelled(patch: pytest.MonkeyPatch) -> None:
    """A swapped sequence that is cancelled leaves its host pages behind."""
    patch.setattr(Swap, "drop", lambda self, sequence: None)


PLANTS = (
    leak_on_abort,
    publish_before_compute,
    stale_match,
    restore_to_the_wrong_page,
    forget_the_lost_prefix,
    swap_shared_pages,
    keep_host_pages_of_the_cancelled,
)


def hunt(name: str) -> None:
    """Run the machine with a bug in place; EngineError when it is found."""
    planted_bugs.hunt(EngineHunt, PLANTS, name)


@pytest.mark.parametrize("name", [plant.__name__ for plant in PLANTS])
def test_planted_bug_is_caught(name: str):
    found = planted_bugs.hunt_alone("test_engine_machine", name)
    assert found.returncode == 1
    assert re.search(r"EngineError: .*(invariant broken|page pool)", found.stderr), found.stderr[-2000:]
