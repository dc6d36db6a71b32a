"""The least seconds a step can take: what it must read and compute, over what the device was measured to do.

    FLOPs = 2·P_body·n + 2·P_head·r + 4·L·H·D·S          Bytes = W + K·(Σ contexts read) + K·n
    seconds = max(W / BW, linear FLOPs / F) + max(KV bytes / BW, attention FLOPs / F)

n: tokens of the step, r: rows with logits, S: Σ over tokens of what they see, W: bytes of weights, K: KV bytes of a
token. A context is read once per row, and what a group of rows shares once per group. One formula for the live figure,
for `nightmill simulate` and for the bounds of benchmarks.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.groups import tokens_saved
from nightmill_worker.engine.step import PrefixGroups, StepPlan

Windows = tuple[tuple[int | None, float], ...]
FULL: Windows = ((None, 1.0),)
"""Every layer sees all of a context."""

_Lengths = NDArray[np.float64]  # exact for integers below 2^53


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of a device."""

    flops: float  # multiply-adds x 2 per second, large GEMM in the model's dtype
    bytes_per_s: float  # of its memory


@dataclass(frozen=True, slots=True)
class Work:
    """Amounts that a roofline turns into seconds. Of layers with windows, the mean over layers."""

    tokens: float  # n
    logit_rows: float  # r
    attended: float  # S
    context_read: float  # Σ contexts: once per row and step, or once per group


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What a model asks of a device."""

    token_flops: float  # 2·P_body: of each token, attention apart
    logit_flops: float  # 2·P_head: of each row with logits
    attention_flops: float  # 4·L·H·D: of each token for each token that it sees
    weight_bytes: float  # W: read once a step
    kv_bytes: float  # K: of a token, all layers
    windows: Windows = FULL  # (tokens a query sees, share of the layers)

    def linear_flops(self, work: Work) -> float:
        """FLOPs of everything but attention."""
        return self.token_flops * work.tokens + self.logit_flops * work.logit_rows

    def all_flops(self, work: Work) -> float:
        """FLOPs of it."""
        return self.linear_flops(work) + self.attention_flops * work.attended

    def cache_bytes(self, work: Work) -> float:
        """Bytes of KV read and written."""
        return self.kv_bytes * (work.context_read + work.tokens)

    def all_bytes(self, work: Work, steps: int = 1) -> float:
        """Bytes of it in so many steps, each of which reads the weights."""
        return self.weight_bytes * steps + self.cache_bytes(work)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a device."""

    cost: ModelCost
    ceilings: Ceilings

    def seconds(self, work: Work, steps: int = 1) -> float:
        """The least seconds of this work in so many steps."""
        cost, flops, rate = self.cost, self.ceilings.flops, self.ceilings.bytes_per_s
        return max(cost.weight_bytes * steps / rate, cost.linear_flops(work) / flops) + max(
            cost.cache_bytes(work) / rate, cost.attention_flops * work.attended / flops
        )


@runtime_checkable
class HasRoofline(Protocol):
    """A Runner that knows what its model costs on its device."""

    @property
    def roofline(self) -> Roofline | None:
        """None: it was not measured."""
        ...


def step_work(plan: StepPlan, windows: Windows = FULL, page_size: int | None = None) -> Work:
    """The amounts of one step: query token j of q sees context − q + 1 + j tokens, at most a window of them.

    Args:
        plan: The step.
        windows: Of the model's layers.
        page_size: With it, what the plan's groups share is read once per group; None: groups are ignored.
    """
    contexts = plan.context_lens.astype(np.float64)
    starts = plan.query_starts
    counts = (starts[1:] - starts[:-1]).astype(np.float64) if plan.num_tokens > plan.num_sequences else None
    attended = read = 0.0
    for window, share in windows:
        seen, needed = _full(contexts, counts) if window is None else _windowed(contexts, counts, window)
        if page_size is not None and plan.groups is not None:
            needed -= _saved(plan.groups, contexts, window, page_size)
        attended += share * seen
        read += share * needed
    return Work(plan.num_tokens, len(plan.sample.position), attended, read)


def _full(contexts: _Lengths, counts: _Lengths | None) -> tuple[float, float]:
    """(Σ over tokens of what they see, Σ contexts); `counts`: tokens of each row, None: one each."""
    total = float(contexts.sum())
    if counts is None:
        return total, total
    return float(counts @ contexts) - float(counts @ counts - counts.sum()) / 2, total


def _windowed(contexts: _Lengths, counts: _Lengths | None, window: int) -> tuple[float, float]:
    if counts is None:
        total = float(np.minimum(contexts, window).sum())
        return total, total
    seen = _triangle(contexts, window) - _triangle(contexts - counts, window)
    return float(seen.sum()), float(np.minimum(contexts, counts + (window - 1)).sum())


def _triangle(lengths: _Lengths, window: int) -> _Lengths:
    """Σ of min(j, window) for j = 1 … length."""
    inside: _Lengths = np.minimum(lengths, window)
    sums: _Lengths = inside * (inside + 1) / 2 + (lengths - inside) * window
    return sums


def _saved(groups: PrefixGroups, contexts: _Lengths, window: int | None, page_size: int) -> float:
    """Tokens of KV that need not be read again: rows of a group share their first pages, as far as they see them."""
    if window is None:
        return tokens_saved(groups, page_size)
    shared = np.repeat(groups.num_pages * float(page_size), np.diff(groups.starts))
    visible = np.maximum(shared - np.maximum(contexts[groups.sequences] - window, 0), 0)
    firsts = groups.starts[:-1]
    return float(visible.sum() - np.maximum.reduceat(visible, firsts).sum()) if len(firsts) else 0.0
