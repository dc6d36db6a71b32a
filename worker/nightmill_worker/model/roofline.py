"""What a model costs, and what the device it runs on can do at best: measured when a model is loaded."""

import time
from collections import Counter
from collections.abc import Callable
from functools import cache

import torch

from nightmill_kernels.cpu.huge_pages import zeroed_on_touch
from nightmill_worker.engine.roofline import Ceilings, ModelCost, Roofline
from nightmill_worker.model.config import DTYPE_BYTES, ModelConfig
from nightmill_worker.model.linear import Linear
from nightmill_worker.model.linear_int8 import Int8Linear

_CPU_GEMM, _CUDA_GEMM = (1024, 576, 1536), (8192, 8192, 8192)
_CPU_READ_BYTES, _CUDA_COPY_BYTES = 128 << 20, 512 << 20  # more than the caches hold
_MIN_RUNS, _CPU_SECONDS = 3, 0.05  # of each measurement on a CPU
_CUDA_RUNS = 10


def model_roofline(config: ModelConfig, dtype: str, device: torch.device, quantization: str | None = None) -> Roofline:
    """A model on this process's device; measures the device the first time, in about 0.2 s."""
    ceilings = measure_ceilings(device, getattr(torch, dtype), quantization)
    return Roofline(model_cost(config, dtype, quantization), ceilings)


def model_cost(config: ModelConfig, dtype: str, quantization: str | None = None) -> ModelCost:
    """Cost of a model whose weights and KV are of a dtype. Norms, biases and the rows of the embedding are left out.

    Quantised are the layers, not the output projection.
    """
    body_bytes = DTYPE_BYTES[dtype] if quantization is None else 1
    attention = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    body = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    windows = Counter(layer.window for layer in config.layers)
    return ModelCost(
        token_flops=2.0 * body,
        logit_flops=2.0 * head,
        attention_flops=4.0 * config.num_layers * config.num_heads * config.head_dim,
        weight_bytes=float(body_bytes * body + DTYPE_BYTES[dtype] * head),
        kv_bytes=float(config.kv_bytes_per_token(dtype)),
        windows=tuple((window, count / config.num_layers) for window, count in windows.items()),
    )


def measure_ceilings(device: torch.device, dtype: torch.dtype, quantization: str | None = None) -> Ceilings:
    """GEMM rate in a dtype and memory bandwidth of a device, once per process and number of threads.

    Quantised: the rate of such a linear layer, which is above that of attention and of the output projection.
    """
    return _measure(device, dtype, quantization, torch.get_num_threads())


@cache
def _measure(device: torch.device, dtype: torch.dtype, quantization: str | None, num_threads: int) -> Ceilings:
    return _measure_cpu(dtype, quantization) if device.type == "cpu" else _measure_cuda(device, dtype)


def _measure_cpu(dtype: torch.dtype, quantization: str | None) -> Ceilings:
    m, k, n = _CPU_GEMM
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    # Packed as the model's layers are: torch's plain product is slower, and a bound below what we reach is none.
    linear = Linear(b) if quantization is None else Int8Linear(b)
    gemm_s = _least_seconds(lambda: linear(a))
    # In huge pages, as weights and KV are: of smaller ones less is read.
    big = zeroed_on_touch((_CPU_READ_BYTES // 4,), torch.float32).fill_(1)
    read_s = _least_seconds(big.sum)
    return Ceilings(flops=2 * m * k * n / gemm_s, bytes_per_s=_CPU_READ_BYTES / read_s)


def _least_seconds(run: Callable[[], object]) -> float:
    """Of a few runs: whatever else the machine does only adds to them."""
    run()
    times: list[float] = []
    while len(times) < _MIN_RUNS or sum(times) < _CPU_SECONDS:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _measure_cuda(device: torch.device, dtype: torch.dtype) -> Ceilings:
    ceilings = Ceilings(flops=_cuda_flops(device, dtype), bytes_per_s=_cuda_bytes_per_s(device))
    torch.cuda.empty_cache()  # the pool is planned from what the driver says is free
    return ceilings


def _cuda_flops(device: torch.device, dtype: torch.dtype) -> float:
    m, k, n = _CUDA_GEMM
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    return 2 * m * k * n / _event_seconds(lambda: torch.mm(a, b))


def _cuda_bytes_per_s(device: torch.device) -> float:
    source = torch.zeros(_CUDA_COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _CUDA_COPY_BYTES / _event_seconds(lambda: target.copy_(source))


def _event_seconds(run: Callable[[], object]) -> float:
    """Mean of some runs in a row after some that let the clocks rise."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(_CUDA_RUNS):
        run()
    begin.record()
    for _ in range(_CUDA_RUNS):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / _CUDA_RUNS
