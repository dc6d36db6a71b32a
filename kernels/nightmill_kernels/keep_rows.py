"""Some rows of a tensor moved to its front: after the last attention only drawn tokens go on."""

import torch
from torch import Tensor

from nightmill_kernels.backend import library_for
from nightmill_kernels.cpu.library import KeepCall
from nightmill_kernels.layout import heads_dense
from nightmill_kernels.reference import keep_rows as reference


def keep_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of x [T, F] or [T, H, D], each row in one piece; index int32 [R], each larger than the one before.

    Takes x over: its first R rows are the result where the C library moves them, and x is not to be used after it.
    Raises ValueError for an index that does not ascend within T, where the C library looks at it.
    """
    if x.dim() not in (2, 3) or index.dim() != 1 or len(index) > len(x):
        raise ValueError(f"cannot keep {tuple(index.shape)} rows of {tuple(x.shape)}: [R] of [T, …] with R ≤ T")
    if index.dtype != torch.int32 or not index.is_contiguous() or not heads_dense(x):
        raise ValueError(f"index {index.dtype} must be contiguous int32, and rows of x in one piece, not {x.stride()}")
    library = library_for(x)
    if library is None:
        return reference.keep_rows(x, index)
    size = x.element_size()
    library.keep_rows(
        KeepCall(
            x=x.data_ptr(),
            index=index.data_ptr(),
            rows=len(x),
            count=len(index),
            width=x[:1].numel() * size,
            stride=x.stride(0) * size,
        )
    )
    return x[: len(index)]
