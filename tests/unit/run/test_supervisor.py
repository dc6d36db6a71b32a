"""One engine for many shards: routing, restarts, and the row that ends it (guarantee 4)."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nightmill.errors import EngineError, NightmillError, RowErrorCode
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished, FinishReason, Request
from nightmill_worker.engine.step import StepOutput, StepPlan
from nightmill_worker.isolation import CONVICT_AFTER_KILLS
from nightmill_worker.scripted_engine import Script, ScriptedRunner
from nightmill_worker.service import EngineService
from nightmill_worker.supervisor import MAX_BARREN_DEATHS, EngineSupervisor, FeedLimits, Mailbox, Outcome, Quarantined

POISON = 999
OPTIONS = LoopOptions(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256)


def starter(config: Script, *, in_process: bool = False) -> Callable[[], EngineService]:
    return lambda: EngineService.start(config, OPTIONS, in_process=in_process, step_timeout_s=1.0)


def request(request_id: int, *, poison: bool = False, max_tokens: int = 4) -> Request:
    return Request(
        request_id=request_id,
        job_id="job",
        tier=Tier.NORMAL,
        prompt=(5, POISON if poison else 6, 7 + request_id % 50),
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=request_id,
    )


def drain(mailbox: Mailbox, count: int, deadline_s: float = 60) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + deadline_s
    while len(outcomes) < count:
        assert time.monotonic() < deadline, f"only {len(outcomes)} of {count}"
        for outcome in mailbox.collect(0.5, or_room=False):
            assert outcome.request_id not in outcomes
            outcomes[outcome.request_id] = outcome
    return outcomes


def test_each_shard_gets_its_own_outcomes() -> None:
    supervisor = EngineSupervisor(starter(Script(), in_process=True), FeedLimits.of(8))
    results: dict[int, dict[int, Outcome]] = {}

    def shard(number: int) -> None:
        with supervisor.open() as mailbox:
            mailbox.offer([request(1000 * number + i) for i in range(40)])
            results[number] = drain(mailbox, 40)

    threads = [threading.Thread(target=shard, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    supervisor.close()
    for number in range(3):
        assert sorted(results[number]) == [1000 * number + i for i in range(40)]


@pytest.mark.parametrize("what", ["exit", "kill", "raise", "hang"])
def test_case_I062_the_row_that_ends_the_engine_is_found(what: str, tmp_path: Path) -> None:
    config = Script(traps={POISON: what}, deaths_dir=tmp_path)
    supervisor = EngineSupervisor(starter(config), FeedLimits.of(8))
    try:
        with supervisor.open() as one, supervisor.open() as other:
            one.offer([request(i, poison=i == 13) for i in range(40)])
            other.offer([request(100 + i) for i in range(40)])
            outcomes, bystanders = drain(one, 40), drain(other, 40)
    finally:
        supervisor.close()
    assert all(isinstance(o, Finished) for o in bystanders.values())
    blamed = [o for o in outcomes.values() if isinstance(o, Quarantined)]
    assert [o.request_id for o in blamed] == [13]
    assert blamed[0].code is (RowErrorCode.ENGINE_ERROR if what == "raise" else RowErrorCode.QUARANTINED)
    assert "alone" in blamed[0].message
    # The suspects are those that had started, eight at most; the others only waited in the engine.
    kills = CONVICT_AFTER_KILLS - 1 if what == "kill" else 0
    assert len(list(tmp_path.iterdir())) <= 2 + math.ceil(math.log2(OPTIONS.max_num_seqs)) + kills
    # Counters of the dead engines are not lost, but for the last moment before a death.
    assert len(supervisor.stats()) > 1
    assert supervisor.stats()[0].steps > 0


def test_two_poison_rows_are_both_found(tmp_path: Path) -> None:
    config = Script(traps={POISON: "exit"}, deaths_dir=tmp_path)
    supervisor = EngineSupervisor(starter(config), FeedLimits.of(8))
    try:
        with supervisor.open() as mailbox:
            mailbox.offer([request(i, poison=i in (3, 17)) for i in range(30)])
            outcomes = drain(mailbox, 30)
    finally:
        supervisor.close()
    assert {i for i, o in outcomes.items() if isinstance(o, Quarantined)} == {3, 17}


@pytest.mark.parametrize("what", ["exit", "kill"])
def test_poison_rows_in_front_of_all_others_are_found(what: str, tmp_path: Path) -> None:
    """Nothing finishes until all three are known: more deaths than an engine may die for nothing."""
    config = Script(traps={POISON: what}, deaths_dir=tmp_path)
    options = replace(OPTIONS, max_num_seqs=64)
    supervisor = EngineSupervisor(lambda: EngineService.start(config, options), FeedLimits.of(64))
    try:
        with supervisor.open() as mailbox:
            mailbox.offer([request(i, poison=i < 3) for i in range(70)])
            outcomes = drain(mailbox, 70, 240)
    finally:
        supervisor.close()
    assert {i for i, o in outcomes.items() if isinstance(o, Quarantined)} == {0, 1, 2}
    assert len(list(tmp_path.iterdir())) > MAX_BARREN_DEATHS


def test_case_I048_a_passing_failure_blames_no_row(tmp_path: Path) -> None:
    config = Script(traps={POISON: "raise"}, deaths_dir=tmp_path, max_deaths=1)
    supervisor = EngineSupervisor(starter(config), FeedLimits.of(8))
    try:
        with supervisor.open() as mailbox:
            mailbox.offer([request(i, poison=i == 5) for i in range(30)])
            outcomes = drain(mailbox, 30)
            assert mailbox.reruns > 0
    finally:
        supervisor.close()
    assert all(isinstance(o, Finished) for o in outcomes.values())


def test_somebody_who_kills_a_row_that_runs_alone_convicts_it_of_nothing(tmp_path: Path) -> None:
    config = Script(traps={POISON: "kill"}, deaths_dir=tmp_path, max_deaths=CONVICT_AFTER_KILLS)
    supervisor = EngineSupervisor(starter(config), FeedLimits.of(8))
    try:
        with supervisor.open() as mailbox:
            mailbox.offer([request(5, poison=True)])
            assert [type(outcome) for outcome in drain(mailbox, 1).values()] == [Finished]
            assert mailbox.reruns == CONVICT_AFTER_KILLS
    finally:
        supervisor.close()


def test_answers_after_a_crash_equal_those_without(tmp_path: Path) -> None:
    answers = []
    for config in (Script(), Script(traps={POISON: "kill"}, deaths_dir=tmp_path)):
        supervisor = EngineSupervisor(starter(config), FeedLimits.of(8))
        with supervisor.open() as mailbox:
            mailbox.offer([request(i, poison=i == 9) for i in range(30)])
            outcomes = drain(mailbox, 30)
        supervisor.close()
        answers.append({i: o.token_ids for i, o in outcomes.items() if isinstance(o, Finished) and i != 9})
    assert answers[0] == answers[1]
    assert len(answers[0]) == 29


def test_an_engine_that_never_works_is_given_up(tmp_path: Path) -> None:
    config = Script(die_every_step=True, deaths_dir=tmp_path)
    supervisor = EngineSupervisor(starter(config, in_process=False), FeedLimits.of(2))
    with supervisor.open() as mailbox:
        mailbox.offer([request(i) for i in range(100)])
        with pytest.raises(EngineError, match="4 rows in a row ended the engine, each alone"):
            drain(mailbox, 100)
    supervisor.close()
    assert len(list(tmp_path.iterdir())) <= 40


def test_a_restart_that_fails_reaches_every_shard(tmp_path: Path) -> None:
    configs = iter([Script(traps={POISON: "exit"}), Script(fail_to_build="memory")])
    supervisor = EngineSupervisor(lambda: EngineService.start(next(configs), OPTIONS), FeedLimits.of(8))
    with supervisor.open() as mailbox:
        mailbox.offer([request(1, poison=True)])
        with pytest.raises(NightmillError, match="cannot allocate"):
            drain(mailbox, 1)
    supervisor.close()


def test_closing_a_mailbox_cancels_its_rows_only() -> None:
    supervisor = EngineSupervisor(starter(Script(step_s=0.002), in_process=True), FeedLimits.of(8))
    with supervisor.open() as other:
        with supervisor.open() as mailbox:
            mailbox.offer([request(i, max_tokens=200) for i in range(8)])
            other.offer([request(100 + i) for i in range(8)])
            while mailbox.in_engine < 8:
                mailbox.collect(0.01, or_room=False)
        assert sorted(drain(other, 8)) == [100 + i for i in range(8)]
    supervisor.close()
    assert supervisor.stats()[-1].aborted == 8


def test_nothing_enters_after_stop_admitting() -> None:
    supervisor = EngineSupervisor(starter(Script(), in_process=True), FeedLimits.of(8))
    supervisor.stop_admitting()
    with supervisor.open() as mailbox:
        mailbox.offer([request(1)])
        assert mailbox.collect(0.3, or_room=False) == []
        assert mailbox.in_engine == 0
    supervisor.close()


def test_a_death_with_thousands_waiting_suspects_only_what_had_started(tmp_path: Path) -> None:
    config = Script(traps={POISON: "exit"}, deaths_dir=tmp_path)
    supervisor = EngineSupervisor(starter(config), FeedLimits.of(8))
    try:
        with supervisor.open() as mailbox:
            mailbox.offer([request(i, poison=i == 700) for i in range(2000)])
            outcomes = drain(mailbox, 2000)
            reruns = mailbox.reruns
    finally:
        supervisor.close()
    assert [i for i, o in outcomes.items() if isinstance(o, Quarantined)] == [700]
    assert len(list(tmp_path.iterdir())) <= 2 + math.ceil(math.log2(8))
    # Eight had started at the first death, half as many at each one after: the thousand that waited lost nothing.
    assert 1 <= reruns <= 8 + 4 + 2 + 1 + 1


def test_a_row_that_ends_the_engine_as_it_comes_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add = EngineLoop.add

    def trip(loop: EngineLoop, request: Request) -> None:
        if POISON in request.prompt:
            raise RuntimeError("no such prompt")
        add(loop, request)

    monkeypatch.setattr(EngineLoop, "add", trip)
    supervisor = EngineSupervisor(starter(Script(), in_process=True), FeedLimits.of(8))
    try:
        with supervisor.open() as mailbox:
            mailbox.offer([request(i, poison=i == 150) for i in range(300)])
            outcomes = drain(mailbox, 300)
    finally:
        supervisor.close()
    assert [i for i, o in outcomes.items() if isinstance(o, Quarantined)] == [150]


def test_a_drain_finishes_what_has_started_and_gives_back_what_waits() -> None:
    supervisor = EngineSupervisor(starter(Script(step_s=0.005), in_process=True), FeedLimits.of(8))
    with supervisor.open() as mailbox:
        mailbox.offer([request(i, max_tokens=20) for i in range(500)])
        while mailbox.running < 8:
            mailbox.collect(0.01, or_room=False)
        supervisor.stop_admitting()
        outcomes: list[Outcome] = []
        while mailbox.in_engine:
            outcomes += mailbox.collect(0.01, or_room=False)
        outcomes += mailbox.collect(0, or_room=False)
        started = set(mailbox.take_started())
        assert supervisor.status().waiting == 500 - len(outcomes)
    supervisor.close()
    assert 8 <= len(outcomes) < 100
    assert {o.request_id for o in outcomes} == started
    assert {o.finish_reason for o in outcomes if isinstance(o, Finished)} == {FinishReason.LENGTH}


def test_a_row_is_named_before_the_step_that_it_ends(tmp_path: Path) -> None:
    config = Script(traps={POISON: "kill"}, deaths_dir=tmp_path, max_deaths=1)
    supervisor = EngineSupervisor(starter(config), FeedLimits.of(8))
    try:
        with supervisor.open() as mailbox:
            mailbox.offer([request(5, poison=True)])
            drain(mailbox, 1)
            assert mailbox.take_started() == [5, 5]  # in the engine that died, and in the next one
            assert mailbox.reruns == 1
    finally:
        supervisor.close()


def test_the_shard_with_the_most_rows_at_risk_is_told_to_flush() -> None:
    limits = replace(FeedLimits.of(8), max_unflushed=10)
    supervisor = EngineSupervisor(starter(Script(), in_process=True), limits)
    with supervisor.open() as one, supervisor.open() as other:
        one.note_unflushed(3)
        other.note_unflushed(6)
        assert not one.must_flush
        assert not other.must_flush
        one.note_unflushed(4)
        assert other.must_flush
        assert not one.must_flush
        assert other.collect(60, or_room=False) == []  # at once
        other.note_unflushed(0)
        assert not other.must_flush
    supervisor.close()


def test_an_idle_engine_waits_until_it_can_plan_with_all() -> None:
    sizes: list[int] = []

    class Spy(ScriptedRunner):
        def run(self, plan: StepPlan) -> StepOutput:
            sizes.append(plan.num_sequences)
            return super().run(plan)

    class SpyConfig(Script):
        def build(self) -> ScriptedRunner:
            return Spy(self)

    limits = replace(FeedLimits.of(8), max_requests=20, quiet_s=600, prime_s=600)
    supervisor = EngineSupervisor(starter(SpyConfig(), in_process=True), limits)
    with supervisor.open() as mailbox:
        for i in range(20):
            assert not sizes
            mailbox.offer([request(i)])
        drain(mailbox, 20)  # the look-ahead was full
    supervisor.close()
    assert sizes[0] == 8


def test_an_idle_engine_begins_once_everything_has_been_offered() -> None:
    limits = replace(FeedLimits.of(8), quiet_s=600, prime_s=600)
    supervisor = EngineSupervisor(starter(Script(), in_process=True), limits)
    with supervisor.open() as mailbox:
        mailbox.offer([request(i) for i in range(3)])
        supervisor.begin_now()
        drain(mailbox, 3)
        mailbox.offer([request(3)])  # a shard that another process has given back
        drain(mailbox, 1)
    supervisor.close()
