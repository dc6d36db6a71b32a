"""The lowest z that a row's filters keep, in Triton: exact, without a sort, and without the host.

    threshold   grid (row): a logit that the filters cannot cut above: of top-k the k-th best of the survey's lanes
                (each lane's best is a token, so there are k tokens as good), of top-p the largest minus NEAR
    gather      grid (pieces of the row, row): the tokens from there on become candidates; what the others weigh is
                added up
    search      grid (row): the cut, bit by bit, among the candidates; then again in the whole row where they were too
                many or did not hold top_p of the weight: with top-p on a flat distribution, or with k in the thousands

A cut is the largest value at which what stands from it on reaches a target: k tokens, or top_p of the weight. Logits
are searched rather than z: division by the temperature keeps their order. Counts and weights are integers, so no sum
depends on its order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nightmill_kernels.gpu.elementary import log, weight
from nightmill_kernels.gpu.spec import KernelSpec
from nightmill_kernels.metadata import DrawRows

CAPACITY = 8192
"""Candidates of a row."""
SURVEYED = 8
"""Pieces of a row that the survey makes at most, so that one program can hold their lanes."""
_NEAR = tl.constexpr(8.0)
_THRESHOLD_WARPS = 8
_GATHER_BLOCK, _GATHER_WARPS, _GATHER_PIECES = 1024, 4, 16
_SEARCH_BLOCK, _SEARCH_WARPS = 1024, 16


@triton.jit
def _order(x):
    """Floats as unsigned integers of the same order."""
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _from_order(key, SHIFT: tl.constexpr):
    """Of the upper 32 - SHIFT bits of an order: those of a type whose lower bits are all 0."""
    is_positive = key >= (0x80000000 >> SHIFT)
    whole = (key << SHIFT) | tl.where(is_positive, 0, (1 << SHIFT) - 1).to(tl.uint32)
    bits = whole ^ tl.where(is_positive, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _has_top_k(top_k, row, vocab):
    k = tl.load(top_k + row)
    return (k > 0) & (k < vocab)


@triton.jit
def _highest(tops, row, surveyed, SURVEYED: tl.constexpr):
    """The largest logit; +inf for a row that cannot be drawn from."""
    source = tl.arange(0, SURVEYED)
    return tl.max(tl.load(tops + row * surveyed + source, source < surveyed, other=float("-inf")), 0)


@triton.jit
def _min_p_cut(min_p, row, highest_z):
    share = tl.load(min_p + row)
    return tl.where(share > 0.0, highest_z + log(share), float("-inf"))


@triton.jit(do_not_specialize=("surveyed", "num_lanes"))
def _threshold(
    tops,
    lanes,
    lows,
    counts,
    rests,
    temperature,
    top_k,
    top_p,
    vocab,
    surveyed,
    num_lanes,
    SURVEYED: tl.constexpr,
    LANES: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row)
    highest = _highest(tops, row, surveyed, SURVEYED)
    low = float("inf")
    if (t > 0.0) & (highest > float("-inf")) & (highest < float("inf")):
        if _has_top_k(top_k, row, vocab):
            k = tl.load(top_k + row)
            lane = tl.arange(0, LANES)
            is_inside = lane < num_lanes
            key = _order(tl.load(lanes + row * num_lanes + lane, is_inside, other=float("-inf"))) >> SHIFT
            # At least k lanes are from `least` on, or `least` is -inf; fewer are from `most` on.
            least = _order(tl.full((), float("-inf"), tl.float32)) >> SHIFT
            most = (_order(highest) >> SHIFT) + 1
            while most - least > 1:
                middle = least + ((most - least) >> 1)
                reaches = tl.sum(((key >= middle) & is_inside).to(tl.int32), 0) >= k
                least = tl.where(reaches, middle, least)
                most = tl.where(reaches, most, middle)
            low = _from_order(least, SHIFT)
        elif tl.load(top_p + row) < 1.0:
            low = highest - _NEAR * t
    tl.store(lows + row, low)
    tl.store(counts + row, 0)
    tl.store(rests + row, tl.full((), 0, tl.int64))


@triton.jit(do_not_specialize=("tiles", "surveyed"))
def _gather(
    logits,
    tops,
    lows,
    counts,
    rests,
    candidates,
    temperature,
    min_p,
    top_k,
    stride,
    vocab,
    tiles,
    surveyed,
    SURVEYED: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    low = tl.load(lows + row)
    if low < float("inf"):
        t = tl.load(temperature + row)
        highest = tl.div_rn(_highest(tops, row, surveyed, SURVEYED), t)
        floor = _min_p_cut(min_p, row, highest)
        weighs_rest = _has_top_k(top_k, row, vocab) == 0  # else the cut is at `low` or above
        rest = tl.zeros((BLOCK,), tl.int64)
        for tile in range(tiles):
            token = (piece * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + token, token < vocab, other=float("-inf"))
            is_near = (x.to(tl.float32) >= low) & (token < vocab)
            number = tl.sum(is_near.to(tl.int32), 0)
            if number > 0:
                # In any order: what is made of them is counts and sums of integers.
                place = tl.atomic_add(counts + row, number) + tl.cumsum(is_near.to(tl.int32), 0) - 1
                tl.store(candidates + row * CAPACITY + place, x, is_near & (place < CAPACITY))
            if weighs_rest:
                z = tl.div_rn(x.to(tl.float32), t)
                rest += tl.where(is_near | (z < floor), 0, weight(z - highest))
        if weighs_rest:
            tl.atomic_add(rests + row, tl.sum(rest, 0))


@triton.jit
def _count_from(source, number, least, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits are from `least` on."""
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, number, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source + at, at < number, other=float("-inf"))
        total += (((_order(x) >> SHIFT) >= least) & (at < number)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _weigh_from(source, number, least, cut, t, highest, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """What those from `least` on weigh, of those that `cut` keeps."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, number, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source + at, at < number, other=float("-inf")).to(tl.float32)
        z = tl.div_rn(x, t)
        total += tl.where(((_order(x) >> SHIFT) >= least) & (z >= cut), weight(z - highest), 0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=("surveyed",))
def _search(
    source,
    tops,
    lows,
    counts,
    rests,
    todo,
    cut_of,
    temperature,
    min_p,
    top_k,
    top_p,
    stride,
    vocab,
    surveyed,
    IS_WHOLE: tl.constexpr,
    SURVEYED: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row)
    t = tl.where(t > 0.0, t, 1.0)
    top = _highest(tops, row, surveyed, SURVEYED)
    highest = tl.div_rn(top, t)
    cut = _min_p_cut(min_p, row, highest)
    low = tl.load(lows + row)
    number = tl.load(counts + row)
    rest = tl.load(rests + row)
    is_searched = low < float("inf")
    is_left = is_searched & (number > CAPACITY)
    if IS_WHOLE:
        low = float("-inf")
        number = vocab
        rest = tl.full((), 0, tl.int64)
        is_left = is_left & (number < 0)
        is_searched = tl.load(todo + row) != 0
    source += row * stride
    # The lowest order of a candidate: -0 is one where `low` is 0, and stands below it in order.
    bottom = tl.where(low == 0.0, 0x7FFFFFFF, _order(low)).to(tl.uint32) >> SHIFT
    if is_searched & (is_left == 0):
        p = tl.load(top_p + row)
        if _has_top_k(top_k, row, vocab):
            k = tl.load(top_k + row)
            least, most = bottom, (_order(top) >> SHIFT) + 1
            while most - least > 1:
                middle = least + ((most - least) >> 1)
                reaches = _count_from(source, number, middle, SHIFT, BLOCK) >= k
                least = tl.where(reaches, middle, least)
                most = tl.where(reaches, most, middle)
            cut = tl.maximum(cut, tl.div_rn(_from_order(least, SHIFT), t))
            rest = tl.full((), 0, tl.int64)
        if p < 1.0:
            found = _weigh_from(source, number, bottom, cut, t, highest, SHIFT, BLOCK)
            share = tl.ceil((found + rest).to(tl.float64) * p.to(tl.float64)).to(tl.int64)
            wanted = tl.where(share < 1, 1, share)
            is_left = found < wanted
            if is_left == 0:
                least, most = bottom, (_order(top) >> SHIFT) + 1
                while most - least > 1:
                    middle = least + ((most - least) >> 1)
                    reaches = _weigh_from(source, number, middle, cut, t, highest, SHIFT, BLOCK) >= wanted
                    least = tl.where(reaches, middle, least)
                    most = tl.where(reaches, most, middle)
                cut = tl.maximum(cut, tl.div_rn(_from_order(least, SHIFT), t))
    if IS_WHOLE:
        tl.store(cut_of + row, cut, is_searched)
    else:
        tl.store(cut_of + row, cut)
        tl.store(todo + row, is_left.to(tl.int32))


def cuts(logits: Tensor, rows: DrawRows, tops: Tensor, lanes: Tensor) -> Tensor:
    """fp32 [R]: the lowest z that each row's filters keep.

    Args:
        logits: [R, V] with dense rows.
        rows: their parameters.
        tops: fp32 [R, pieces ≤ SURVEYED] the largest logit of each piece of a row, +inf where it has a NaN.
        lanes: fp32 [R, L] the largest of L parts of the row, disjoint, that cover it; -inf where there is none.
    """
    num_rows, vocab = logits.shape
    surveyed, num_lanes = tops.shape[1], lanes.shape[1]
    lows, cut = tops.new_empty(num_rows), tops.new_empty(num_rows)
    counts, todo = (torch.empty(num_rows, dtype=torch.int32, device=logits.device) for _ in range(2))
    rests = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    candidates = logits.new_empty(num_rows, CAPACITY)
    shift = shift_of(logits.dtype)
    _threshold[(num_rows,)](
        tops,
        lanes,
        lows,
        counts,
        rests,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        vocab,
        surveyed,
        num_lanes,
        SURVEYED=SURVEYED,
        LANES=triton.next_power_of_2(num_lanes),
        SHIFT=shift,
        num_warps=_THRESHOLD_WARPS,
    )
    num_tiles = triton.cdiv(vocab, _GATHER_BLOCK)
    tiles = triton.cdiv(num_tiles, _GATHER_PIECES)
    _gather[(triton.cdiv(num_tiles, tiles), num_rows)](
        logits,
        tops,
        lows,
        counts,
        rests,
        candidates,
        rows.temperature,
        rows.min_p,
        rows.top_k,
        logits.stride(0),
        vocab,
        tiles,
        surveyed,
        SURVEYED=SURVEYED,
        CAPACITY=CAPACITY,
        BLOCK=_GATHER_BLOCK,
        num_warps=_GATHER_WARPS,
        enable_fp_fusion=False,
    )
    for is_whole, source in ((False, candidates), (True, logits)):
        _search[(num_rows,)](
            source,
            tops,
            lows,
            counts,
            rests,
            todo,
            cut,
            rows.temperature,
            rows.min_p,
            rows.top_k,
            rows.top_p,
            source.stride(0),
            vocab,
            surveyed,
            IS_WHOLE=is_whole,
            SURVEYED=SURVEYED,
            CAPACITY=CAPACITY,
            SHIFT=shift,
            BLOCK=_SEARCH_BLOCK,
            num_warps=_SEARCH_WARPS,
            enable_fp_fusion=False,
        )
    return cut


def shift_of(dtype: torch.dtype) -> int:
    """Low bits that are 0 in every value of a type, as float32."""
    return 16 if dtype == torch.bfloat16 else 0


_POINTERS = {
    "tops": "*fp32",
    "lanes": "*fp32",
    "lows": "*fp32",
    "counts": "*i32",
    "rests": "*i64",
    "todo": "*i32",
    "cut_of": "*fp32",
    "temperature": "*fp32",
    "min_p": "*fp32",
    "top_k": "*i32",
    "top_p": "*fp32",
}
_INTEGERS = dict.fromkeys(("stride", "vocab", "tiles", "surveyed", "num_lanes"), "i32")


def specs() -> list[KernelSpec]:
    """One survey's lanes fill its largest program from 7,169 logits on, so the vocabularies differ by nothing else."""
    return [spec for dtype in ("bf16", "fp32") for spec in _specs(dtype)]


def _specs(dtype: str) -> list[KernelSpec]:
    shift = {"SHIFT": 16 if dtype == "bf16" else 0}
    search = {"SURVEYED": SURVEYED, "CAPACITY": CAPACITY, "BLOCK": _SEARCH_BLOCK} | shift
    gather = {"SURVEYED": SURVEYED, "CAPACITY": CAPACITY, "BLOCK": _GATHER_BLOCK}
    threshold = {"SURVEYED": SURVEYED, "LANES": SURVEYED * 1024} | shift
    return [
        _spec("threshold", dtype, _threshold, threshold, _THRESHOLD_WARPS),
        _spec("gather", dtype, _gather, gather, _GATHER_WARPS),
        _spec("search candidates", dtype, _search, search | {"IS_WHOLE": False}, _SEARCH_WARPS),
        _spec("search row", dtype, _search, search | {"IS_WHOLE": True}, _SEARCH_WARPS),
    ]


def _spec(name: str, dtype: str, kernel: Any, constants: dict[str, Any], warps: int) -> KernelSpec:
    types = {"logits": f"*{dtype}", "source": f"*{dtype}", "candidates": f"*{dtype}"} | _POINTERS | _INTEGERS
    signature = {argument: types[argument] for argument in kernel.arg_names if argument not in constants}
    return KernelSpec(
        stem="cut",
        config=f"{name} {dtype}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        divisible=frozenset(signature) - {"tiles", "surveyed", "num_lanes"},
        num_warps=warps,
        num_stages=3,
        enable_fp_fusion=name == "threshold",
    )
