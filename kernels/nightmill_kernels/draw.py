"""Draw a token from each row of logits: temperature → min-p → top-k → top-p → Gumbel-max with Philox noise."""

import torch
from torch import Tensor

from nightmill_kernels.backend import library_for, on_triton
from nightmill_kernels.cpu.library import DTYPES, DrawCall
from nightmill_kernels.metadata import DrawRows
from nightmill_kernels.reference import draw as reference

__all__ = ["DrawRows", "draw"]

MAX_VOCAB = 1 << 20
"""More logits than this would overflow the sum of the weights that top-p goes by."""
_DTYPES = {
    "temperature": torch.float32,
    "min_p": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "seed": torch.int64,
    "position": torch.int64,
}


def draw(logits: Tensor, rows: DrawRows, *, has_filters: bool = True) -> Tensor:
    """int32 [R]: a token id for each row of logits [R, V]; at temperature 0 the largest logit, the lowest id of a tie.

    A row's draw is a function of its logits and parameters, the same bits on every instruction set and in the
    reference. With z = logit / temperature: min-p keeps z ≥ max + log(min_p); top-k those with fewer than k larger
    ones; top-p, of what is left, those with less than top_p of the weight above them. Each keeps whole ties. The
    largest z + noise wins.

    -1 where the row has no finite largest logit (a NaN anywhere, +inf, or all -inf): that row's forward went wrong.
    has_filters: False says that no row has top-k or top-p, which saves a GPU four launches; nothing else looks at it.

    Raises ValueError for a layout it cannot take.
    """
    _check(logits, rows)
    if on_triton(logits):
        from nightmill_kernels.gpu import draw as gpu

        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        gpu.draw(logits, rows, out, has_filters=has_filters)
        return out
    library = library_for(logits)
    if library is None:
        return reference.draw(logits, rows)
    out = torch.empty(logits.shape[0], dtype=torch.int32)
    call = DrawCall(
        logits=logits.data_ptr(),
        out=out.data_ptr(),
        temperature=rows.temperature.data_ptr(),
        min_p=rows.min_p.data_ptr(),
        top_k=rows.top_k.data_ptr(),
        top_p=rows.top_p.data_ptr(),
        seed=rows.seed.data_ptr(),
        position=rows.position.data_ptr(),
        rows=logits.shape[0],
        vocab=logits.shape[1],
        stride=logits.stride(0),
        dtype=DTYPES[logits.dtype],
        threads=torch.get_num_threads(),
    )
    return out if library.draw(call) else reference.draw(logits, rows)


def _check(logits: Tensor, rows: DrawRows) -> None:
    if logits.dim() != 2 or not 0 < logits.shape[1] <= MAX_VOCAB or logits.stride(1) != 1:
        raise ValueError(
            f"logits {tuple(logits.shape)} must be [R, V], 0 < V ≤ {MAX_VOCAB}, rows contiguous, not {logits.stride()}"
        )
    for name, dtype in _DTYPES.items():
        value = getattr(rows, name)
        if value.dtype != dtype or value.shape != logits.shape[:1] or not value.is_contiguous():
            raise ValueError(f"{name} must be {dtype} [{logits.shape[0]}], not {value.dtype} {tuple(value.shape)}")
        if value.device != logits.device:
            raise ValueError(f"{name} is on {value.device}, the logits on {logits.device}")
