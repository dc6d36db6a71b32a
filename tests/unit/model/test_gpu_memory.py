"""How a GPU's memory is divided, and what is said when a model does not fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.contract.runner_subjects import tiny_model

from nightmill.errors import ModelError
from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.engine.step import PoolShape
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.device import Device, DeviceMemory
from nightmill_worker.model.device_choice import StepLimits, resolve_limits
from nightmill_worker.model.device_runner import DeviceRunner
from nightmill_worker.model.device_start import open_device, start_on_device
from nightmill_worker.model.dtype import resolve_dtype
from nightmill_worker.model.dummy import dummy_weights
from nightmill_worker.model.memory import MemoryNeeds, memory_needs, plan_device_pool, weight_bytes
from nightmill_worker.model.pool import plan_device_host_pages
from nightmill_worker.model.runner import ModelRunnerConfig
from nightmill_worker.model.weights import ModelWeights

GIB = 1 << 30
LIMITS = StepLimits(device="cuda", max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return tiny_model(tmp_path)[0]


def needs(**changes: int) -> MemoryNeeds:
    return replace(MemoryNeeds(weights=16 * GIB, activations=2 * GIB, buffers=GIB, graphs=GIB), **changes)


def plan(config: ModelConfig, options: EngineOptions, memory: DeviceMemory, needed: MemoryNeeds) -> PoolShape:
    return plan_device_pool(config, options, needed, memory, dtype="bfloat16", max_model_len=200)


def test_pages_get_what_is_left_of_the_share(config: ModelConfig) -> None:
    """80 GiB, of which 17 are used with the weights loaded; 90 % are 72."""
    memory = DeviceMemory(total=80 * GIB, free=63 * GIB)
    shape = plan(config, EngineOptions(page_size=32), memory, needs())
    assert shape == PoolShape(num_pages=(51 * GIB) // (32 * 256), page_size=32, bytes_per_token=256)
    half = plan(config, EngineOptions(gpu_memory_utilization=0.5), memory, needs())
    assert (half.num_pages, half.page_size) == ((19 * GIB) // (16 * 256), 16)


def test_what_others_hold_is_not_given_to_pages(config: ModelConfig) -> None:
    alone = plan(config, EngineOptions(), DeviceMemory(80 * GIB, 63 * GIB), needs())
    beside = plan(config, EngineOptions(), DeviceMemory(80 * GIB, 43 * GIB), needs())
    assert (alone.num_pages - beside.num_pages) * 16 * 256 == 20 * GIB


def test_a_pool_size_that_was_asked_for_counts_as_long_as_it_fits(config: ModelConfig) -> None:
    memory = DeviceMemory(80 * GIB, 63 * GIB)
    assert plan(config, EngineOptions(pool_bytes=GIB), memory, needs()).num_pages == GIB // (16 * 256)
    with pytest.raises(ModelError, match=r"64\.0 GiB are allowed") as caught:
        plan(config, EngineOptions(pool_bytes=64 * GIB), memory, needs())
    assert "--kv-cache-memory-bytes" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("free", "changes", "said", "hint"),
    [
        (14, {}, "weights 16.0 GiB, a step's activations 2,048 MiB", "--max-model-len"),
        (14, {"activations": 12 * GIB}, "activations 12.0 GiB", "--max-num-batched-tokens"),
        (10, {}, "CUDA and other processes 54.0 GiB", "Others hold 54.0 GiB of it: nvidia-smi"),
    ],
)
def test_a_model_that_leaves_no_pages_is_refused_with_the_account(
    free: int, changes: dict[str, int], said: str, hint: str, config: ModelConfig
) -> None:
    memory = DeviceMemory(total=80 * GIB, free=free * GIB)
    options = EngineOptions(gpu_memory_utilization=0.85)
    with pytest.raises(ModelError, match=said) as caught:
        plan(config, options, memory, needs(**changes))
    assert hint in (caught.value.hint or "")
    assert "--gpu-memory-utilization" in (caught.value.hint or "")
    assert "one sequence of 200 tokens" in caught.value.message


def test_needs_follow_from_shapes(config: ModelConfig) -> None:
    def of(
        limits: StepLimits = LIMITS, *, enforce_eager: bool = False, max_model_len: int = 1024, page_size: int = 16
    ) -> MemoryNeeds:
        return memory_needs(
            config,
            torch.bfloat16,
            DeviceMemory(80 * GIB, 60 * GIB),
            limits,
            weights=7,
            activations=11,
            max_model_len=max_model_len,
            page_size=page_size,
            enforce_eager=enforce_eager,
        )

    usual = of()
    assert (usual.weights, usual.activations, usual.graphs) == (7, 11, GIB)
    assert of(enforce_eager=True).graphs == 0
    assert of(enforce_eager=True).buffers == usual.buffers - 8 * config.vocab_size * 2
    assert of(max_model_len=4096).buffers > usual.buffers
    assert of(replace(LIMITS, max_num_seqs=16)).buffers > usual.buffers
    assert of(page_size=1).buffers - usual.buffers == 4 * 8 * (1024 - 64), "page tables of eight rows"


def test_weights_are_counted_without_being_made(config: ModelConfig, tmp_path: Path) -> None:
    weights = tiny_model(tmp_path)[1]
    tensors = [weights.embedding, weights.final_norm, weights.lm_head]
    for layer in weights.layers:
        tensors += [part for name in layer.__slots__ if (part := getattr(layer, name)) is not None]
    assert weight_bytes(config, torch.float32) == sum(tensor.nbytes for tensor in tensors)


def test_size_of_the_host_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PoolShape(num_pages=1 << 20, page_size=16, bytes_per_token=1 << 10)  # 16 GiB
    for free, pages in ((100 * GIB, 4 * GIB >> 14), (4 * GIB, GIB >> 14)):
        monkeypatch.setattr("nightmill_worker.model.pool._available_memory_bytes", lambda free=free: free)
        assert plan_device_host_pages(shape, EngineOptions()) == pages
    assert plan_device_host_pages(replace(shape, num_pages=40), EngineOptions()) == 10
    assert plan_device_host_pages(shape, EngineOptions(swap_bytes=0)) == 0
    assert plan_device_host_pages(shape, EngineOptions(swap_bytes=4 << 14)) == 4
    assert plan_device_host_pages(shape, EngineOptions(swap_bytes=(4 << 14) + 1)) == 4


def test_no_more_memory_is_locked_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch locks powers of two."""
    monkeypatch.setattr("nightmill_worker.model.pool._available_memory_bytes", lambda: 12 * GIB)
    for page_kib, asked in ((16, None), (16, 5 * GIB), (28, None), (28, 5 * GIB), (28, 8 * GIB), (112, 3 << 20)):
        shape = PoolShape(num_pages=1 << 20, page_size=16, bytes_per_token=page_kib << 6)
        num_bytes = plan_device_host_pages(shape, EngineOptions(swap_bytes=asked)) * (page_kib << 10)
        locked = 1 << (num_bytes - 1).bit_length()
        assert locked <= (asked or 3 * GIB)
        assert 4 * num_bytes > (asked or 3 * GIB), "a page less than the largest power of two, which may be half of it"


# ---------------------------------------------------------------- starting


class SmallDevice(Device):
    """As much memory as it is told; says what a step peaks at."""

    def __init__(self, total: int, free: int, peak: int = 0) -> None:
        super().__init__()
        self._memory = DeviceMemory(total, free)
        self._peak = peak
        self.was_measured = False

    def memory(self) -> DeviceMemory:
        return self._memory

    def peak_of(self, work: Callable[[], None]) -> int:
        work()
        self.was_measured = True
        return self._peak


def start(config: ModelConfig, device: Device, *, load: Callable[..., ModelWeights] | None = None) -> DeviceRunner:
    options = EngineOptions(page_size=4, max_num_seqs=6, max_num_batched_tokens=48, swap_bytes=0)
    return start_on_device(
        config,
        device,
        options,
        resolve_limits(options, "cuda"),
        load or (lambda dtype, where: dummy_weights(config, dtype, where)),
        dtype="float32",
        max_model_len=100,
    )


def test_a_start_measures_the_largest_step_and_sizes_the_pool_by_it(config: ModelConfig) -> None:
    device = SmallDevice(400 << 20, 399 << 20, peak=3 << 20)
    shape = start(config, device).pool
    assert device.was_measured
    larger = start(config, SmallDevice(400 << 20, 399 << 20, peak=1 << 20)).pool
    assert 0 <= (larger.num_pages - shape.num_pages) * 4 * shape.bytes_per_token - (2 << 20) < 4 * shape.bytes_per_token


def test_all_decode_graphs_are_there_when_the_start_is_over(config: ModelConfig) -> None:
    runner = start(config, SmallDevice(GIB, GIB))
    assert runner._graphs is not None
    assert runner._graphs.sizes == (1, 2, 4, 6)
    assert runner._graphs.num_captured == 4


def test_weights_that_do_not_fit_are_not_even_loaded(config: ModelConfig) -> None:
    def load(*_: object) -> ModelWeights:
        raise AssertionError("loaded")

    with pytest.raises(
        ModelError, match=r"the weights .* take .* of the GPU's 1,024 MiB 50,000 bytes are free"
    ) as caught:
        start(config, SmallDevice(GIB, 50_000), load=load)
    assert "nvidia-smi" in (caught.value.hint or "")


@pytest.mark.parametrize("stage", ["loading the weights", "trying the largest step"])
def test_out_of_memory_says_what_to_change(stage: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> ModelWeights:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    device = SmallDevice(GIB, GIB)
    load = fail if stage == "loading the weights" else None
    if load is None:
        monkeypatch.setattr(device, "peak_of", fail)
    with pytest.raises(ModelError, match=f"ran out of memory while {stage}: .*2.00 GiB") as caught:
        start(config, device, load=load)
    for flag in ("--gpu-memory-utilization below 0.9", "--max-num-batched-tokens", "--enforce-eager"):
        assert flag in (caught.value.hint or "")


def test_memory_that_cannot_be_locked_is_another_matter(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SmallDevice(GIB, GIB)

    def fail(*_: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(device, "host_tensor", fail)
    with pytest.raises(
        ModelError, match=r"CUDA ran out of memory while allocating pages and buffers: .*out of memory"
    ) as caught:
        start(config, device)
    assert "--swap-space" in (caught.value.hint or "")


def test_what_a_broken_device_says_is_not_taken_for_a_lack_of_memory(config: ModelConfig) -> None:
    def fail(*_: object) -> ModelWeights:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError, match="illegal"):
        start(config, SmallDevice(GIB, GIB), load=fail)


def test_a_start_says_how_memory_was_divided_and_what_was_recorded(config: ModelConfig) -> None:
    memory, graphs = start(config, SmallDevice(GIB, GIB)).start_notes
    assert memory.startswith("GPU memory: of 1,024 MiB: weights ")
    assert "KV pages" in memory
    assert graphs.startswith("recorded 4 decode graphs in ")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_a_gpu_that_is_too_old(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    made = SmallDevice(GIB, GIB)
    made.capability = capability
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("nightmill_worker.model.cuda_device.CudaDevice", lambda: made)
    if capability >= (8, 0):
        assert open_device("auto") is made
        return
    for requested in ("auto", "cuda"):
        with pytest.raises(ModelError, match=r"7\.5; the kernels need 8\.0") as caught:
            open_device(requested)
        assert "--device cpu" in (caught.value.hint or "")


def test_a_step_longer_than_a_sequence_may_be_is_tried_with_more_sequences(config: ModelConfig) -> None:
    options = EngineOptions(page_size=4, max_num_seqs=2, max_num_batched_tokens=48, swap_bytes=0)
    limits = resolve_limits(options, "cuda")
    runner = start_on_device(
        config,
        SmallDevice(GIB, GIB),
        options,
        limits,
        lambda dtype, where: dummy_weights(config, dtype, where),
        dtype="float32",
        max_model_len=10,
    )
    assert runner.pool.num_pages > 3


# ---------------------------------------------------------------- which device, which dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_so(tmp_path: Path) -> None:
    assert open_device("auto") is None
    assert open_device("cpu") is None
    tiny_model(tmp_path)
    options = EngineOptions(device="cuda")
    spec = ModelSpec(model="tiny", load_format="dummy")
    with pytest.raises(ModelError, match="finds no GPU") as caught:
        ModelRunnerConfig(model_dir=tmp_path, spec=spec, options=options).build()
    assert "--device cpu" in (caught.value.hint or "")
    with pytest.raises(ModelError, match="'tpu' is unknown"):
        open_device("tpu")


def test_dtypes_of_a_gpu(config: ModelConfig) -> None:
    assert resolve_dtype("auto", config, "cuda", capability=(9, 0)) == "bfloat16"
    assert resolve_dtype("auto", config, "cuda", capability=(7, 5)) == "float16"
    assert resolve_dtype("float16", config, "cuda", capability=(9, 0)) == "float16"
    with pytest.raises(ModelError, match="no bfloat16") as caught:
        resolve_dtype("bfloat16", config, "cuda", capability=(7, 5))
    assert "--dtype float16" in (caught.value.hint or "")
