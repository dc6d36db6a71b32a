"""Attention over the page pool in plain torch: fp32 throughout, decodes in buckets, prefill chunks one by one.

Decodes of a prefix group: the shared keys in one product for all of them, their own keys in a bucket, and the two
partial softmaxes merged by the larger maximum.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nightmill_kernels.metadata import AttentionMetadata, PrefixGroups
from nightmill_kernels.reference.page_layout import plain_keys, plain_values

QUERY_BLOCK = 256
"""Prefill rows scored at once: bounds the score matrix at heads · 256 · context floats."""

BUCKET_PAGES = 8
"""Decodes share a bucket when their page counts round up to the same multiple: little padding, few buckets."""

BUCKET_ELEMENTS = 1 << 24
"""Gathered K elements of a bucket (64 MB as fp32): a bucket above this is cut into several."""


@dataclass(frozen=True, slots=True)
class _Pools:
    """K and V pages [N, Hk, page_size, D], and whether what lies in them is paired (see page_layout)."""

    k: Tensor
    v: Tensor
    paired: bool


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
    paired: bool = False,
) -> Tensor:
    """Fill `out` [T, H, D]; see the wrapper for the contract, page_layout for `paired`."""
    out.zero_()
    pools = _Pools(k_pool, v_pool, paired)
    _, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    starts = meta.query_starts.tolist()
    contexts = meta.context_lens.tolist()
    lengths = [end - start for start, end in pairwise(starts)]

    grouped: set[int] = set()
    if meta.groups is not None and window is None:
        for members, num_pages in _groups(meta.groups):
            grouped.update(members)
            _attend_group(q, pools, meta, members, num_pages, scale, softcap, out)

    for bucket in _decode_buckets(lengths, contexts, k_pool, grouped):
        tokens = torch.tensor([starts[s] for s in bucket], device=q.device)
        context = meta.context_lens[torch.tensor(bucket, device=q.device)].long()
        k, v = _gather(pools, meta.page_tables, bucket, int(context.max()))
        rows = q[tokens].float().reshape(len(bucket), kv_heads, 1, heads // kv_heads, head_dim)
        result = _attend(rows, k, v, (context - 1)[:, None], scale, window, softcap)
        out[tokens] = result.reshape(len(bucket), heads, head_dim).to(out.dtype)

    for s, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        if length < 2 or context < 1:
            continue
        for first in range(0, length, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, length)
            position = torch.arange(first, last, device=q.device) + (context - length)
            if int(position[-1]) < 0:
                continue
            k, v = _gather(pools, meta.page_tables, [s], int(position[-1]) + 1)
            rows = q[starts[s] + first : starts[s] + last].float()
            rows = rows.reshape(1, last - first, kv_heads, heads // kv_heads, head_dim).transpose(1, 2)
            result = _attend(rows, k, v, position[None], scale, window, softcap)
            out[starts[s] + first : starts[s] + last] = result[0].transpose(0, 1).flatten(1, 2).to(out.dtype)
    return out


def _groups(groups: PrefixGroups) -> Iterator[tuple[list[int], int]]:
    """(sequences, shared pages) of each group that shares something."""
    sequences = groups.sequences.tolist()
    for (first, last), num_pages in zip(pairwise(groups.starts.tolist()), groups.num_pages.tolist(), strict=True):
        if first < last and num_pages > 0:
            yield sequences[first:last], num_pages


def _attend_group(
    q: Tensor,
    pools: _Pools,
    meta: AttentionMetadata,
    members: list[int],
    num_pages: int,
    scale: float,
    softcap: float | None,
    out: Tensor,
) -> None:
    _, heads, head_dim = q.shape
    kv_heads, page_size = pools.k.shape[1], pools.k.shape[2]
    index = torch.tensor(members, device=q.device)
    tokens, context = meta.query_starts[index].long(), meta.context_lens[index].long()
    shared = num_pages * page_size
    _check_group(meta, index, num_pages, page_size)
    rows = q[tokens].float().reshape(len(members), kv_heads, heads // kv_heads, head_dim)
    k, v = _gather(pools, meta.page_tables, members[:1], shared)
    # All rows see all shared keys: one product per KV head, [1, Hk, 1, M·G, D] as far as `_partial` is concerned.
    together = rows.transpose(0, 1).reshape(1, kv_heads, 1, -1, head_dim)
    everything = torch.full((1, 1), shared, device=q.device)
    prefix = _partial(together, k, v, everything, scale, None, softcap)
    merged = tuple(x.view(kv_heads, len(members), 1, heads // kv_heads, -1).transpose(0, 1) for x in prefix)
    if int(context.max()) > shared:
        own = meta.page_tables[:, num_pages:]
        k, v = _gather(pools, own, members, int(context.max()) - shared)
        suffix = _partial(rows.unsqueeze(2), k, v, (context - 1 - shared)[:, None], scale, None, softcap)
        merged = _merge(merged, suffix)
    sums, _, total = merged
    out[tokens] = (sums / total).reshape(len(members), heads, head_dim).to(out.dtype)


def _check_group(meta: AttentionMetadata, index: Tensor, num_pages: int, page_size: int) -> None:
    tables = meta.page_tables[index, :num_pages]
    lengths = meta.query_starts[index + 1] - meta.query_starts[index]
    short = meta.context_lens[index] < num_pages * page_size
    if bool((tables != tables[0]).any() | (lengths != 1).any() | short.any()):
        raise ValueError("paged_attention: a prefix group's sequences must be decodes whose first pages are the same")


def _merge(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Two partial softmaxes (sums, top, total) over disjoint keys as one; `a` has seen a key in every row."""
    top = torch.maximum(a[1], b[1])
    x, y = torch.exp(a[1] - top), torch.exp(b[1] - top)
    return a[0] * x + b[0] * y, top, a[2] * x + b[2] * y


def _decode_buckets(lengths: list[int], contexts: list[int], k_pool: Tensor, grouped: set[int]) -> Iterator[list[int]]:
    """Sequences with one query token and a context, without those of groups, by page count."""
    _, kv_heads, page_size, head_dim = k_pool.shape
    buckets: dict[int, list[int]] = defaultdict(list)
    for s, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        if length == 1 and context > 0 and s not in grouped:
            buckets[-(-context // (page_size * BUCKET_PAGES))].append(s)
    for multiple, members in sorted(buckets.items()):
        row = multiple * BUCKET_PAGES * page_size * kv_heads * head_dim
        size = max(1, BUCKET_ELEMENTS // row)
        for first in range(0, len(members), size):
            yield members[first : first + size]


def _gather(pools: _Pools, tables: Tensor, sequences: list[int], num_keys: int) -> tuple[Tensor, Tensor]:
    """K and V of the sequences' first `num_keys` positions, [B, Hk, L, D] fp32."""
    num_pages, kv_heads, page_size, head_dim = pools.k.shape
    index = torch.tensor(sequences, device=tables.device)
    # Pages past a row's own context may be any id at all: the null page stands in, its scores are masked.
    ids = tables[index, : -(-num_keys // page_size)].long().clamp(0, num_pages - 1)

    def contiguous(pages: Tensor) -> Tensor:
        return pages.transpose(1, 2).reshape(len(sequences), kv_heads, -1, head_dim)[:, :, :num_keys].float()

    k, v = pools.k[ids], pools.v[ids]
    if pools.paired:
        k, v = plain_keys(k), plain_values(v)
    return contiguous(k), contiguous(v)


def _attend(
    rows: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention of rows [B, Hk, Q, G, D] at `position` [B, Q] over k, v [B, Hk, L, D]; who sees nothing gets 0."""
    sums, _, total = _partial(rows, k, v, position, scale, window, softcap)
    return sums / total.masked_fill(total == 0.0, 1.0)


def _partial(
    rows: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax before its division: (Σ weight · v [B, Hk, Q, G, D], largest score and Σ weight [B, Hk, Q, G, 1])."""
    batch, kv_heads, queries, group, head_dim = rows.shape
    key = torch.arange(k.shape[2], device=k.device)
    visible = key <= position[:, :, None]
    if window is not None:
        visible &= key > position[:, :, None] - window
    # 0 · NaN is NaN: what nobody sees must not reach the second product.
    v = v.masked_fill(~visible.any(1)[:, None, :, None], 0.0)
    scores = torch.matmul(rows.flatten(2, 3), k.transpose(2, 3)) * scale
    scores = scores.view(batch, kv_heads, queries, group, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, :, None], float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0.0))
    sums = torch.matmul(weights.flatten(2, 3), v).view(batch, kv_heads, queries, group, head_dim)
    return sums, top, weights.sum(-1, keepdim=True)
