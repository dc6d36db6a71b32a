"""What happens to q, k and v between their projection and attention, in one launch.

A token's programs: one for its k and v, the others for tiles of its q heads. Each head is loaded once, as the halves
that the rotation pairs and the rest that it leaves.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from nightmill_kernels.gpu.spec import KernelSpec

if TYPE_CHECKING:
    from nightmill_kernels.qk_norm_rope import HeadNorms


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTiles:
    """Heads of a program and its warps."""

    q_heads: int
    kv_heads: int  # all of them, padded to a power of two
    num_warps: int


@cache
def plan_heads(heads: int, kv_heads: int, head_dim: int) -> HeadTiles:
    """Warps for 16-byte loads of half the k heads at a time, and as many q heads as make 16 elements a thread."""
    width = triton.next_power_of_2(head_dim)
    kv_block = triton.next_power_of_2(kv_heads)
    num_warps = min(4, max(1, kv_block * width // 512))
    q_block = min(triton.next_power_of_2(max(1, heads)), max(1, num_warps * 1024 // width))
    return HeadTiles(q_heads=q_block, kv_heads=kv_block, num_warps=num_warps)


@triton.jit
def _turn(
    x,  # the token's first head; its heads lie one after the other
    head,
    is_head,
    weight,
    cos_sin,  # the token's row
    eps,
    weight_offset,
    pool,  # the slot of the token's first head
    is_stored,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_STEP: tl.constexpr,  # from head to head in the pool
    WRITES: tl.constexpr,
):
    """Normalise, rotate, write back and store some heads of one token."""
    dtype = x.dtype.element_ty
    start = (head * D)[:, None]
    # Full tiles of columns even where every head reads the same (weights, cosines): one row of them would have to be
    # spread over the threads through shared memory, each time with a barrier.
    half = tl.zeros_like(start) + tl.arange(0, HALF_BLOCK)[None, :]
    rest = tl.zeros_like(start) + 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    in_half, in_rest = is_head[:, None] & (half < HALF), is_head[:, None] & (rest < D)
    rows = x + start
    HAS_REST: tl.constexpr = 2 * HALF < D and (weight is not None or pool is not None)
    if HALF:
        first = tl.load(rows + half, in_half, other=0.0).to(tl.float32)
        second = tl.load(rows + HALF + half, in_half, other=0.0).to(tl.float32)
        # All loads come first: what follows waits for them once.
        cos = tl.load(cos_sin + half, in_half, other=0.0)
        sin = tl.load(cos_sin + HALF + half, in_half, other=0.0)
    if HAS_REST:
        tail = tl.load(rows + rest, in_rest, other=0.0).to(tl.float32)
    if weight is not None:
        if HALF:
            first_weight = tl.load(weight + half, in_half, other=0.0)
            second_weight = tl.load(weight + HALF + half, in_half, other=0.0)
        if HAS_REST:
            tail_weight = tl.load(weight + rest, in_rest, other=0.0)
        squares = tl.zeros([head.shape[0]], tl.float32)
        if HALF:
            squares += tl.sum(first * first + second * second, 1)
        if HAS_REST:
            squares += tl.sum(tail * tail, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        # Rounded before the rotation, as models are trained and as separate operations would.
        if HALF:
            first = (first * scale * (first_weight.to(tl.float32) + weight_offset)).to(dtype).to(tl.float32)
            second = (second * scale * (second_weight.to(tl.float32) + weight_offset)).to(dtype).to(tl.float32)
        if HAS_REST:
            tail = tail * scale * (tail_weight.to(tl.float32) + weight_offset)
    if HALF:
        turned = (first * cos - second * sin).to(dtype)
        turned_second = (second * cos + first * sin).to(dtype)
        if WRITES:
            tl.store(rows + half, turned, in_half)
            tl.store(rows + HALF + half, turned_second, in_half)
        if pool is not None:
            places = pool + (head * HEAD_STEP)[:, None]
            tl.store(places + half, turned, in_half & is_stored)
            tl.store(places + HALF + half, turned_second, in_half & is_stored)
    if HAS_REST:
        if WRITES and weight is not None:
            tl.store(rows + rest, tail.to(dtype), in_rest)
        if pool is not None:
            tl.store(pool + (head * HEAD_STEP)[:, None] + rest, tail.to(dtype), in_rest & is_stored)


@triton.jit
def _qk_norm_rope(
    q,
    k,
    v,
    q_weight,
    k_weight,
    positions,
    cos_sin,
    k_pool,
    v_pool,
    slots,
    q_stride,
    k_stride,
    v_stride,
    pool_stride,
    eps,
    weight_offset,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    WRITES_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    table = cos_sin
    if HALF:
        table = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    if tl.program_id(1) == 0:
        head = tl.arange(0, KV_HEADS)
        is_head = head < HK
        if k_pool is not None:
            slot = tl.load(slots + token)  # int64; negative: a token that has no place
            is_stored = slot >= 0
            place = slot // PAGE * pool_stride + slot % PAGE * D
            column = tl.arange(0, D_BLOCK)[None, :]
            in_head = is_head[:, None] & (column < D)
            value = tl.load(v + token * v_stride + (head * D)[:, None] + column, in_head, other=0.0)
            pool = k_pool + place
        else:
            is_stored = False
            pool = None
        _turn(
            k + token * k_stride, head, is_head, k_weight, table, eps, weight_offset, pool, is_stored,
            D, HALF, HALF_BLOCK, REST_BLOCK, PAGE * D, WRITES_K,
        )  # fmt: skip
        if k_pool is not None:
            tl.store(v_pool + place + (head * (PAGE * D))[:, None] + column, value, in_head & is_stored)
    elif q is not None:
        q_head = (tl.program_id(1) - 1) * Q_HEADS + tl.arange(0, Q_HEADS)
        _turn(
            q + token * q_stride, q_head, q_head < H, q_weight, table, eps, weight_offset, None, False,
            D, HALF, HALF_BLOCK, REST_BLOCK, 0, True,
        )  # fmt: skip


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    *,
    cos_sin: Tensor | None,
    norms: "HeadNorms | None",
) -> None:
    """Normalise and rotate q in place; k likewise, but only into the pool, and v with it."""
    launch(q, k, v, positions, cos_sin, (k_pool, v_pool, slots), norms, writes_k=False)


def launch(
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    store: tuple[Tensor, Tensor, Tensor] | None,
    norms: "HeadNorms | None",
    *,
    writes_k: bool,
) -> None:
    """One launch over [T, H, D] tensors; what is None is left out. store: K pool, V pool, slots."""
    num_tokens, kv_heads, head_dim = k.shape
    heads = 0 if q is None else q.shape[1]
    rotated = 0 if cos_sin is None else cos_sin.shape[1]
    k_pool, v_pool, slots = store or (None, None, None)
    constants = plan_launch(heads, kv_heads, head_dim, rotated)
    turns_q = q is not None and (norms is not None or rotated > 0)
    parts = 1 + (triton.cdiv(heads, constants["Q_HEADS"]) if turns_q else 0)
    _qk_norm_rope[(num_tokens, parts)](
        q,
        k,
        v,
        None if norms is None else norms.q,
        None if norms is None else norms.k,
        positions if rotated else None,
        cos_sin,
        k_pool,
        v_pool,
        slots,
        0 if q is None else q.stride(0),
        k.stride(0),
        0 if v is None else v.stride(0),
        0 if k_pool is None else k_pool.stride(0),
        0.0 if norms is None else norms.eps,
        0.0 if norms is None else norms.weight_offset,
        PAGE=1 if k_pool is None else k_pool.shape[2],
        WRITES_K=writes_k,
        **constants,
    )


@cache
def plan_launch(heads: int, kv_heads: int, head_dim: int, rotated: int) -> dict[str, Any]:
    """The constants of a launch that follow from the model's shapes, and its warps."""
    tiles = plan_heads(heads, kv_heads, head_dim)
    return {
        "H": heads,
        "HK": kv_heads,
        "D": head_dim,
        "HALF": rotated // 2,
        "Q_HEADS": tiles.q_heads,
        "KV_HEADS": tiles.kv_heads,
        "D_BLOCK": triton.next_power_of_2(head_dim),
        "HALF_BLOCK": triton.next_power_of_2(max(1, rotated // 2)),
        "REST_BLOCK": triton.next_power_of_2(max(1, head_dim - rotated)),
        "num_warps": tiles.num_warps,
    }


def specs() -> list[KernelSpec]:
    """Every launch of the models that are measured, and the odd ones: partial rotation, no rotation, head size 80."""
    return [
        spec("Qwen3", 16, 8, 128, 128, has_norms=True),
        spec("Llama 8B", 32, 8, 128, 128),
        spec("SmolLM2", 9, 3, 64, 64),
        spec("Gemma 3 1B", 4, 1, 256, 256, has_norms=True),
        spec("Gemma 3 4B", 8, 4, 256, 256, has_norms=True),
        spec("Phi partial rotation", 24, 8, 128, 96),
        spec("head size 80", 32, 32, 80, 80),
        spec("no rotation", 16, 4, 128, 0),
    ]


def spec(
    config: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    *,
    stem: str = "qk_norm_rope",
    has_norms: bool = False,
    stores: bool = True,
    writes_k: bool = False,
) -> KernelSpec:
    """The launch of a model with these shapes, in bf16, pages of 16 tokens."""
    constants = plan_launch(heads, kv_heads, head_dim, rotated) | {"PAGE": 16 if stores else 1, "WRITES_K": writes_k}
    num_warps = constants.pop("num_warps")
    types = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "q_weight": "*bf16", "k_weight": "*bf16"}
    types |= {"positions": "*i32", "cos_sin": "*fp32", "k_pool": "*bf16", "v_pool": "*bf16", "slots": "*i64"}
    absent = [
        *(() if heads else ("q",)),
        *(() if has_norms else ("q_weight", "k_weight")),
        *(() if rotated else ("positions", "cos_sin")),
        *(() if stores else ("v", "k_pool", "v_pool", "slots")),
    ]
    pointers = {name: kind for name, kind in types.items() if name not in absent}
    strides = ("q_stride", "k_stride", "v_stride", "pool_stride")
    return KernelSpec(
        stem=stem,
        config=config,
        kernel=_qk_norm_rope,
        signature=pointers | dict.fromkeys(strides, "i32") | {"eps": "fp32", "weight_offset": "fp32"},
        constants=constants | dict.fromkeys(absent),
        divisible=frozenset((*pointers, *strides)),
        num_warps=num_warps,
        num_stages=3,
    )
