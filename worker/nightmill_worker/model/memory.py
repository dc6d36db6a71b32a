"""How a GPU's memory is divided: weights, what a step needs, and pages from all that is left."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nightmill.errors import ModelError
from nightmill.records import EngineOptions
from nightmill_kernels.work_list import decode_capacity
from nightmill_worker.engine.step import PoolShape
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.device import DeviceMemory
from nightmill_worker.model.device_choice import StepLimits
from nightmill_worker.model.graphs import graph_sizes
from nightmill_worker.model.pool import DEFAULT_PAGE_SIZE
from nightmill_worker.model.weights import allocate_weights, named_destinations

_GRAPH_BYTES = 1 << 30
"""Recorded steps: some MB each, and one pool for what is between their launches. At most this much …"""
_GRAPH_FRACTION = 0.03
"""… and this share of the device."""
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_FLOATS_PER_LOGIT = 3
"""Penalties, logprobs and sampling work on float32 copies: so many at once, of the rows that draw."""
_SWAP_BYTES = 128 << 20
_STAGING_BYTES = 64 << 20  # of a step's inputs, but for its page tables


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Bytes that a model takes of a device beside its page pool."""

    weights: int
    activations: int  # of the largest step, measured
    buffers: int  # attention scratch, logits, staging, swap
    graphs: int

    @property
    def besides_weights(self) -> int:
        """What is not allocated yet when the pool is sized."""
        return self.activations + self.buffers + self.graphs


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of all parameters, without allocating any."""
    weights = allocate_weights(config, dtype, "meta")
    return sum(place.nbytes for place in named_destinations(config, weights).values())


def memory_needs(
    config: ModelConfig,
    dtype: torch.dtype,
    memory: DeviceMemory,
    limits: StepLimits,
    *,
    weights: int,
    activations: int,
    max_model_len: int,
    page_size: int,
    enforce_eager: bool,
) -> MemoryNeeds:
    """What is needed for certain, from shapes, and what was measured."""
    windows = {layer.window for layer in config.layers}
    partials = max(decode_capacity(limits.max_num_seqs, max_model_len, w, grouped=True).partials for w in windows)
    scratch = 4 * partials * config.num_heads * (config.head_dim + 1)
    drawing = 4 * _FLOATS_PER_LOGIT * limits.max_num_seqs * config.vocab_size
    tables = 4 * limits.max_num_seqs * -(-max_model_len // page_size)
    recorded = 0 if enforce_eager else graph_sizes(limits.max_num_seqs)[-1] * config.vocab_size * dtype.itemsize
    return MemoryNeeds(
        weights=weights,
        activations=activations,
        buffers=scratch + drawing + recorded + _SWAP_BYTES + _STAGING_BYTES + tables,
        graphs=0 if enforce_eager else min(_GRAPH_BYTES, int(_GRAPH_FRACTION * memory.total)),
    )


def plan_device_pool(
    config: ModelConfig,
    options: EngineOptions,
    needs: MemoryNeeds,
    memory: DeviceMemory,
    *,
    dtype: str,
    max_model_len: int,
) -> PoolShape:
    """Size the pool from `pool_bytes`, else from what is left of `gpu_memory_utilization` with the weights loaded.

    Args:
        config: The model.
        options: What was asked for.
        needs: What else has to fit.
        memory: After the weights were loaded.
        dtype: Of K and V.
        max_model_len: Tokens of the longest sequence.

    Raises:
        ModelError: not even one sequence of max_model_len fits.
    """
    page_size = options.page_size or DEFAULT_PAGE_SIZE
    bytes_per_token = config.kv_bytes_per_token(dtype)
    bytes_per_page = page_size * bytes_per_token
    used = memory.total - memory.free
    left = int(memory.total * options.gpu_memory_utilization) - used - needs.besides_weights
    budget = left if options.pool_bytes is None else options.pool_bytes
    num_pages = max(0, budget) // bytes_per_page
    least = 1 + -(-max_model_len // page_size)
    if num_pages < least or budget + needs.besides_weights > memory.free:
        raise ModelError(
            f"{config.architecture} does not fit the GPU: one sequence of {max_model_len:,} tokens needs "
            f"{_size(least * bytes_per_page)} of KV pages, and {_size(max(0, budget))} are {_origin(options)}; "
            + _account(memory, needs),
            hint=_hint(memory, needs, options),
        )
    return PoolShape(num_pages=num_pages, page_size=page_size, bytes_per_token=bytes_per_token)


def describe(memory: DeviceMemory, needs: MemoryNeeds, shape: PoolShape) -> str:
    """How the memory was divided, in a line."""
    pages = shape.num_pages * shape.page_size * shape.bytes_per_token
    return f"GPU memory: {_account(memory, needs)}, KV pages {_size(pages)}"


def check_weights_fit(config: ModelConfig, needed: int, memory: DeviceMemory) -> None:
    """Refuse at once what cannot be loaded.

    Raises:
        ModelError: The device has less free than the weights take.
    """
    if needed > memory.free:
        raise ModelError(
            f"the weights of {config.architecture} take {_size(needed)}; of the GPU's {_size(memory.total)} "
            f"{_size(memory.free)} are free",
            hint=_busy_hint(memory)
            or "Use a smaller model or a GPU with more memory; --dtype bfloat16 halves float32.",
        )


@contextmanager
def explains_out_of_memory(doing: str, options: EngineOptions) -> Iterator[None]:
    """Turn an out-of-memory error of torch, CUDA, cuBLAS or Triton into one that says what to change."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError and torch.AcceleratorError among them
        if not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        # torch's allocator says whose memory it was; CUDA says the same of memory that the host cannot lock.
        is_device = isinstance(error, torch.OutOfMemoryError)
        raise ModelError(
            f"{'the GPU' if is_device else 'CUDA'} ran out of memory while {doing}: {str(error).splitlines()[0]}",
            hint=f"Pass a --gpu-memory-utilization below {options.gpu_memory_utilization:g}, a smaller "
            "--max-num-batched-tokens or --max-num-seqs, or --enforce-eager; nvidia-smi shows who else is on the GPU."
            + ("" if is_device else " If it is the host's memory that cannot be locked: a smaller --swap-space."),
        ) from error


def _origin(options: EngineOptions) -> str:
    if options.pool_bytes is not None:
        return "allowed (--kv-cache-memory-bytes)"
    return f"left (--gpu-memory-utilization {options.gpu_memory_utilization:g})"


def _account(memory: DeviceMemory, needs: MemoryNeeds) -> str:
    others = max(0, memory.total - memory.free - needs.weights)
    return (
        f"of {_size(memory.total)}: weights {_size(needs.weights)}, a step's activations {_size(needs.activations)}, "
        f"buffers {_size(needs.buffers)}, graphs {_size(needs.graphs)}, CUDA and other processes {_size(others)}"
    )


def _hint(memory: DeviceMemory, needs: MemoryNeeds, options: EngineOptions) -> str:
    if options.pool_bytes is not None:
        return "Change --kv-cache-memory-bytes, or leave it out: pages then get what is left."
    changes = ["a smaller --max-model-len"]
    if needs.activations + needs.buffers > needs.weights // 2:
        changes.append("a smaller --max-num-batched-tokens or --max-num-seqs")
    if options.gpu_memory_utilization < 0.95:
        changes.append("a larger --gpu-memory-utilization")
    busy = _busy_hint(DeviceMemory(total=memory.total, free=memory.free + needs.weights))
    return f"Pass {', or '.join(changes)}." + (f" {busy}" if busy else "")


def _busy_hint(memory: DeviceMemory) -> str:
    """When somebody else holds a good part of the device."""
    if memory.free > 0.9 * memory.total:
        return ""
    return f"Others hold {_size(memory.total - memory.free)} of it: nvidia-smi shows who."


def _size(num_bytes: int) -> str:
    if num_bytes >= 10 << 30:
        return f"{num_bytes / 2**30:,.1f} GiB"
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes >= 10 << 20 else f"{num_bytes:,} bytes"
