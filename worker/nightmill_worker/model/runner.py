"""The model's Runner: a StepPlan in, tokens out."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightmill.errors import ModelError
from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.engine.roofline import Roofline
from nightmill_worker.engine.step import HostShape, PoolShape, StepOutput, StepPlan
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.config_reader import read_config
from nightmill_worker.model.decoder import Decoder
from nightmill_worker.model.device import Device
from nightmill_worker.model.device_choice import CPU, resolve_limits
from nightmill_worker.model.device_runner import DeviceRunner
from nightmill_worker.model.device_start import open_device, start_on_device
from nightmill_worker.model.dtype import resolve_dtype, torch_dtype
from nightmill_worker.model.dummy import dummy_weights
from nightmill_worker.model.memory import explains_out_of_memory
from nightmill_worker.model.plan_tensors import step_tensors
from nightmill_worker.model.pool import KVPool, plan_host_pages, plan_pool
from nightmill_worker.model.quantization import check_quantization
from nightmill_worker.model.roofline import model_roofline
from nightmill_worker.model.sampler import sample
from nightmill_worker.model.step_recordings import StepRecordings
from nightmill_worker.model.swap import HostPages
from nightmill_worker.model.weights import ModelWeights, load_weights
from nightmill_worker.model.workspace import Workspace

MAX_STEP_TOKENS = 512
"""Steps of up to so many tokens find their memory ready, and are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerConfig:
    """All that the engine process needs to load a model; picklable."""

    model_dir: Path  # holds config.json and, unless load_format is dummy, safetensors
    spec: ModelSpec
    options: EngineOptions
    dummy_seed: int = 0

    def build(self) -> "ModelRunner | DeviceRunner":
        """Load the weights and allocate the pool, in this process.

        Raises:
            ModelError: the model is not supported, not readable, or does not fit.
        """
        if self.options.num_threads is not None:
            torch.set_num_threads(self.options.num_threads)
        config = read_config(self.model_dir)
        device = open_device(self.options.device)
        check_quantization(self.spec.quantization, CPU if device is None else device.torch_device.type)
        max_model_len = config.resolve_max_model_len(self.spec.max_model_len)
        if device is not None:
            return self._build_on(device, config, max_model_len)
        dtype = resolve_dtype(self.spec.dtype, config)
        shape = plan_pool(config, self.options, dtype=dtype, max_model_len=max_model_len)
        # Before the weights: what measuring takes in memory is free again by then.
        roofline = model_roofline(config, dtype, torch.device(CPU), self.spec.quantization)
        runner = ModelRunner(
            config,
            self._weights(config, torch_dtype(dtype), torch.device(CPU)),
            shape,
            max_model_len=max_model_len,
            num_host_pages=plan_host_pages(shape, self.options),
            quantization=self.spec.quantization,
        )
        runner.roofline = roofline
        return runner

    def _build_on(self, device: Device, config: ModelConfig, max_model_len: int) -> DeviceRunner:
        dtype = resolve_dtype(self.spec.dtype, config, device.torch_device.type, capability=device.capability)
        with explains_out_of_memory("measuring what the device can do", self.options):
            roofline = model_roofline(config, dtype, device.torch_device)
        runner = start_on_device(
            config,
            device,
            self.options,
            resolve_limits(self.options, device.torch_device.type),
            lambda dtype, where: self._weights(config, dtype, where),
            dtype=dtype,
            max_model_len=max_model_len,
        )
        runner.roofline = roofline
        return runner

    def _weights(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
        match self.spec.load_format:
            case "auto":
                return load_weights(self.model_dir, config, dtype, device)
            case "dummy":
                return dummy_weights(config, dtype, device, seed=self.dummy_seed)
            case other:
                raise ModelError(f"load_format {other!r} is unknown", hint="Known: auto, dummy.")


class ModelRunner:
    """Runs steps of a decoder on the CPU; a Runner that swaps."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        shape: PoolShape,
        *,
        max_model_len: int,
        num_host_pages: int = 0,
        quantization: str | None = None,
    ) -> None:
        self._config = config
        self._shape = shape
        self.max_model_len = max_model_len  # tokens a sequence may have: what the rotary tables were made for
        self.roofline: Roofline | None = None  # see HasRoofline
        pool = KVPool(config, shape, weights.embedding.dtype, weights.embedding.device)
        self._host: HostPages | None = HostPages(pool, num_host_pages)
        self._workspace = Workspace(config, weights.embedding.dtype, max_tokens=MAX_STEP_TOKENS)
        decoder = Decoder(config, weights, pool, max_model_len=max_model_len, quantization=quantization)
        self._decoder: Decoder | None = decoder
        self.recordings: StepRecordings | None = StepRecordings(
            decoder,
            self._workspace,
            max_tokens=MAX_STEP_TOKENS,
            vocab_size=config.vocab_size,
        )

    @property
    def pool(self) -> PoolShape:
        """The page pool this runner owns."""
        return self._shape

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self._config.vocab_size

    @property
    def host(self) -> HostShape:
        """The host pool this runner owns."""
        return self._swap_pool().shape

    @torch.inference_mode()
    def swap_out(self, pages: NDArray[np.int32], host_pages: NDArray[np.int32]) -> None:
        """Copy pages of the pool to host pages."""
        self._swap_pool().swap_out(pages, host_pages)

    @torch.inference_mode()
    def swap_in(self, host_pages: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """Copy host pages to pages of the pool."""
        self._swap_pool().swap_in(host_pages, pages)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Compute K and V of every token of the plan and draw the tokens it asks for."""
        logits = self._logits(plan)
        if logits is None:
            return StepOutput(tokens=np.empty(0, dtype=np.int32))
        return sample(logits, plan.sample)

    @torch.inference_mode()
    def compute_logits(self, plan: StepPlan) -> Tensor:
        """Run the plan and return float32 [R, vocab] instead of drawing: for parity tests and scoring."""
        logits = self._logits(plan)
        return torch.empty(0, self.vocab_size) if logits is None else logits.to(torch.float32, copy=True)

    def close(self) -> None:
        """Free the pool and the weights."""
        self._decoder = self._host = self.recordings = None

    def _logits(self, plan: StepPlan) -> Tensor | None:
        """[R, V] of the tokens that draw, overwritten by the next step; None if there are none."""
        decoder = self._loaded()
        recorded = None if self.recordings is None else self.recordings.logits(plan)
        if recorded is not None:
            return decoder.shape_logits(recorded) if len(recorded) else None
        hidden = decoder.forward(step_tensors(plan, self._workspace.take(plan.num_tokens)))
        return decoder.logits(hidden) if len(hidden) else None

    def _swap_pool(self) -> HostPages:
        if self._host is None:
            raise RuntimeError("this runner is closed")
        return self._host

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise RuntimeError("this runner is closed")
        return self._decoder
