"""Attention cases with poisoned memory, and an oracle in fp64 that shares no code with what it judges."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nightmill_kernels.backend import active_isa, use_isa, use_triton
from nightmill_kernels.cpu.isa import REFERENCE, available_isas
from nightmill_kernels.layout import pages_paired
from nightmill_kernels.paged_attention import AttentionMetadata, paged_attention

NAN = float("nan")
_DEVICE = os.environ.get("NIGHTMILL_TEST_DEVICE", "cpu")


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Inputs of one call, and the keys and values of each sequence in order."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    meta: AttentionMetadata
    keys: list[Tensor]  # [context, Hk, D] of each sequence
    values: list[Tensor]
    scale: float
    window: int | None
    softcap: float | None

    def run(self) -> Tensor:
        """Attention into an output full of NaN: what is not written shows."""
        out = torch.full_like(self.q, NAN)
        return paged_attention(
            self.q,
            self.k_pool,
            self.v_pool,
            self.meta,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            out=out,
        )


def build_case(
    *,
    query_lens: list[int],
    context_lens: list[int],
    dtype: torch.dtype,
    head_dim: int = 64,
    kv_heads: int = 2,
    group: int = 3,
    page_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    unowned: int = 0,
    seed: int = 0,
    shared: Sequence[tuple[list[int], int]] = (),
) -> AttentionCase:
    """Random sequences in a pool of which every slot that is not theirs holds NaN, page 0 and the tails of pages too.

    Contents depend on the seed and on a sequence's number alone, not on its page size or its batch mates. `shared`:
    sequences, and how many of their first pages are those of the first of them; the metadata does not say so.
    """
    pages = [-(-context // page_size) for context in context_lens]
    shuffled = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(seed + page_size)) + 1
    pool_shape = (len(shuffled) + 1, kv_heads, page_size, head_dim)
    k_pool, v_pool = torch.full(pool_shape, NAN, dtype=dtype), torch.full(pool_shape, NAN, dtype=dtype)
    tables = torch.zeros(len(pages), max(pages, default=0) + 2, dtype=torch.int32)
    leaders = {s: (members[0], count) for members, count in shared for s in members[1:]}
    keys, values, queries, used = [], [], [], 0
    for s, (length, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        generator = torch.Generator().manual_seed(1000 * seed + s)
        # Position by position, so that a longer context starts with the same keys.
        k = torch.randn(context, 2, kv_heads, head_dim, generator=generator).to(dtype)
        queries.append(_queries(length, context, group * kv_heads, head_dim, seed, s).to(dtype))
        own = shuffled[used : used + pages[s]]
        used += pages[s]
        if s in leaders:
            leader, count = leaders[s]
            own = torch.cat((tables[leader, :count].long(), own[count:]))
            k[: count * page_size] = torch.stack((keys[leader], values[leader]), 1)[: count * page_size]
        tables[s, : len(own)] = own
        position = torch.arange(context)
        page, offset = own[position // page_size], position % page_size
        put_keys(k_pool, page, offset, k[:, 0])
        put_values(v_pool, page, offset, k[:, 1])
        keys.append(k[:, 0])
        values.append(k[:, 1])
    queries.append(torch.full((unowned, group * kv_heads, head_dim), NAN, dtype=dtype))
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    meta = AttentionMetadata(
        query_starts=starts,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        page_tables=tables,
        max_query_len=max(query_lens, default=0),
    )
    return AttentionCase(
        q=torch.cat(queries),
        k_pool=k_pool,
        v_pool=v_pool,
        meta=meta,
        keys=keys,
        values=values,
        scale=head_dim**-0.5,
        window=window,
        softcap=softcap,
    )


def put_keys(pool: Tensor, page: Tensor, offset: Tensor, keys: Tensor) -> None:
    """Write keys [T, Hk, D] at places `offset` of pages, as the implementation that runs now keeps them.

    Element d of key t of a paired page and head: [t / 16][d / 2][t % 16][d % 2] of [page_size / 16][D / 2][16][2].
    """
    if not pages_paired(pool):
        pool[page, :, offset] = keys
        return
    _, kv_heads, page_size, dim = pool.shape
    flat = pool.view(-1, kv_heads, page_size * dim)
    d = torch.arange(dim)
    at = (offset // 16 * 16 * dim)[:, None] + d // 2 * 32 + (offset % 16 * 2)[:, None] + d % 2
    flat[page[:, None, None], torch.arange(kv_heads)[:, None], at[:, None, :]] = keys


def put_values(pool: Tensor, page: Tensor, offset: Tensor, values: Tensor) -> None:
    """`put_keys` for V: [t / 16][t % 16 / 2][d][t % 2] of [page_size / 16][8][D][2]."""
    if not pages_paired(pool):
        pool[page, :, offset] = values
        return
    _, kv_heads, page_size, dim = pool.shape
    flat = pool.view(-1, kv_heads, page_size * dim)
    at = (offset // 2 * 2 * dim + offset % 2)[:, None] + torch.arange(dim) * 2
    flat[page[:, None, None], torch.arange(kv_heads)[:, None], at[:, None, :]] = values


def _queries(length: int, context: int, heads: int, head_dim: int, seed: int, sequence: int) -> Tensor:
    """The last `length` of the sequence's queries: a function of position, so that chunks can be compared."""
    generator = torch.Generator().manual_seed(1000 * seed + sequence + 500)
    whole = torch.randn(max(context, length), heads, head_dim, generator=generator)
    return whole[len(whole) - length :]


def attention_oracle(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """(output, mean of |v| by the same weights), token by token in fp64."""
    tokens, heads, head_dim = case.q.shape
    out = torch.zeros(tokens, heads, head_dim, dtype=torch.float64)
    spread = torch.zeros_like(out)
    starts = case.meta.query_starts.tolist()
    group = heads // case.k_pool.shape[1]
    for s, context in enumerate(case.meta.context_lens.tolist()):
        keys = case.keys[s].double().repeat_interleave(group, dim=1)
        values = case.values[s].double().repeat_interleave(group, dim=1)
        for token in range(starts[s], starts[s + 1]):
            position = context - (starts[s + 1] - token)
            if position < 0:
                continue
            first = 0 if case.window is None else max(0, position - case.window + 1)
            k, v = keys[first : position + 1], values[first : position + 1]
            scores = (k * case.q[token].double()).sum(-1) * case.scale
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            weights = torch.softmax(scores, 0).unsqueeze(-1)
            out[token], spread[token] = (weights * v).sum(0), (weights * v.abs()).sum(0)
    return out, spread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors do not gain by threads, and waiting for them on a busy machine costs seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[*available_isas(), REFERENCE])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each implementation this machine can run, one after the other in this process."""
    with use_isa(request.param):
        assert active_isa() == request.param, "the C library did not build: see the warning in the log"
        yield request.param


@pytest.fixture(params=available_isas())
def c_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of the C library."""
    with use_isa(request.param):
        assert active_isa() == request.param, "the C library did not build: see the warning in the log"
        yield request.param


@pytest.fixture(scope="session")
def device() -> str:
    """Where tests of Triton kernels run: in the interpreter, or on a GPU."""
    return _DEVICE


# The interpreter has no bf16 arithmetic; on a device each dtype costs a compilation.
@pytest.fixture(params=[torch.float32, torch.float16 if _DEVICE == "cpu" else torch.bfloat16], ids=["fp32", "16 bits"])
def gpu_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """What Triton kernels are tested in."""
    return request.param


@pytest.fixture
def triton_only() -> Iterator[None]:
    """Wrappers of this test go to their Triton kernels."""
    pytest.importorskip("triton")
    with use_triton():
        yield


@pytest.fixture
def break_key() -> Callable[[Tensor, Tensor, int], None]:
    """Put NaN in the place of a key: (pool, page, offset)."""

    def broken(pool: Tensor, page: Tensor, offset: int) -> None:
        _, kv_heads, _, dim = pool.shape
        put_keys(
            pool, page.view(1).long(), torch.tensor([offset]), torch.full((1, kv_heads, dim), NAN, dtype=pool.dtype)
        )

    return broken


@pytest.fixture
def make_case() -> Callable[..., AttentionCase]:
    return build_case


@pytest.fixture
def oracle() -> Callable[[AttentionCase], tuple[Tensor, Tensor]]:
    return attention_oracle
