"""What is rehearsed: a start, then the engine over rows of every kind, in every way a GPU's options allow."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from bench.gpu.rehearsal.fake_cuda import FakeCuda
from bench.gpu.rehearsal.fake_tensors import FakeTensors
from nightmill.records import EngineOptions
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import AdmissionRule, LoopOptions, PreemptionMode
from nightmill_worker.engine.request import Finished, Request
from nightmill_worker.engine.step import StepPlan
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.device_choice import StepLimits
from nightmill_worker.model.device_runner import DeviceRunner
from nightmill_worker.model.device_start import start_on_device
from nightmill_worker.model.weights import allocate_weights

MAX_SEQS, STEP_TOKENS, MAX_LEN = 32, 512, 1536
_NUM_ROWS, _SHARED, _TOKENS_OUT = 40, 320, 24
_LONG = (
    2 * STEP_TOKENS + 100
)  # tokens of the first row, which is alone for two steps: chunks after which nothing is drawn
_SMALL_POOL = 1600  # tokens: less than what the rows need that run at once
_DRAWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=20, logprobs=3),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.8),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=0),
    SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(7, 8)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a model."""

    name: str
    eager: bool = False
    run_ahead: bool = True
    greedy: bool = False  # all rows; else every way to draw
    preemption: PreemptionMode | None = None  # None: the pool is large enough


WAYS = (
    Way(name="graphs, run-ahead"),
    Way(name="graphs, greedy rows", greedy=True),
    Way(name="graphs, one step at a time", run_ahead=False),
    Way(name="launch by launch", eager=True),
    Way(name="preempted: swapped", preemption=PreemptionMode.SWAP),
    Way(name="preempted: computed again", preemption=PreemptionMode.RECOMPUTE),
)


@dataclass(slots=True)
class Played:
    """What a way came to."""

    steps: int = 0
    most_to_device: int = 0  # copies to the device in a step that swaps nothing
    most_to_host: int = 0
    preemptions: int = 0
    shared_rows: int = 0
    undrawn_steps: int = 0  # chunks of prompts alone
    graph_launches: int = 0  # of kernels, by the graph that has most
    launches_beside_graph: set[int] = field(default_factory=set)  # of kernels, of steps that replayed a graph


def play(config: ModelConfig, dtype: str, way: Way, tensors: FakeTensors) -> Played:
    """Start a runner and answer rows on it.

    Raises:
        AssertionError: A row has not as many tokens as it asked for. And whatever a device would raise.
    """
    runner, device = _start(config, dtype, way, tensors)
    played = Played()
    _watch(runner, tensors, played)
    loop = EngineLoop(runner, _loop_options(way))
    requests = list(_requests(_DRAWS[:1] if way.greedy else _DRAWS))
    ended: list[Finished] = []
    loop.add(requests[0])
    for _ in range(2):
        ended += loop.step()
    for request in requests[1:]:
        loop.add(request)
    while loop.has_work:
        ended += loop.step()
    lengths = {one.request_id: len(one.token_ids) for one in ended}
    assert lengths == {request.request_id: request.sampling.max_tokens for request in requests}, lengths
    stats = loop.stats()
    played.steps, played.preemptions, played.shared_rows = stats.steps, stats.preemptions, stats.shared_attention_rows
    played.graph_launches = max((graph.num_launches for graph in device.graphs), default=0)
    runner.close()
    return played


def _start(config: ModelConfig, dtype: str, way: Way, tensors: FakeTensors) -> tuple[DeviceRunner, FakeCuda]:
    device = FakeCuda(tensors)
    is_tight = way.preemption is not None
    options = EngineOptions(
        device="cuda",
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        pool_bytes=config.kv_bytes_per_token(dtype) * _SMALL_POOL if is_tight else None,
        swap_bytes=config.kv_bytes_per_token(dtype) * _SMALL_POOL if way.preemption is PreemptionMode.SWAP else 0,
        enforce_eager=way.eager,
    )
    runner = start_on_device(
        config,
        device,
        options,
        StepLimits(device="cuda", max_num_seqs=MAX_SEQS, max_num_batched_tokens=STEP_TOKENS),
        lambda kind, where: allocate_weights(config, kind, where),
        dtype=dtype,
        max_model_len=MAX_LEN,
    )
    return runner, device


def _loop_options(way: Way) -> LoopOptions:
    return LoopOptions(
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=MAX_LEN,
        async_scheduling=way.run_ahead,
        # Only who admits more than fits has to preempt.
        admission=AdmissionRule.GROWTH if way.preemption is None else AdmissionRule.GREEDY,
        preemption=way.preemption or PreemptionMode.AUTO,
    )


def _requests(draws: Sequence[SamplingParams]) -> Iterator[Request]:
    """Half of them begin alike; the first is longer than two steps."""
    random = Random(3)
    shared = tuple(random.choices(range(1000), k=_SHARED))
    for number in range(_NUM_ROWS):
        own = tuple(random.choices(range(1000), k=random.randint(1, 90) if number else _LONG))
        sampling = draws[number % len(draws)]
        yield Request(
            request_id=number,
            job_id="rehearsal",
            tier=Tier.NORMAL,
            prompt=shared + own if number % 2 else own,
            sampling=SamplingParams(
                **{name: getattr(sampling, name) for name in SamplingParams.__slots__}
                | {"max_tokens": _TOKENS_OUT + number % 5, "ignore_eos": True}
            ),
            seed=number,
        )


def _watch(runner: DeviceRunner, tensors: FakeTensors, played: Played) -> None:
    """Look at every step that is submitted."""
    submit, traffic = runner.submit, runner.device.traffic

    def watched(plan: StepPlan) -> None:
        before = traffic.snapshot()
        with tensors.stepping() as recording:
            submit(plan)
        cost = traffic.since(before)
        played.most_to_device = max(played.most_to_device, cost.to_device)
        played.most_to_host = max(played.most_to_host, cost.to_host)
        played.undrawn_steps += not len(plan.sample.token_index)
        if cost.replays:
            played.launches_beside_graph.add(recording.launches.total())

    runner.submit = watched  # type: ignore[method-assign]
