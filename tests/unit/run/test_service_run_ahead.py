"""Steps that overlap, behind the engine's pipes; and who asks for them."""

import time
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from nightmill.records import EngineOptions
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.cli.run_options import engine_options, read_engine
from nightmill_worker.engine.fake import FakeRunnerConfig, expected_tokens
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished, FinishReason, Request
from nightmill_worker.engine_start import RunOptions, begin_engine
from nightmill_worker.service import EngineService

OPTIONS = LoopOptions(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, async_scheduling=True)


def request(request_id: int, max_tokens: int, eos: tuple[int, ...] = ()) -> Request:
    return Request(
        request_id=request_id,
        job_id="job",
        tier=Tier.NORMAL,
        prompt=(request_id % 100, 6, 7),
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=request_id,
        eos_token_ids=eos,
    )


def collect(service: EngineService, count: int) -> dict[int, Finished]:
    finished: list[Finished] = []
    deadline = time.monotonic() + 30
    while len(finished) < count:
        assert time.monotonic() < deadline, f"only {len(finished)} of {count} came back"
        finished += service.poll(0.5)
    assert len(finished) == count
    return {answer.request_id: answer for answer in finished}


@pytest.mark.parametrize("in_process", [False, True], ids=["process", "thread"])
def test_every_request_comes_back_once_and_right(in_process: bool) -> None:
    """Some end by a stop that nobody knew; the last of all leaves a step behind that nobody needs."""
    runner = FakeRunnerConfig(vocab_size=100, device_seed=1)
    requests = [request(i, 1 + i % 40, eos=(3, 4, 5) if i % 3 == 0 else ()) for i in range(60)]
    requests.append(request(999, 200, eos=tuple(range(20))))
    with EngineService.start(runner, OPTIONS, in_process=in_process) as service:
        service.submit(requests)
        answers = collect(service, len(requests))
        for each in requests:
            answer = answers[each.request_id]
            assert (answer.token_ids, answer.finish_reason, answer.stop_match) == expected_tokens(each, 100)
        service.submit([request(1000, 5)])  # idle, then work again
        assert len(collect(service, 1)[1000].token_ids) == 5
        service.submit([request(2000, 200), request(2001, 3)])
        service.cancel([2000])
        by_id = collect(service, 2)
        assert by_id[2001].finish_reason is FinishReason.LENGTH
        assert by_id[2000].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        stats = service.stats()
    assert stats is not None
    assert stats.steps_ahead > stats.steps // 2
    assert sum(work.engine_ns for work in stats.work or ()) + stats.idle_ns == stats.wall_ns


@pytest.mark.parametrize(
    ("device", "flag", "expected"),
    [("cpu", None, False), ("cuda", None, True), ("cuda", False, False), ("cpu", True, True)],
)
def test_a_gpu_runs_ahead_unless_told_otherwise(
    device: str, flag: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LoopOptions] = []
    monkeypatch.setattr(EngineService, "begin", lambda runner, options, **rest: seen.append(options))
    model: Any = SimpleNamespace(runner_config=None, directory=None)
    begin_engine(model, RunOptions(engine=EngineOptions(device=device, async_scheduling=flag)))
    assert [options.async_scheduling for options in seen] == [expected]


@pytest.mark.parametrize(
    ("argument", "expected"), [((), None), (("--async-scheduling",), True), (("--no-async-scheduling",), False)]
)
def test_the_flag_is_read(argument: tuple[str, ...], expected: bool | None) -> None:
    seen: list[EngineOptions] = []

    @click.command()
    @engine_options
    def command(**flags: Any) -> None:
        seen.append(read_engine(flags))

    assert CliRunner().invoke(command, argument).exit_code == 0
    assert [options.async_scheduling for options in seen] == [expected]
