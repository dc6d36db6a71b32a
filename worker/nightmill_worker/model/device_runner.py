"""A Runner for a device that works behind the host's back: one copy to it and one copy back in a step."""

from collections import deque
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightmill_worker.engine.roofline import Roofline
from nightmill_worker.engine.step import HostShape, PoolShape, SampleBatch, StepOutput, StepPlan
from nightmill_worker.model.attention_plan import AttentionPlanner
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.decoder import Decoder
from nightmill_worker.model.device import Device, Mark
from nightmill_worker.model.device_choice import StepLimits
from nightmill_worker.model.device_sampler import DeviceSampler, StagedSample
from nightmill_worker.model.device_swap import DeviceHostPages
from nightmill_worker.model.graphs import DecodeGraphs, graph_sizes
from nightmill_worker.model.layers import StepTensors
from nightmill_worker.model.pool import KVPool
from nightmill_worker.model.stand_in import stand_in
from nightmill_worker.model.step_inputs import StepInputs

MAX_IN_FLIGHT = 2


@dataclass(slots=True)
class _Flight:
    """A step under way; the marks and the host memory are used again by a later one."""

    started: Mark
    ended: Mark
    host: Tensor  # int32, what the draw gave
    num_values: int = 0
    sample: StagedSample | None = None  # None: draws nothing


class DeviceRunner:
    """Runs steps of a decoder on a device; a Runner that swaps and runs ahead.

        submit   stage → one copy → forward (a graph, or launch by launch) → draw → one copy back → mark
        collect  wait for the oldest step's mark; its tokens

    The tokens of the last step also stay on the device, where the next one can have them before the host does.
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        pool: KVPool,
        device: Device,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        limits: StepLimits,
        num_host_pages: int = 0,
        enforce_eager: bool = False,
    ) -> None:
        self._config = config
        self._device = device
        self._decoder: Decoder | None = decoder
        self._shape = pool.shape
        self.max_model_len = max_model_len  # tokens a sequence may have: what the rotary tables were made for
        self.roofline: Roofline | None = None  # see HasRoofline
        self.start_notes: tuple[str, ...] = ()  # see ExplainsItsStart
        attention = AttentionPlanner(
            config,
            device,
            dtype,
            page_size=pool.shape.page_size,
            max_seqs=limits.max_num_seqs,
            max_len=max_model_len,
        )
        self._inputs = StepInputs(
            device,
            attention,
            page_size=pool.shape.page_size,
            max_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_num_batched_tokens,
            max_len=max_model_len,
        )
        self._sampler = DeviceSampler(config.vocab_size)
        self._graphs: DecodeGraphs | None = None
        if not enforce_eager:
            sizes = graph_sizes(limits.max_num_seqs)
            self._logits = torch.zeros(sizes[-1], config.vocab_size, dtype=dtype, device=device.torch_device)
            self._graphs = DecodeGraphs(device, sizes, self._decode)
        self._host: DeviceHostPages | None = DeviceHostPages(pool, num_host_pages, device)
        self._idle = deque(self._new_flight(limits.max_num_seqs) for _ in range(MAX_IN_FLIGHT))
        self._in_flight: deque[_Flight] = deque()

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

    @property
    def device(self) -> Device:
        """Where it runs; counts what it is asked for."""
        return self._device

    @torch.inference_mode()
    def swap_out(self, pages: NDArray[np.int32], host_pages: NDArray[np.int32]) -> None:
        """Copy pages of the pool to host pages, behind the steps submitted before and ahead of those after."""
        self._swap_pool().swap_out(pages, host_pages)

    @torch.inference_mode()
    def swap_in(self, host_pages: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """Copy host pages to pages of the pool, in the same order."""
        self._swap_pool().swap_in(host_pages, pages)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute K and V of every token of the plan and draw the tokens it asks for."""
        if self._in_flight:
            raise RuntimeError(f"run with {len(self._in_flight)} steps in flight: collect them first")
        self.submit(plan)
        return self.collect()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Ask the device for a step; returns while it computes."""
        decoder = self._loaded()
        if not self._idle:
            raise RuntimeError(f"{MAX_IN_FLIGHT} steps are in flight: collect one first")
        flight = self._idle[0]
        flight.sample, logits = self._compute(decoder, plan, flight.started)
        flight.num_values = 0
        if flight.sample is not None:
            drawn = self._sampler.draw(logits, flight.sample)
            self._keep_drawn(drawn[: flight.sample.num_rows])
            flight.num_values = len(drawn)
            if len(flight.host) < len(drawn):  # logprobs of many rows
                flight.host = self._device.host_tensor((2 * len(drawn),), torch.int32)
            self._device.to_host(flight.host[: len(drawn)], drawn)
        flight.ended.record()
        self._in_flight.append(self._idle.popleft())

    def collect(self) -> StepOutput:
        """Wait for the oldest step in flight."""
        if not self._in_flight:
            raise RuntimeError("no step is in flight")
        flight = self._in_flight.popleft()
        flight.ended.wait()
        self._idle.append(flight)
        seconds = flight.ended.seconds_since(flight.started)
        if flight.sample is None:
            return StepOutput(tokens=np.empty(0, np.int32), seconds=seconds)
        output = self._sampler.finish(flight.host[: flight.num_values].numpy(), flight.sample)
        return StepOutput(tokens=output.tokens, logprobs=output.logprobs, failed=output.failed, seconds=seconds)

    @torch.inference_mode()
    def compute_logits(self, plan: StepPlan) -> Tensor:
        """Run the plan and return float32 [R, vocab] on the host instead of drawing: for parity tests and scoring."""
        tensors = self._inputs.put(plan)
        self._inputs.staging.flush()
        decoder = self._loaded()
        return decoder.logits(decoder.forward(tensors)).float().cpu()

    @torch.inference_mode()
    def record_decodes(self) -> None:
        """Record the graphs of decodes that share no prefix, the largest first: the others fit into its memory.

        Then draw from one row in every way, so that the first step finds those kernels compiled, too.
        """
        if self._graphs is not None:
            started = perf_counter()
            for size in reversed(self._graphs.sizes):
                plan = stand_in(size)
                tensors = self._inputs.put_decodes(plan, self._inputs.lists_of(plan, size), size, grouped=False)
                self._inputs.staging.flush()
                self._graphs.capture(size, tensors, grouped=False)
            seconds = perf_counter() - started
            self.start_notes += (f"recorded {len(self._graphs.sizes)} decode graphs in {seconds:.1f} s",)
        for temperature, filters in ((0.0, False), (1.0, False), (1.0, True)):
            self.run(stand_in(1, draws=1, temperature=temperature, filters=filters))

    def close(self) -> None:
        """Free the pool and the weights."""
        self._decoder = self._host = self._graphs = None
        self._in_flight.clear()

    def _compute(self, decoder: Decoder, plan: StepPlan, started: Mark) -> tuple[StagedSample | None, Tensor]:
        """Everything up to the logits, [≥ R, V]. `started` is recorded once the host has staged the step."""
        graphs, size = self._graphs, None
        if graphs is not None and plan.num_tokens == plan.num_sequences and len(plan.sample.token_index):
            size = graphs.size_for(plan.num_tokens)
        if graphs is None or size is None:
            tensors = self._inputs.put(plan)
            sample = self._stage_sample(plan.sample)
            started.record()
            self._inputs.staging.flush()
            hidden = decoder.forward(tensors)
            return sample, decoder.logits(hidden) if len(hidden) else hidden
        lists = self._inputs.lists_of(plan, size)
        grouped = any(work.has_wide for work in lists.values())
        tensors = self._inputs.put_decodes(plan, lists, size, grouped=grouped)
        sampled = self._inputs.put_sampled(plan)
        sample = self._stage_sample(plan.sample)
        started.record()
        self._inputs.staging.flush()
        graphs.replay(size, tensors, grouped=grouped)
        logits = self._logits[: plan.num_tokens] if sampled is None else self._logits.index_select(0, sampled)
        return sample, decoder.shape_logits(logits)

    def _stage_sample(self, batch: SampleBatch) -> StagedSample | None:
        return self._sampler.stage(batch, self._inputs.staging.put) if len(batch.token_index) else None

    def _decode(self, tensors: StepTensors, size: int) -> None:
        """What a graph records: from token ids to logits, at `self._logits`."""
        decoder = self._loaded()
        decoder.project(decoder.forward(tensors), self._logits[:size])

    def _keep_drawn(self, tokens: Tensor) -> None:
        """For the next step's `token_source`. A row that failed has -1: its sequence ends, but may be in flight."""
        kept = self._inputs.drawn[: len(tokens)]
        torch.clamp(tokens[: len(kept)], min=0, out=kept)

    def _new_flight(self, max_seqs: int) -> _Flight:
        return _Flight(
            started=self._device.mark(),
            ended=self._device.mark(),
            host=self._device.host_tensor((2 * max_seqs,), torch.int32),
        )

    def _swap_pool(self) -> DeviceHostPages:
        if self._host is None:
            raise RuntimeError("this runner is closed")
        return self._host

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise RuntimeError("this runner is closed")
        return self._decoder
