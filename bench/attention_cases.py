"""Inputs of one layer's attention: decodes, prefills, and the mixed steps that the benchmark's runs are made of.

The shape is SmolLM2-135M's: 9 query heads, 3 KV heads, head size 64, pages of 16 tokens. Calls go through the pools of
several layers in turn, so that no pool stays in a cache from one call to the next.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nightmill_kernels.cpu.huge_pages import zeroed_on_touch
from nightmill_kernels.metadata import AttentionMetadata, PrefixGroups

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
BATCH, SHARED_TOKENS, CHUNK, LAYERS = 64, 384, 512, 8
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence of a step: new tokens at the end of a context whose first `shared` ones lie in everyone's pages."""

    tokens: int
    context: int
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one call for each of LAYERS layers, and what the call cannot do without."""

    q: Tensor
    pools: list[tuple[Tensor, Tensor]]
    meta: AttentionMetadata
    flops: int  # multiply-adds of the visible scores and sums, twice
    num_bytes: int  # of K and V, those that are shared once


def grouped(case: Case) -> Case:
    """The same, told which pages its decodes share: decodes come first."""
    lengths = case.meta.query_starts[1:] - case.meta.query_starts[:-1]
    members = torch.nonzero(lengths == 1).flatten().int()
    groups = PrefixGroups(
        starts=torch.tensor([0, len(members)], dtype=torch.int32),
        sequences=members,
        num_pages=torch.tensor([SHARED_TOKENS // PAGE_SIZE], dtype=torch.int32),
    )
    return replace(case, meta=replace(case.meta, groups=groups))


def decode_case(shared: bool, dtype: torch.dtype) -> Case:
    """64 decodes at contexts of some 500 tokens, of which 384 are shared, or none."""
    contexts = torch.randint(450, 551, (BATCH,)).tolist()
    return case_of([Row(1, context, SHARED_TOKENS if shared else 0) for context in contexts], dtype)


def prefill_case(dtype: torch.dtype, past: int, tokens: int = CHUNK) -> Case:
    """A prompt's chunk of 512 tokens behind `past` others."""
    return case_of([Row(tokens, past + tokens)], dtype)


def w1_case(dtype: torch.dtype) -> Case:
    """A step of W1: 64 decodes with 384 shared and some 90 own tokens, and two prompts' own parts."""
    return grouped(case_of([*_w1_decodes(), *_W1_PROMPTS], dtype))


def w1_parts(dtype: torch.dtype) -> tuple[Case, Case]:
    """Its prefills and its decodes, each a call."""
    return case_of(_W1_PROMPTS, dtype), grouped(case_of(_w1_decodes(), dtype))


def w3_case(dtype: torch.dtype) -> Case:
    """A step of W3: 24 decodes at some 1,050 tokens that nobody shares, 488 tokens of two prompts of 1,024."""
    return case_of([*_w3_decodes(), *_W3_PROMPTS], dtype)


def w3_parts(dtype: torch.dtype) -> tuple[Case, Case]:
    """Its prefills and its decodes, each a call."""
    return case_of(_W3_PROMPTS, dtype), case_of(_w3_decodes(), dtype)


_W1_PROMPTS = [Row(41, 384 + 41, SHARED_TOKENS), Row(49, 384 + 49, SHARED_TOKENS)]
_W3_PROMPTS = [Row(312, 1024), Row(176, 176)]


def _w1_decodes() -> list[Row]:
    return [Row(1, context, SHARED_TOKENS) for context in torch.randint(430, 531, (BATCH,)).tolist()]


def _w3_decodes() -> list[Row]:
    return [Row(1, context) for context in torch.randint(1024, 1081, (24,)).tolist()]


def case_of(rows: list[Row], dtype: torch.dtype) -> Case:
    """The call of a step of these sequences; their pages lie in no order."""
    lengths, contexts = [row.tokens for row in rows], [row.context for row in rows]
    common, own = SHARED_TOKENS // PAGE_SIZE, [-(-(row.context - row.shared) // PAGE_SIZE) for row in rows]
    tables = torch.zeros(len(rows), max(-(-context // PAGE_SIZE) for context in contexts), dtype=torch.int32)
    ids = iter((torch.randperm(sum(own)) + common + 1).tolist())
    for table, row, count in zip(tables, rows, own, strict=True):
        first = row.shared // PAGE_SIZE
        table[:first] = torch.arange(1, first + 1)
        table[first : first + count] = torch.tensor([next(ids) for _ in range(count)])
    shape = (common + sum(own) + 1, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pages = zeroed_on_touch((LAYERS, 2, *shape), dtype)  # in huge pages where there are any, as the engine's pool
    for layer in pages.flatten(0, 1):
        layer.copy_(torch.randn(shape))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    meta = AttentionMetadata(
        query_starts=starts,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        page_tables=tables,
        max_query_len=max(lengths),
    )
    visible = sum(n * context - n * (n - 1) // 2 for n, context in zip(lengths, contexts, strict=True))
    keys = max(row.shared for row in rows) + sum(row.context - row.shared for row in rows)
    return Case(
        torch.randn(sum(lengths), HEADS, HEAD_DIM).to(dtype),
        [(layer[0], layer[1]) for layer in pages],
        meta,
        flops=4 * visible * HEADS * HEAD_DIM,
        num_bytes=2 * keys * KV_HEADS * HEAD_DIM * dtype.itemsize,
    )
