"""Steps that overlap: what is submitted when, what waits, and that nothing of it shows in an answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.errors import EngineError
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.drill import Drill
from nightmill_worker.engine.fake import FakeRunnerConfig, expected_tokens
from nightmill_worker.engine.fake_device import FakeDevice
from nightmill_worker.engine.flight import FlightRecorder, describe_flight
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions, PreemptionMode
from nightmill_worker.engine.request import Finished, FinishReason, Request
from nightmill_worker.engine.step import RunsAhead, StepOutput, StepPlan

Make = Callable[..., Any]


def letters(token_ids: Any) -> str:
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


@pytest.fixture
def ahead() -> Make:
    """`ahead(num_pages=…, page_size=…, device_seed=…, **LoopOptions)`: a self-checking engine whose steps overlap."""

    def make(*, device_seed: int = 0, num_pages: int = 256, page_size: int = 4, **options: Any) -> Drill:
        names = ("vocab_size", "fail_token", "num_host_pages")
        rest = {name: options.pop(name) for name in names if name in options}
        config = FakeRunnerConfig(num_pages=num_pages, page_size=page_size, device_seed=device_seed, **rest)
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512, "async_scheduling": True}
        return Drill(config, LoopOptions(**{**limits, **options}), letters)

    return make


class Journal:
    """Takes down the calls of a drill's runner."""

    def __init__(self, drill: Drill) -> None:
        self.calls: list[str] = []
        self.plans: list[StepPlan] = []
        self._runner = drill.runner
        self._submit, self._collect = drill.runner.submit, drill.runner.collect
        drill.runner.submit, drill.runner.collect = self.submit, self.collect
        self._num_collected = 0

    def submit(self, plan: StepPlan) -> None:
        self.calls.append(f"submit {plan.step}")
        self.plans.append(plan)
        self._submit(plan)

    def collect(self) -> StepOutput:
        self.calls.append(f"collect {self._num_collected}")
        self._num_collected += 1
        return self._collect()


def ends_with_a_stop(make_request: Make, request_id: int, num_before: int, **rest: Any) -> Request:
    """A request that ends by a stop token with its `num_before + 1`st token, far from its limit."""
    request = make_request(request_id, 5, max_tokens=num_before + 40, **rest)
    tokens = expected_tokens(request, 1000)[0]
    assert tokens[num_before] not in tokens[:num_before]
    return replace(request, sampling=replace(request.sampling, stop_token_ids=(tokens[num_before],)))


# ---------------------------------------------------------------- what is submitted when


def test_a_step_is_submitted_before_the_one_before_is_collected(ahead, make_request):
    drill = ahead()
    journal = Journal(drill)
    drill.add(make_request(1, 5, max_tokens=4))
    drill.drain()
    assert journal.calls == [
        *("submit 0", "submit 1", "collect 0", "submit 2", "collect 1", "submit 3", "collect 2", "collect 3"),
    ]
    stats = drill.loop.stats()
    assert (stats.steps, stats.steps_ahead) == (4, 3)


def test_a_call_completes_one_step(ahead, make_request):
    drill = ahead()
    drill.add(make_request(1, 5, max_tokens=4))
    for steps in range(1, 5):
        drill.step()
        assert drill.loop.stats().steps == steps
        assert drill.loop.num_in_flight == (steps < 4)


def test_an_unknown_token_is_named_by_its_draw(ahead, make_request):
    """Three rows, of which the second draws nothing in the first step: draws are counted, not rows."""
    drill = ahead(max_num_batched_tokens=10, max_prefill_chunk=4)
    journal = Journal(drill)
    drill.add(make_request(1, 3), make_request(2, 6), make_request(3, 3))
    drill.step()
    first, second = journal.plans
    assert first.token_source is None
    assert first.sample.sequence.tolist() == [0, 2]
    assert second.token_source.tolist() == [0, 1, -1, -1]
    assert second.token_ids[:2].tolist() == [0, 0]
    drill.drain()


def test_a_known_end_is_not_passed(ahead, make_request):
    """max_tokens=1: the prompt's step is the only one; nothing is computed for who has ended."""
    drill = ahead()
    journal = Journal(drill)
    drill.add(*(make_request(i, 5, max_tokens=1 + i % 3) for i in range(6)))
    drill.drain()
    assert [plan.num_sequences for plan in journal.plans] == [6, 4, 2]
    assert drill.loop.stats().padding_tokens == 0


def test_rows_that_need_their_history_wait_for_it(ahead, make_request):
    drill = ahead()
    drill.add(make_request(1, 5, repetition_penalty=1.3), make_request(2, 9))
    answers = drill.drain()
    assert all(answer.error is None for answer in answers.values())
    stats = drill.loop.stats()
    assert stats.steps_ahead == 0
    assert stats.steps == 8


def test_rows_with_penalties_hold_nobody_up_once_they_have_ended(ahead, make_request):
    drill = ahead()
    drill.add(make_request(1, 5, repetition_penalty=1.3, max_tokens=3), make_request(2, 9, max_tokens=20))
    drill.drain()
    assert drill.loop.stats().steps_ahead == 17


def test_prompts_of_rows_with_penalties_are_computed_ahead(ahead, make_request):
    drill = ahead(max_prefill_chunk=4)
    drill.add(make_request(1, 20, presence_penalty=1.0, max_tokens=2))
    drill.drain()
    assert drill.loop.stats().steps_ahead == 4


def test_bans_are_known_ahead(ahead, make_request):
    """min_tokens bans ids by position: no history is needed."""
    request = make_request(1, 5, eos=tuple(range(0, 1000, 2)), min_tokens=6, max_tokens=30)
    drill = ahead()
    journal = Journal(drill)
    drill.add(request)
    drill.drain()
    assert [len(plan.sample.banned) for plan in journal.plans[:8]] == [1] * 6 + [0] * (len(journal.plans[:8]) - 6)
    assert drill.loop.stats().steps_ahead == drill.loop.stats().steps - 1


@pytest.mark.parametrize("options", [{"policy": "static"}, {"async_scheduling": False}])
def test_static_batches_and_the_flag_keep_to_one_step(ahead, make_request, options):
    drill = ahead(**options)
    drill.add(*(make_request(i, 5 + i, max_tokens=3 + i) for i in range(5)))
    drill.drain()
    assert drill.loop.stats().steps_ahead == 0
    assert drill.loop.num_in_flight == 0


def test_a_runner_that_cannot_is_not_asked_to(make_drill, make_request):
    drill = make_drill(async_scheduling=True)
    drill.add(*(make_request(i, 5 + i) for i in range(5)))
    drill.drain()
    assert drill.loop.stats().steps_ahead == 0


# ---------------------------------------------------------------- ends that nobody knew


def test_a_row_that_ends_by_a_stop_was_scheduled_once_more(ahead, make_request):
    request = ends_with_a_stop(make_request, 1, 5)
    drill = ahead()
    drill.add(request, make_request(2, 9, max_tokens=20))
    answers = drill.drain()
    assert len(answers[1].token_ids) == 6
    assert answers[1].finish_reason is FinishReason.STOP
    stats = drill.loop.stats()
    assert stats.padding_tokens == 1
    assert stats.generated_tokens == 26
    assert stats.computed_tokens == 5 + 5 + 9 + 19


def test_pages_of_the_ended_come_free_with_the_last_step_that_uses_them(ahead, make_request):
    request = ends_with_a_stop(make_request, 1, 5)
    drill = ahead(enable_prefix_caching=False)
    drill.add(request, make_request(2, 40, max_tokens=20))
    while not drill.step():
        pass
    pool = drill.loop.pool
    assert pool.num_in_flight == 3  # 11 tokens, the one that was too much included
    free = pool.num_free
    drill.step()
    assert pool.num_in_flight == 0
    assert pool.num_free >= free + 2
    drill.drain()


def test_the_last_of_all_leaves_a_step_behind(ahead, make_request):
    """Everybody has ended, and a step that nobody needs is in flight: it is work until it has been collected."""
    drill = ahead()
    drill.add(ends_with_a_stop(make_request, 1, 5))
    while not drill.step():
        pass
    loop = drill.loop
    assert not loop._live
    assert loop.num_in_flight == 1
    assert loop.has_work
    assert loop.stats().pages_in_flight
    assert drill.step() == []
    assert not loop.has_work
    assert loop.pool.num_in_flight == loop.num_in_flight == 0


def test_full_pages_of_the_ended_are_found_while_their_last_step_is_in_flight(ahead, make_request):
    first = ends_with_a_stop(make_request, 1, 6)
    drill = ahead(page_size=2)
    drill.add(first, make_request(2, 40, max_tokens=20))
    while not drill.step():
        pass
    told = (*first.prompt, *expected_tokens(first, 1000)[0])
    drill.add(make_request(3, told, max_tokens=4))
    answers = drill.drain()
    assert answers[3].num_cached_tokens == len(first.prompt) + 5  # 11 computed: five full pages of two


def test_a_stop_string_ends_a_row_that_runs_ahead(ahead, make_request):
    request = make_request(1, 5, max_tokens=60)
    text = letters(expected_tokens(request, 1000)[0])
    request = replace(request, sampling=replace(request.sampling, stop=(text[20:23],)))
    drill = ahead()
    drill.add(request, make_request(2, 9, max_tokens=50, temperature=1.0))
    answers = drill.drain()
    assert answers[1].stop_match == text[20:23]
    assert drill.loop.stats().steps_ahead > 40


def test_a_row_that_fails_was_scheduled_once_more(ahead, make_request):
    drill = ahead(fail_token=7)
    drill.add(make_request(1, (1, 2, 7, 4), max_tokens=9), make_request(2, 9, max_tokens=9))
    answers = drill.drain()
    assert answers[1].finish_reason is FinishReason.ERROR
    assert answers[1].token_ids == ()
    assert answers[2].finish_reason is FinishReason.LENGTH


# ---------------------------------------------------------------- from outside, between two steps


def test_a_cancelled_row_answers_what_is_known(ahead, make_request):
    drill = ahead()
    drill.add(make_request(1, 5, max_tokens=50), make_request(2, 9, max_tokens=50))
    for _ in range(7):
        drill.step()
    drill.cancel(1)
    assert drill.loop.pool.num_in_flight > 0
    (answer,) = drill.step()
    assert answer.finish_reason is FinishReason.ABORT
    assert len(answer.token_ids) == 7
    drill.drain()


def test_a_row_is_given_to_another_while_its_last_step_is_in_flight(ahead, make_request):
    """One row of the table: what was drawn for the cancelled is not taken for a token of the one after it."""
    drill = ahead(max_num_seqs=1, device_seed=3)
    drill.add(make_request(1, 5, max_tokens=50))
    for _ in range(4):
        drill.step()
    drill.cancel(1)
    drill.add(make_request(2, 9, max_tokens=50))
    drill.step()
    answers = drill.drain()
    assert len(answers[1].token_ids) == 4
    assert len(answers[2].token_ids) == 50


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_a_row_is_taken_off_when_its_step_has_ended(ahead, make_request, mode):
    drill = ahead(num_host_pages=32)
    drill.add(make_request(1, 5, max_tokens=50), make_request(2, 9, max_tokens=50))
    for _ in range(7):
        drill.step()
    steps = drill.loop.stats().steps
    assert drill.preempt(1, mode)
    assert drill.loop.stats().steps == steps + 1
    assert drill.loop.num_in_flight == 0
    assert (drill.loop.stats().swapped == 1) is (mode is PreemptionMode.SWAP)
    drill.drain()


def test_who_has_ended_by_the_time_is_not_taken_off(ahead, make_request):
    drill = ahead()
    drill.add(make_request(1, 5, max_tokens=3), make_request(2, 9, max_tokens=50))
    for _ in range(2):
        drill.step()
    assert not drill.preempt(1)
    (answer,) = [answer for answer in drill.step() if answer.request_id == 1]
    assert len(answer.token_ids) == 3
    drill.drain()


# ---------------------------------------------------------------- what waits for the step


def test_nobody_is_taken_off_while_a_step_is_in_flight(ahead, make_request):
    drill = ahead(num_pages=17, admission="greedy", num_host_pages=64, preemption="swap")
    take_off = drill.loop.preemption.take_off
    in_flight = []

    def watched(*args: Any) -> None:
        in_flight.append(drill.loop.num_in_flight)
        take_off(*args)

    drill.loop.preemption.take_off = watched
    drill.add(*(make_request(i, 6, max_tokens=30) for i in range(4)))
    answers = drill.drain()
    assert len(in_flight) > 2
    assert set(in_flight) == {0}
    assert all(answer.finish_reason is FinishReason.LENGTH for answer in answers.values())
    assert drill.loop.stats().steps_ahead > drill.loop.stats().steps // 3


def test_a_full_pool_takes_off_no_more_than_it_must(ahead, make_drill, make_request):
    """Pages that come free with the step in flight are waited for: nobody else has to go for them."""
    taken = {}
    for name in ("ahead", "sync"):
        drill = ahead(num_pages=21, admission="greedy", async_scheduling=name == "ahead")
        drill.add(*(make_request(i, 6, max_tokens=30, temperature=1.0) for i in range(12)))
        drill.drain()
        taken[name] = drill.loop.stats().preemptions
    assert 0 < taken["ahead"] <= taken["sync"] + 3


def test_an_urgent_row_is_admitted_a_step_later_at_most(ahead, make_request):
    drill = ahead(max_num_seqs=4)
    drill.add(*(make_request(i, 5, max_tokens=200, tier=Tier.LOW) for i in range(4)))
    for _ in range(6):
        drill.step()
    drill.add(make_request(9, 5, max_tokens=2, tier=Tier.HIGH))
    steps = drill.loop.stats().steps
    while drill.loop._live[9].num_cached is None:
        drill.step()
    assert drill.loop.stats().steps <= steps + 2
    drill.drain()


def test_a_prompt_as_large_as_the_pool_waits_for_pages_in_flight(ahead, make_request):
    drill = ahead(num_pages=9, enable_prefix_caching=False, admission="reserve")
    drill.add(ends_with_a_stop(make_request, 1, 5))
    drill.add(make_request(2, 30, max_tokens=2))
    answers = drill.drain()
    assert answers[2].finish_reason is FinishReason.LENGTH


def test_one_that_outgrows_the_pool_fails_alone(ahead, make_request):
    drill = ahead(num_pages=9, admission="greedy")
    drill.add(make_request(1, 10, max_tokens=60), make_request(2, 10, max_tokens=8))
    answers = drill.drain()
    assert "the pool has 8" in answers[1].error
    assert answers[2].finish_reason is FinishReason.LENGTH


# ---------------------------------------------------------------- I20


def same(one: Finished, other: Finished) -> bool:
    names = ("token_ids", "finish_reason", "stop_match", "logprobs", "error", "num_prompt_tokens")
    return all(getattr(one, name) == getattr(other, name) for name in names)


@settings(max_examples=15)
@given(
    rng=st.randoms(use_true_random=False),
    page_size=st.sampled_from([1, 4, 16]),
    tokens=st.sampled_from([100, 200, 2000]),
    host_tokens=st.sampled_from([0, 200]),
)
def test_async_is_sync(rng, page_size, tokens, host_tokens):
    """The same requests, one step at a time and overlapping, with whatever the pool does to them: the same answers."""
    prefix = [rng.randrange(100) for _ in range(40)]
    requests = [
        Request(
            request_id=i,
            job_id=rng.choice("ab"),
            tier=rng.choice(list(Tier)),
            prompt=tuple(prefix[: rng.choice([0, 15, 16, 40])] + [rng.randrange(100)] * rng.randint(1, 9)),
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                max_tokens=rng.randint(1, 30),
                min_tokens=rng.choice([0, 0, 1]),
                stop=rng.choice([(), ("q", "zz")]),
                stop_token_ids=(3, 4, 5),
                repetition_penalty=rng.choice([1.0] * 15 + [1.2]),
                logprobs=rng.choice([None, 2]),
            ),
            seed=rng.getrandbits(64),
        )
        for i in range(14)
    ]
    options = LoopOptions(
        max_num_seqs=rng.choice([1, 3, 6]),
        max_num_batched_tokens=rng.choice([6, 20, 200]),
        max_model_len=96,
        preemption=rng.choice(["swap", "recompute"]),
        admission=rng.choice(["growth", "greedy"]),
    )
    answers = []
    for ahead in (False, True):
        config = FakeRunnerConfig(
            num_pages=1 + tokens // page_size,
            page_size=page_size,
            vocab_size=100,
            num_host_pages=host_tokens // page_size,
            device_seed=rng.getrandbits(16) if ahead else None,
        )
        drill = Drill(config, replace(options, async_scheduling=ahead), letters)
        drill.add(*requests)
        answers.append(drill.drain())
    assert all(same(answers[0][i], answers[1][i]) for i in range(14))


# ---------------------------------------------------------------- what is reported


def test_every_second_is_somebodys(ahead, make_request):
    """Also that of the step which nobody needs any more."""
    drill = ahead()
    drill.add(*(ends_with_a_stop(make_request, i, 3 + i, job_id=f"job-{i % 2}") for i in range(4)))
    drill.drain()
    stats = drill.loop.stats()
    assert sum(work.engine_ns for work in stats.work) + stats.idle_ns == stats.wall_ns
    assert sum(work.computed_tokens for work in stats.work) == stats.computed_tokens
    assert sum(work.generated_tokens for work in stats.work) == stats.generated_tokens
    assert stats.padding_tokens == 4


def test_computed_is_counted_as_without(ahead, make_request):
    """What a job has computed does not depend on whether steps overlap; what is computed in vain is padding."""
    computed = []
    for flag in (True, False):
        drill = ahead(async_scheduling=flag)
        drill.add(*(ends_with_a_stop(make_request, i, 3 + i) for i in range(4)), make_request(9, 50))
        drill.drain()
        stats = drill.loop.stats()
        computed.append((stats.computed_tokens, stats.generated_tokens, stats.finished))
    assert computed[0] == computed[1]


def test_a_flight_recorder_says_that_it_may_be_the_one_before(ahead, make_request, tmp_path):
    drill = ahead()
    loop, path = drill.loop, tmp_path / "flight"
    loop.flight = FlightRecorder(path, loop.table, loop.queue, loop.pool)
    drill.add(make_request(1, 5, max_tokens=30))
    drill.step()
    assert describe_flight(path).startswith("Engine in step 1 or the one before: 1 sequences, 1 tokens;")
    drill.drain()
    assert describe_flight(path).startswith("Engine after step 29: ")


# ---------------------------------------------------------------- the fake device


def test_the_fake_device_runs_ahead_and_the_fake_model_does_not():
    assert isinstance(FakeRunnerConfig(device_seed=1).build(), RunsAhead)
    assert not isinstance(FakeRunnerConfig().build(), RunsAhead)


def test_a_loop_over_a_device_that_crashes_says_so():
    device = FakeDevice(FakeRunnerConfig(crash_token=9, device_seed=0))
    loop = EngineLoop(device, LoopOptions(async_scheduling=True))
    sampling = SamplingParams(max_tokens=3)
    loop.add(Request(request_id=1, job_id="j", tier=Tier.LOW, prompt=(1, 9), sampling=sampling, seed=1))
    with pytest.raises(EngineError, match="crash token"):
        loop.step()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        device.collect()
