"""One engine for many shards: routing, restarts, and the row that ends it (guarantee 4)."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.run.scripted_runner import EXIT, HANG, KILL, RAISE, ScriptedConfig

from nightmill.errors import EngineError, NightmillError, RowErrorCode
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished, Request
from nightmill_worker.service import EngineService
from nightmill_worker.supervisor import EngineSupervisor, FeedLimits, Mailbox, Outcome, Quarantined

POISON = 999
OPTIONS = LoopOptions(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256)


def starter(config: ScriptedConfig, *, in_process: bool = False) -> Callable[[], EngineService]:
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
    supervisor = EngineSupervisor(starter(ScriptedConfig(), in_process=True), FeedLimits.of(8))
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


@pytest.mark.parametrize("what", [EXIT, KILL, RAISE, HANG])
def test_case_I062_the_row_that_ends_the_engine_is_found(what: str, tmp_path: Path) -> None:
    config = ScriptedConfig(traps={POISON: what}, deaths_dir=tmp_path)
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
    assert blamed[0].code is (RowErrorCode.ENGINE_ERROR if what == RAISE else RowErrorCode.QUARANTINED)
    assert "alone" in blamed[0].message
    assert len(list(tmp_path.iterdir())) <= 2 + math.ceil(math.log2(FeedLimits.of(8).max_in_engine))
    # Counters of the dead engines are not lost.
    assert sum(s.finished for s in supervisor.stats()) >= 79


def test_two_poison_rows_are_both_found(tmp_path: Path) -> None:
    config = ScriptedConfig(traps={POISON: EXIT}, deaths_dir=tmp_path)
    supervisor = EngineSupervisor(starter(config), FeedLimits.of(8))
    try:
        with supervisor.open() as mailbox:
            mailbox.offer([request(i, poison=i in (3, 17)) for i in range(30)])
            outcomes = drain(mailbox, 30)
    finally:
        supervisor.close()
    assert {i for i, o in outcomes.items() if isinstance(o, Quarantined)} == {3, 17}


def test_case_I048_a_passing_failure_blames_no_row(tmp_path: Path) -> None:
    config = ScriptedConfig(traps={POISON: RAISE}, deaths_dir=tmp_path, max_deaths=1)
    supervisor = EngineSupervisor(starter(config), FeedLimits.of(8))
    try:
        with supervisor.open() as mailbox:
            mailbox.offer([request(i, poison=i == 5) for i in range(30)])
            outcomes = drain(mailbox, 30)
            assert mailbox.reruns > 0
    finally:
        supervisor.close()
    assert all(isinstance(o, Finished) for o in outcomes.values())


def test_answers_after_a_crash_equal_those_without(tmp_path: Path) -> None:
    answers = []
    for config in (ScriptedConfig(), ScriptedConfig(traps={POISON: KILL}, deaths_dir=tmp_path)):
        supervisor = EngineSupervisor(starter(config), FeedLimits.of(8))
        with supervisor.open() as mailbox:
            mailbox.offer([request(i, poison=i == 9) for i in range(30)])
            outcomes = drain(mailbox, 30)
        supervisor.close()
        answers.append({i: o.token_ids for i, o in outcomes.items() if isinstance(o, Finished) and i != 9})
    assert answers[0] == answers[1]
    assert len(answers[0]) == 29


def test_an_engine_that_never_works_is_given_up(tmp_path: Path) -> None:
    config = ScriptedConfig(die_every_step=True, deaths_dir=tmp_path)
    supervisor = EngineSupervisor(starter(config, in_process=False), FeedLimits.of(2))
    with supervisor.open() as mailbox:
        mailbox.offer([request(i) for i in range(100)])
        with pytest.raises(EngineError, match="times in a row"):
            drain(mailbox, 100)
    supervisor.close()
    assert len(list(tmp_path.iterdir())) <= 40


def test_a_restart_that_fails_reaches_every_shard(tmp_path: Path) -> None:
    configs = iter([ScriptedConfig(traps={POISON: EXIT}), ScriptedConfig(fail_to_build="memory")])
    supervisor = EngineSupervisor(lambda: EngineService.start(next(configs), OPTIONS), FeedLimits.of(8))
    with supervisor.open() as mailbox:
        mailbox.offer([request(1, poison=True)])
        with pytest.raises(NightmillError, match="cannot allocate"):
            drain(mailbox, 1)
    supervisor.close()


def test_closing_a_mailbox_cancels_its_rows_only() -> None:
    supervisor = EngineSupervisor(starter(ScriptedConfig(step_s=0.002), in_process=True), FeedLimits.of(8))
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
    supervisor = EngineSupervisor(starter(ScriptedConfig(), in_process=True), FeedLimits.of(8))
    supervisor.stop_admitting()
    with supervisor.open() as mailbox:
        mailbox.offer([request(1)])
        assert mailbox.collect(0.3, or_room=False) == []
        assert mailbox.in_engine == 0
    supervisor.close()
