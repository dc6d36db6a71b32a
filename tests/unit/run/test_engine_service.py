"""The engine behind its pipes: both as a process and as a thread."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nightmill.errors import EngineError, ModelError
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished, FinishReason, Request
from nightmill_worker.scripted_engine import Script
from nightmill_worker.service import DeathCause, EngineDiedError, EngineService
from nightmill_worker.wire import EngineSetup

POISON = 999
OPTIONS = LoopOptions(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256)


def request(request_id: int, *, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 4) -> Request:
    return Request(
        request_id=request_id,
        job_id="job",
        tier=Tier.NORMAL,
        prompt=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=request_id,
    )


def test_closing_while_the_process_is_being_spawned_leaves_nothing_behind() -> None:
    setup = EngineSetup(
        runner_config=Script(load_s=60),
        loop_options=OPTIONS,
        tokenizer_dir=None,
        parent_pid=os.getpid(),
        step_timeout_s=None,
        dump_path=None,
    )
    service = EngineService(setup, max_outstanding=8)
    service._attendant.start()
    service.close(timeout_s=0)
    assert not service._attendant.is_alive()
    assert service._process is None or not service._process.is_alive()


def collect(service: EngineService, count: int, deadline_s: float = 30) -> list[Finished]:
    finished: list[Finished] = []
    deadline = time.monotonic() + deadline_s
    while len(finished) < count:
        assert time.monotonic() < deadline, f"only {len(finished)} of {count} came back"
        finished += service.poll(0.5)
    return finished


def wait_dead(service: EngineService, deadline_s: float = 10) -> EngineError:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        try:
            service.poll(0.2)
        except EngineError as error:
            return error
    raise AssertionError("the engine lives")


@pytest.fixture(params=[False, True], ids=["process", "thread"])
def in_process(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def services() -> Iterator[list[EngineService]]:
    started: list[EngineService] = []
    yield started
    for service in started:
        service.close(timeout_s=0.5)


def test_every_request_comes_back_once(in_process: bool) -> None:
    with EngineService.start(Script(), OPTIONS, in_process=in_process) as service:
        assert service.info.pool.page_size == 16
        service.submit([request(i, max_tokens=1 + i % 9) for i in range(50)])
        finished = collect(service, 50)
        assert sorted(f.request_id for f in finished) == list(range(50))
        assert all(f.finish_reason is FinishReason.LENGTH for f in finished)
        assert {f.request_id: len(f.token_ids) for f in finished} == {i: 1 + i % 9 for i in range(50)}
        assert service.outstanding == 0
        stats = service.stats()
        assert stats is not None
        assert stats.finished == 50
        service.submit([request(100)])  # idle, then work again
        assert collect(service, 1)[0].request_id == 100


def test_process_and_thread_give_the_same_tokens() -> None:
    answers = []
    for in_process in (False, True):
        with EngineService.start(Script(), OPTIONS, in_process=in_process) as service:
            service.submit([request(i, prompt=(5 + i, 6, 7), max_tokens=7) for i in range(20)])
            answers.append({f.request_id: f.token_ids for f in collect(service, 20)})
    assert answers[0] == answers[1]


def test_cancel_ends_a_request_once(in_process: bool) -> None:
    with EngineService.start(Script(step_s=0.005), OPTIONS, in_process=in_process) as service:
        service.submit([request(1, max_tokens=200), request(2, max_tokens=3)])
        service.cancel([1])
        by_id = {f.request_id: f for f in collect(service, 2)}
        assert by_id[1].finish_reason is FinishReason.ABORT
        assert by_id[2].finish_reason is FinishReason.LENGTH


def test_submit_blocks_at_the_bound() -> None:
    with EngineService.start(Script(), OPTIONS, in_process=True, max_outstanding=4) as service:
        service.submit([request(i) for i in range(4)])
        submitted = threading.Event()

        def submit_one_more() -> None:
            service.submit([request(4)])
            submitted.set()

        thread = threading.Thread(target=submit_one_more)
        thread.start()
        # The four are finished soon, but nobody has polled them: the bound is on what the caller holds.
        assert not submitted.wait(0.3)
        collect(service, 5)
        thread.join(5)
        assert submitted.is_set()


@pytest.mark.parametrize(
    ("what", "cause", "words"),
    [
        ("exit", DeathCause.EXIT, "exited with code 3"),
        ("kill", DeathCause.KILL, "SIGKILL"),
        ("segv", DeathCause.SIGNAL, "SIGSEGV"),
        ("raise", DeathCause.EXCEPTION, "CUDA out of memory"),
    ],
)
def test_a_dead_engine_says_how_it_died(
    what: str, cause: DeathCause, words: str, services: list[EngineService]
) -> None:
    service = EngineService.start(Script(traps={POISON: what}), OPTIONS)
    services.append(service)
    service.submit([request(0), request(1)])
    assert len(collect(service, 2)) == 2
    service.submit([request(2, prompt=(5, POISON))])
    error = wait_dead(service)
    assert isinstance(error, EngineDiedError)
    assert error.cause is cause
    assert words in error.message
    if what == "raise":
        assert "scripted_engine.py" in error.detail
    if what == "segv":
        assert "Segmentation fault" in error.detail
    with pytest.raises(EngineError):
        service.submit([request(3)])


def test_an_exception_in_a_thread_engine_surfaces_too(services: list[EngineService]) -> None:
    service = EngineService.start(Script(traps={POISON: "raise"}), OPTIONS, in_process=True)
    services.append(service)
    service.submit([request(2, prompt=(5, POISON))])
    error = wait_dead(service)
    assert isinstance(error, EngineDiedError)
    assert error.cause is DeathCause.EXCEPTION


def test_the_watchdog_ends_a_hanging_step(services: list[EngineService]) -> None:
    service = EngineService.start(Script(traps={POISON: "hang"}), OPTIONS, step_timeout_s=1.0)
    services.append(service)
    service.submit([request(2, prompt=(5, POISON))])
    error = wait_dead(service, deadline_s=20)
    assert isinstance(error, EngineDiedError)
    assert error.cause is DeathCause.HANG
    assert "no engine step completed for 1 s" in error.message
    assert "scripted_engine.py" in error.detail  # the stack that hangs
    assert "Engine in step 0: 1 sequences, 2 tokens; 0 waiting" in error.detail
    assert "request 2: 0 of 2 tokens computed" in error.detail


def test_an_idle_engine_is_not_hanging() -> None:
    with EngineService.start(Script(), OPTIONS, step_timeout_s=0.5) as service:
        service.submit([request(0)])
        collect(service, 1)
        for _ in range(4):
            assert service.poll(0.3) == []  # longer than the watchdog's limit in all


def test_a_failed_start_has_the_engines_message(in_process: bool) -> None:
    with pytest.raises(ModelError, match="no such model here") as caught:
        EngineService.start(Script(fail_to_build="model"), OPTIONS, in_process=in_process)
    assert caught.value.hint == "give another --model"
    with pytest.raises(EngineError, match="cannot allocate 64 GiB"):
        EngineService.start(Script(fail_to_build="memory"), OPTIONS, in_process=in_process)


def test_an_engine_that_exits_while_starting_is_an_error() -> None:
    with pytest.raises(EngineError, match="exited with code 7"):
        EngineService.start(Script(fail_to_build="exit"), OPTIONS)


def test_close_is_idempotent_and_bounded(in_process: bool) -> None:
    service = EngineService.start(Script(step_s=0.01), OPTIONS, in_process=in_process)
    service.submit([request(0, max_tokens=200)])
    service.close()
    service.close()
    with pytest.raises(EngineError, match="closed"):
        service.submit([request(1)])
    with pytest.raises(EngineError, match="closed"):
        service.poll(0)


def test_close_kills_a_hanging_engine() -> None:
    service = EngineService.start(Script(traps={POISON: "hang"}), OPTIONS)
    pid = service.info.pid
    service.submit([request(2, prompt=(5, POISON))])
    service.close(timeout_s=0.3)
    assert not psutil.pid_exists(pid)


def test_ctrl_c_for_the_group_leaves_the_engine_alone() -> None:
    with EngineService.start(Script(), OPTIONS) as service:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(service.info.pid, number)
        service.submit([request(0)])
        assert len(collect(service, 1)) == 1


ORPHAN = """
import sys, time
from nightmill_worker.scripted_engine import Script
from tests.unit.run.test_engine_service import OPTIONS, request
from nightmill_worker.service import EngineService
if __name__ == "__main__":
    service = EngineService.start(Script(step_s=float(sys.argv[1])), OPTIONS)
    service.submit([request(0, max_tokens=250)])
    print(service.info.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("step_s", ["0.01", "300"], ids=["stepping", "inside a step"])
def test_the_engine_dies_with_its_parent(step_s: str, tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        [sys.executable, script, step_s], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([engine], timeout=10)
    assert not alive
