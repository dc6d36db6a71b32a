"""Draws in Triton: three launches, four more where a row has top-k or top-p; the host waits for none of them.

    survey      grid (pieces of the row, row): the piece's largest logit, and the lowest id that has it
    contest     grid (pieces of the row, row): the piece's best z + noise among the z ≥ cut
    settle      grid (row): the best of the pieces; -1 where the row's largest logit is not finite

The noise of a token takes about a hundred operations, of which the logarithms are eighty. `contest` takes them in tiles
that hold a token which could still win, and that is told by a comparison of random words with a limit: a token at
distance d from the best so far needs a word below 2^32 · e^-d. In a language model's logits that is about one token a
row. So a draw costs two reads of the logits, a Philox block for four tokens, and one exp2 a token.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nightmill_kernels.gpu.cut import SURVEYED, cuts
from nightmill_kernels.gpu.elementary import gumbel, gumbel_at, log, philox
from nightmill_kernels.gpu.spec import KernelSpec
from nightmill_kernels.metadata import DrawRows

MAX_PIECES = 64  # a power of two: one load holds what the pieces of a row found
_SURVEY_BLOCK, _SURVEY_WARPS = 1024, 4
_CONTEST_BLOCK, _CONTEST_WARPS = 512, 1  # a warp decides alone which tiles it skips
_PROGRAMS = 4096  # of a launch: about 32 warps on each of an H200's 132 multiprocessors

# They change with the number of rows: no step is to wait for a build made for 16 tiles.
_VARYING = ("tiles", "surveyed")


@triton.jit(do_not_specialize=_VARYING)
def _survey(logits, tops, firsts, lanes_out, stride, vocab, tiles, BLOCK: tl.constexpr, KEEP_LANES: tl.constexpr):
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    first_id = piece * tiles * BLOCK + lane
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = first_id
    for tile in range(tiles):
        token = first_id + tile * BLOCK
        x = tl.load(logits + row * stride + token, token < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), x)  # either means that the row cannot be drawn from
        best_id = tl.where(x > best, token, best_id)
        best = tl.where(x > best, x, best)
    top = tl.max(best, 0)
    at = row * tl.num_programs(0) + piece
    tl.store(tops + at, top)
    tl.store(firsts + at, tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), 0))
    if KEEP_LANES:
        tl.store(lanes_out + at * BLOCK + lane, best)


@triton.jit(do_not_specialize=_VARYING)
def _contest(
    logits,
    tops,
    firsts,
    cut_of,
    temperature,
    min_p,
    seed,
    position,
    values,
    ids,
    stride,
    vocab,
    tiles,
    surveyed,
    HAS_CUTS: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t = tl.load(temperature + row)
    is_random = t > 0.0
    t = tl.where(is_random, t, 1.0)
    source = tl.arange(0, MAX_PIECES)
    top = tl.load(tops + row * surveyed + source, source < surveyed, other=float("-inf"))
    token = tl.load(firsts + row * surveyed + source, source < surveyed, other=0)
    z = tl.div_rn(top, t)
    highest = tl.max(z, 0)
    best = highest
    best_id = tl.min(tl.where(z == highest, token, 0x7FFFFFFF), 0)
    if is_random & (highest > float("-inf")) & (highest < float("inf")):
        seed_ = tl.load(seed + row)
        position_ = tl.load(position + row)
        if HAS_CUTS:
            cut = tl.load(cut_of + row)
        else:
            share = tl.load(min_p + row)
            cut = tl.where(share > 0.0, highest + log(share), float("-inf"))
        # What the pieces' largest come to is to be beaten.
        value = tl.where((source < surveyed) & (z >= cut), z + gumbel_at(token, seed_, position_), float("-inf"))
        best = tl.max(value, 0)
        best_id = tl.min(tl.where(value == best, token, 0x7FFFFFFF), 0)
        # `near` is z but for its last bits; the slack is more than these and the roundings of the noise amount to.
        inverse = tl.minimum(1.0 / t, 3.0e38)
        slack = 0.02 + 4e-6 * (tl.abs(highest) + tl.abs(best))
        block = tl.arange(0, BLOCK // 4)
        for tile in range(tiles):
            first_block = (piece * tiles + tile) * (BLOCK // 4)
            ids_ = (first_block + block)[:, None] * 4 + tl.arange(0, 4)[None, :]
            x = tl.load(logits + row * stride + ids_, ids_ < vocab, other=float("-inf")).to(tl.float32)
            near = x * inverse + slack
            nearest = tl.max(near)
            if (nearest + 22.88 >= best) & (nearest >= cut):
                w0, w1, w2, w3 = philox((first_block + block).to(tl.uint32), seed_, position_)
                word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK // 4, 4))
                limit = tl.exp2((near - best) * 1.4426950408889634 + 32.0)
                if tl.max(((word.to(tl.float32) <= limit) & (near >= cut)).to(tl.int32)) > 0:
                    z_ = tl.div_rn(x, t)
                    value_ = tl.where(z_ >= cut, z_ + gumbel(word), float("-inf"))
                    top_ = tl.max(value_)
                    first_ = tl.min(tl.where(value_ == top_, ids_, 0x7FFFFFFF))
                    is_better = (top_ > best) | ((top_ == best) & (first_ < best_id))
                    best = tl.where(is_better, top_, best)
                    best_id = tl.where(is_better, first_, best_id)
    at = row * tl.num_programs(0) + piece
    tl.store(values + at, best)
    tl.store(ids + at, best_id)


@triton.jit(do_not_specialize=("pieces",))
def _settle(values, ids, out, pieces, MAX_PIECES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, MAX_PIECES)
    value = tl.load(values + row * pieces + piece, piece < pieces, other=float("-inf"))
    token = tl.load(ids + row * pieces + piece, piece < pieces, other=0)
    best = tl.max(value, 0)
    winner = tl.min(tl.where(value == best, token, 0x7FFFFFFF), 0)
    tl.store(out + row, tl.where((best > float("-inf")) & (best < float("inf")), winner, -1))


def pieces_of(num_rows: int, vocab: int, block: int, most: int = MAX_PIECES) -> tuple[int, int]:
    """(pieces of a row, tiles of a piece): enough programs for a large GPU, each of as many tiles as that leaves."""
    num_tiles = triton.cdiv(vocab, block)
    pieces = min(most, num_tiles, triton.cdiv(_PROGRAMS, num_rows))
    tiles = triton.cdiv(num_tiles, pieces)
    return triton.cdiv(num_tiles, tiles), tiles


def survey(logits: Tensor, *, keep_lanes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of each piece of a row: the largest logit, fp32 [R, pieces], +inf if there is a NaN; the lowest id that has it;
    and the largest of each lane of a piece, fp32 [R, lanes], if these are wanted.
    """
    num_rows, vocab = logits.shape
    pieces, tiles = pieces_of(num_rows, vocab, _SURVEY_BLOCK, SURVEYED if keep_lanes else MAX_PIECES)
    tops = torch.empty(num_rows, pieces, dtype=torch.float32, device=logits.device)
    firsts = torch.empty(num_rows, pieces, dtype=torch.int32, device=logits.device)
    lanes = tops.new_empty(num_rows, pieces * _SURVEY_BLOCK) if keep_lanes else tops
    _survey[(pieces, num_rows)](
        logits,
        tops,
        firsts,
        lanes,
        logits.stride(0),
        vocab,
        tiles,
        BLOCK=_SURVEY_BLOCK,
        KEEP_LANES=keep_lanes,
        num_warps=_SURVEY_WARPS,
    )
    return tops, firsts, lanes


def draw(logits: Tensor, rows: DrawRows, out: Tensor, *, has_filters: bool) -> None:
    """Write out int32 [R] of logits [R, V] with dense rows; has_filters: a row may have top-k or top-p."""
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    tops, firsts, lanes = survey(logits, keep_lanes=has_filters)
    cut = cuts(logits, rows, tops, lanes) if has_filters else tops
    pieces, tiles = pieces_of(num_rows, vocab, _CONTEST_BLOCK)
    values, ids = tops.new_empty(num_rows, pieces), firsts.new_empty(num_rows, pieces)
    _contest[(pieces, num_rows)](
        logits,
        tops,
        firsts,
        cut,
        rows.temperature,
        rows.min_p,
        rows.seed,
        rows.position,
        values,
        ids,
        logits.stride(0),
        vocab,
        tiles,
        tops.shape[1],
        HAS_CUTS=has_filters,
        MAX_PIECES=MAX_PIECES,
        BLOCK=_CONTEST_BLOCK,
        num_warps=_CONTEST_WARPS,
        enable_fp_fusion=False,
    )
    _settle[(num_rows,)](values, ids, out, pieces, MAX_PIECES=MAX_PIECES, num_warps=1)


_TYPES = {
    "tops": "*fp32",
    "firsts": "*i32",
    "lanes_out": "*fp32",
    "cut_of": "*fp32",
    "temperature": "*fp32",
    "min_p": "*fp32",
    "seed": "*i64",
    "position": "*i64",
    "values": "*fp32",
    "ids": "*i32",
    "out": "*i32",
    "stride": "i32",
    "vocab": "i32",
    "tiles": "i32",
    "surveyed": "i32",
    "pieces": "i32",
}


def specs() -> list[KernelSpec]:
    """For any vocabulary that is divisible by 16, and so may its rows be."""
    survey, contest = {"BLOCK": _SURVEY_BLOCK}, {"MAX_PIECES": MAX_PIECES, "BLOCK": _CONTEST_BLOCK}
    found = [_spec("settle", "", _settle, {"MAX_PIECES": MAX_PIECES}, 1)]
    for dtype in ("bf16", "fp32"):
        for has_filters, what in ((False, ""), (True, " filters")):
            keeps, has = {"KEEP_LANES": has_filters}, {"HAS_CUTS": has_filters}
            found.append(_spec(f"survey {dtype}{what}", dtype, _survey, survey | keeps, _SURVEY_WARPS))
            found.append(_spec(f"contest {dtype}{what}", dtype, _contest, contest | has, _CONTEST_WARPS))
    return found


def _spec(config: str, dtype: str, kernel: Any, constants: dict[str, Any], warps: int) -> KernelSpec:
    types = {"logits": f"*{dtype}"} | _TYPES
    signature = {argument: types[argument] for argument in kernel.arg_names if argument not in constants}
    return KernelSpec(
        stem="draw",
        config=config,
        kernel=kernel,
        signature=signature,
        constants=constants,
        divisible=frozenset(signature) - {"tiles", "surveyed", "pieces"},
        num_warps=warps,
        num_stages=3,
        enable_fp_fusion=not config.startswith("contest"),
    )
