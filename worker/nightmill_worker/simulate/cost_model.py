"""What a step costs on a device, by the roofline (engine/roofline.py), and the least a whole trace can cost.

Contexts are read once per row: simulated steps do not share attention.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nightmill_worker.engine.roofline import Ceilings, ModelCost, Roofline, Work, step_work
from nightmill_worker.engine.step import StepPlan
from nightmill_worker.simulate.trace import Trace, TraceRow

_WIDTH = 2  # bytes of a weight and of a KV element: bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Measured limits of a device."""

    name: str
    flops: float  # bf16 multiply-adds x 2 per second, large GEMM
    bytes_per_s: float  # memory reads
    kv_bytes: float  # memory for weights and the page pool
    host_bytes_per_s: float  # copies between the page pool and the host's


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a decoder that decide its cost."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool  # the embedding is the head's matrix, held once

    @property
    def body_parameters(self) -> int:
        """Weights every token goes through."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_parameters(self) -> int:
        """Weights that only rows with logits go through."""
        return self.vocab * self.hidden

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a step reads; of an embedding, a step reads a few rows only."""
        return _WIDTH * (self.body_parameters + self.head_parameters)

    @property
    def held_weight_bytes(self) -> int:
        """Bytes of weights in memory."""
        return self.step_weight_bytes + (0 if self.is_tied else _WIDTH * self.head_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        """K: bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _WIDTH


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        # NVIDIA H200 141 GB, figures measured with large GEMMs and copies, not the datasheet's; 90 % of its memory;
        # the link to the host is assumed (PCIe 5 x16).
        "h200": Device(name="h200", flops=790e12, bytes_per_s=4.3e12, kv_bytes=0.9 * 141e9, host_bytes_per_s=55e9),
        # Two cores with AVX-512 and AMX: bf16 GEMM 1024 x 576 x 1536, reads of a 256 MiB set; a copy reads and writes.
        "cpu": Device(name="cpu", flops=2.15e12, bytes_per_s=22e9, kv_bytes=8e9, host_bytes_per_s=11e9),
    }
)

MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            ModelShape(
                name="smollm2-135m",
                layers=30,
                hidden=576,
                ffn=1536,
                heads=9,
                kv_heads=3,
                head_dim=64,
                vocab=49152,
                is_tied=True,
            ),
            ModelShape(
                name="qwen3-0.6b",
                layers=28,
                hidden=1024,
                ffn=3072,
                heads=16,
                kv_heads=8,
                head_dim=128,
                vocab=151936,
                is_tied=True,
            ),
            ModelShape(
                name="llama-3.1-8b",
                layers=32,
                hidden=4096,
                ffn=14336,
                heads=32,
                kv_heads=8,
                head_dim=128,
                vocab=128256,
                is_tied=False,
            ),
        )
    }
)


class CostModel:
    """Seconds of a model on a device."""

    def __init__(self, device: Device, model: ModelShape) -> None:
        self.device = device
        self.model = model
        self._roofline = Roofline(_cost(model), Ceilings(device.flops, device.bytes_per_s))

    def seconds(self, work: Work, steps: int) -> float:
        """Seconds of this work in so many steps, each of which reads the weights once."""
        return self._roofline.seconds(work, steps)

    def step_seconds(self, plan: StepPlan) -> float:
        """Seconds of one step."""
        return self.seconds(step_work(plan), 1)

    def pool_tokens(self) -> int:
        """Tokens of KV that fit beside the weights."""
        room = self.device.kv_bytes - self.model.held_weight_bytes
        return max(0, int(room // self.model.kv_bytes_per_token))

    def bound_seconds(self, trace: Trace, output_tokens: list[int], max_num_seqs: int) -> float:
        """The least seconds of a trace, whatever the schedule: its sums in ceil(output tokens / slots) steps.

        A shared prefix is computed once; its KV is still read once per row.
        """
        steps = math.ceil(sum(output_tokens) / max_num_seqs)
        return self.seconds(_trace_work(trace, output_tokens), steps)


def _cost(model: ModelShape) -> ModelCost:
    return ModelCost(
        token_flops=2.0 * model.body_parameters,
        logit_flops=2.0 * model.head_parameters,
        attention_flops=4.0 * model.layers * model.heads * model.head_dim,
        weight_bytes=float(model.step_weight_bytes),
        kv_bytes=float(model.kv_bytes_per_token),
    )


def _trace_work(trace: Trace, output_tokens: list[int]) -> Work:
    tokens = attended = read = 0
    computed: dict[str, int] = {}  # tokens of each prefix that are there already
    for row, out in zip(trace.rows, output_tokens, strict=True):
        hit = _take_prefix(row, computed)
        last = row.context_tokens + out - 1  # the last token drawn is never computed
        tokens += last - hit
        attended += _triangle(hit, last)
        read += _triangle(row.context_tokens - 1, last)
    return Work(tokens, sum(output_tokens), attended, read)


def _take_prefix(row: TraceRow, computed: dict[str, int]) -> int:
    if row.prefix_id is None:
        return 0
    hit = min(computed.get(row.prefix_id, 0), row.prefix_tokens, row.context_tokens - 1)
    computed[row.prefix_id] = max(computed.get(row.prefix_id, 0), row.prefix_tokens)
    return hit


def _triangle(low: int, high: int) -> int:
    """low+1 + … + high."""
    return (high * (high + 1) - low * (low + 1)) // 2
