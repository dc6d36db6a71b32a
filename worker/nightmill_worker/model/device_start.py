"""From a model's files to a runner on a GPU: load, measure a step, give the rest of the memory to pages, record."""

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch

from nightmill.errors import ModelError
from nightmill.records import EngineOptions
from nightmill_kernels.metadata import AttentionMetadata
from nightmill_worker.engine.step import PoolShape
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.decoder import Decoder
from nightmill_worker.model.device import Device
from nightmill_worker.model.device_choice import CPU, CUDA, DEVICES, StepLimits
from nightmill_worker.model.device_runner import DeviceRunner
from nightmill_worker.model.dtype import torch_dtype
from nightmill_worker.model.layers import StepTensors
from nightmill_worker.model.memory import (
    check_weights_fit,
    describe,
    explains_out_of_memory,
    memory_needs,
    plan_device_pool,
    weight_bytes,
)
from nightmill_worker.model.pool import DEFAULT_PAGE_SIZE, KVPool, plan_device_host_pages
from nightmill_worker.model.weights import ModelWeights

LEAST_CAPABILITY = (8, 0)
"""Triton's own; below it matrix products of 16 bits have no instructions that it emits."""

LoadWeights = Callable[[torch.dtype, torch.device], ModelWeights]


def open_device(requested: str) -> Device | None:
    """The GPU that `--device` means; None: the CPU.

    Raises:
        ModelError: cuda was asked for and cannot be used, the GPU is too old, or the name is unknown.
    """
    if requested not in DEVICES:
        raise ModelError(f"device {requested!r} is unknown", hint=f"Known: {', '.join(DEVICES)}.")
    if requested == CPU or (requested == "auto" and not torch.cuda.is_available()):
        return None
    if not torch.cuda.is_available():
        raise ModelError(
            f"--device {CUDA}: torch {torch.__version__} finds no GPU that it can use",
            hint="nvidia-smi shows whether the driver sees one; torch must be a CUDA build. Or pass --device cpu.",
        )
    if find_spec("triton") is None:
        raise ModelError(
            f"--device {CUDA} needs triton, which is not installed",
            hint="Install nightmill[gpu], or pass --device cpu.",
        )
    from nightmill_worker.model.cuda_device import CudaDevice

    device = CudaDevice()
    if device.capability is not None and device.capability < LEAST_CAPABILITY:
        have, least = (".".join(map(str, version)) for version in (device.capability, LEAST_CAPABILITY))
        # Also for auto: whoever sized steps and chose cores for a GPU did not know its capability.
        raise ModelError(
            f"this GPU has compute capability {have}; the kernels need {least} (Ampere) or later",
            hint="Pass --device cpu, or choose another GPU with CUDA_VISIBLE_DEVICES.",
        )
    return device


def start_on_device(
    config: ModelConfig,
    device: Device,
    options: EngineOptions,
    limits: StepLimits,
    load: LoadWeights,
    *,
    dtype: str,
    max_model_len: int,
) -> DeviceRunner:
    """Load a model and give it what the device has.

    Args:
        config: The model.
        device: Where to.
        options: How much memory may be used.
        limits: The largest step there will be.
        load: Reads the weights, to a device.
        dtype: Of weights, activations and pages.
        max_model_len: Tokens of the longest sequence.

    Raises:
        ModelError: it does not fit, or what `load` raises.
    """
    kind, where = torch_dtype(dtype), device.torch_device
    page_size = options.page_size or DEFAULT_PAGE_SIZE
    needed = weight_bytes(config, kind)
    check_weights_fit(config, needed, device.memory())
    with explains_out_of_memory("loading the weights", options):
        weights = load(kind, where)
        null = PoolShape(num_pages=1, page_size=page_size, bytes_per_token=config.kv_bytes_per_token(dtype))
        decoder = Decoder(config, weights, KVPool(config, null, kind, where), max_model_len=max_model_len)
    with explains_out_of_memory("trying the largest step", options):
        activations = device.peak_of(
            lambda: _run_largest_step(decoder, limits, where, page_size=page_size, max_model_len=max_model_len)
        )
    memory = device.memory()
    needs = memory_needs(
        config,
        kind,
        memory,
        limits,
        weights=needed,
        activations=activations,
        max_model_len=max_model_len,
        page_size=page_size,
        enforce_eager=options.enforce_eager,
    )
    shape = plan_device_pool(config, options, needs, memory, dtype=dtype, max_model_len=max_model_len)
    with explains_out_of_memory("allocating pages and buffers", options):
        pool = KVPool(config, shape, kind, where)
        decoder.bind(pool)
        runner = DeviceRunner(
            config,
            decoder,
            pool,
            device,
            dtype=kind,
            max_model_len=max_model_len,
            limits=limits,
            num_host_pages=plan_device_host_pages(shape, options),
            enforce_eager=options.enforce_eager,
        )
    runner.start_notes = (describe(memory, needs, shape),)
    with explains_out_of_memory("recording decode steps", options):
        runner.record_decodes()
    return runner


@torch.inference_mode()
def _run_largest_step(
    decoder: Decoder, limits: StepLimits, device: torch.device, *, page_size: int, max_model_len: int
) -> None:
    """Prompts of equal length that fill a step, all of whose pages are the null page; nothing is written to it."""
    num_seqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    length = min(max_model_len, limits.max_num_batched_tokens // num_seqs)
    num_seqs = limits.max_num_batched_tokens // length  # short sequences: more of them than will ever run
    num_tokens = num_seqs * length
    ends = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=device)
    hidden = decoder.forward(
        StepTensors(
            token_ids=torch.zeros(num_tokens, dtype=torch.int32, device=device),
            positions=torch.from_numpy(np.tile(np.arange(length, dtype=np.int32), num_seqs)).to(device),
            slots=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            attention=AttentionMetadata(
                query_starts=ends,
                context_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=device),
                page_tables=torch.zeros((num_seqs, -(-length // page_size)), dtype=torch.int32, device=device),
                max_query_len=length,
            ),
            sampled=(ends[1 : limits.max_num_seqs + 1] - 1).long(),
        )
    )
    decoder.logits(hidden)
