"""The engine machine with steps that overlap: every invariant of test_engine_machine.py, and I20 (async = sync).

The fake device does what was submitted at a random later moment. Each answer is compared with the oracle, which knows
the request alone; so what runs ahead answers as what does not. Planted bugs show that the machine can fail.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from tests.property import planted_bugs
from tests.property.test_engine_machine import FAIL_TOKEN, VOCAB, EngineMachine, hunting_options, letters, loop_options

from nightmill_worker.engine.drill import Drill
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.fences import Fences
from nightmill_worker.engine.frame import Frame
from nightmill_worker.engine.options import LoopOptions, Policy
from nightmill_worker.engine.run_ahead import AheadStepper
from nightmill_worker.engine.running_table import RunningTable
from nightmill_worker.engine.scheduler import Scheduler


class AheadMachine(EngineMachine):
    """add, step, cancel, preempt, in any order, while a step is in flight."""

    steps_run = 0
    steps_ahead = 0

    @initialize(
        options=loop_options(),
        page_size=st.sampled_from([1, 2, 4, 7]),
        tokens=st.sampled_from([48, 80, 400]),
        host_tokens=st.sampled_from([0, 30, 400]),
        seed=st.integers(0, 2**16),
    )
    def build(self, options: LoopOptions, page_size: int, tokens: int, host_tokens: int, seed: int) -> None:
        self._build_ahead(options, page_size, tokens, host_tokens, seed)

    def _build_ahead(self, options: LoopOptions, page_size: int, tokens: int, host_tokens: int, seed: int) -> None:
        config = FakeRunnerConfig(
            num_pages=1 + tokens // page_size,
            page_size=page_size,
            vocab_size=VOCAB,
            fail_token=FAIL_TOKEN,
            num_host_pages=host_tokens // page_size,
            device_seed=seed,
        )
        self.drill = Drill(config, replace(options, async_scheduling=True), letters)
        self.next_id = 0

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "drill"):
            type(self).steps_ahead += self.drill.loop.counters.steps_ahead


class AheadHunt(AheadMachine):
    """The machine on engines that give the bugs below a chance."""

    @initialize(
        options=hunting_options(),
        page_size=st.sampled_from([1, 2, 4]),
        tokens=st.sampled_from([80, 400]),
        seed=st.integers(0, 2**16),
    )
    def build(self, options: LoopOptions, page_size: int, tokens: int, seed: int) -> None:
        self._build_ahead(replace(options, policy=Policy.CONTINUOUS), page_size, tokens, 400, seed)


def test_steps_that_overlap_keep_the_invariants():
    examples = 3 * settings.default.max_examples
    run_state_machine_as_test(AheadMachine, settings=settings(max_examples=examples, stateful_step_count=40))
    assert AheadMachine.steps_ahead > AheadMachine.steps_run // 3


@pytest.mark.long
def test_steps_that_overlap_keep_the_invariants_for_long():
    before = AheadMachine.steps_run
    profile = settings.get_profile("long")
    run_state_machine_as_test(AheadMachine, settings=settings(profile, stateful_step_count=60))
    assert AheadMachine.steps_run - before > 100_000


def free_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    """Pages come free when their sequence ends, whatever is in flight."""
    patch.setattr(Fences, "is_in_flight", lambda self, step: False)


def land_a_step_too_early(patch: pytest.MonkeyPatch) -> None:
    """Pages come free with the step before the last one that uses them."""
    land = Fences.land
    patch.setattr(Fences, "land", lambda self, step: land(self, step + 1))


def schedule_past_a_known_end(patch: pytest.MonkeyPatch) -> None:
    """A row whose last token is being drawn is scheduled again."""
    patch.setattr(Scheduler, "_may_go_on", lambda self, rows: rows)


def name_the_wrong_draw(patch: pytest.MonkeyPatch) -> None:
    """Each row goes on with the token of the row before it."""
    mark = AheadStepper._mark

    def careless(self: AheadStepper, frame: Frame) -> None:
        mark(self, frame)
        self._parts.table.draw_index[frame.drawing] = np.roll(np.arange(len(frame.drawing)), 1)

    patch.setattr(AheadStepper, "_mark", careless)


def publish_before_collect(patch: pytest.MonkeyPatch) -> None:
    """The pages that a step is to fill are published when it is submitted."""
    mark = AheadStepper._mark

    def hasty(self: AheadStepper, frame: Frame) -> None:
        mark(self, frame)
        self._parts.residency.publish(frame.rows, frame.num_computed)

    patch.setattr(AheadStepper, "_mark", hasty)


def accept_a_stale_epoch(patch: pytest.MonkeyPatch) -> None:
    """What was drawn for a sequence that has ended goes to whoever has its row now."""
    patch.setattr(Frame, "still_there", lambda self, epochs, table, output: (self, output))


def answer_with_what_is_not_known(patch: pytest.MonkeyPatch) -> None:
    """A sequence that ends while a draw of it is pending takes the place of that token for one."""

    def all_of_them(self: RunningTable, row: int) -> tuple[int, ...]:
        return tuple(self.tokens[row, self.prompt_len[row] : self.num_tokens[row]].tolist())

    patch.setattr(RunningTable, "generated", all_of_them)


PLANTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    free_before_the_fence,
    land_a_step_too_early,
    schedule_past_a_known_end,
    name_the_wrong_draw,
    publish_before_collect,
    accept_a_stale_epoch,
    answer_with_what_is_not_known,
)


def hunt(name: str) -> None:
    """Run the machine with a bug in place; EngineError when it is found."""
    planted_bugs.hunt(AheadHunt, PLANTS, name)


@pytest.mark.parametrize("name", [plant.__name__ for plant in PLANTS])
def test_planted_bug_is_caught(name: str):
    found = planted_bugs.hunt_alone("test_run_ahead_machine", name)
    assert found.returncode == 1
    assert re.search(r"EngineError: .*(invariant broken|page pool|not in use)", found.stderr), found.stderr[-2000:]
