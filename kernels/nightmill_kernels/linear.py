"""Linear layers whose weight is packed once for the C kernels, for any number of rows.

A row's result depends on that row alone: not on the other rows of the call, on their number, or on threads.
"""

import torch
from torch import Tensor

from nightmill_kernels.backend import library_for
from nightmill_kernels.cpu.huge_pages import packed_memory
from nightmill_kernels.cpu.library import Library, LinearLayer
from nightmill_kernels.gated_mul import Gate

NO_GATE = -1
_VECTORS = frozenset({"avx512_bf16", "avx512", "avx2"})
_OURS = {torch.bfloat16: _VECTORS, torch.float32: _VECTORS | {"amx_bf16"}}


class PackedLinear:
    """x Wᵀ + b, or with a gate, gate(x W₁ᵀ + b₁) · (x W₂ᵀ + b₂). Holds a copy of weight and bias, packed."""

    __slots__ = ("_dtype", "_layer", "_library", "_memory", "inputs", "outputs")

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, gate: Gate | None) -> None:
        rows, self.inputs = weight.shape
        self.outputs = rows if gate is None else rows // 2
        self._library, self._dtype = library, weight.dtype
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        self._layer = LinearLayer.of(weight.dtype, self.outputs, self.inputs, NO_GATE if gate is None else gate.value)
        self._layer.has_bias = bias is not None
        self._memory = packed_memory(library.linear_bytes(self._layer))
        self._layer.packed = self._memory.data_ptr()
        library.linear_pack(self._layer, weight, None if bias is None else bias.contiguous())

    @property
    def nbytes(self) -> int:
        """Of the packed weight and bias."""
        return self._memory.nbytes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, outputs] of x [T, inputs], both with contiguous rows; into `out` if it is given."""
        if x.dim() != 2 or x.shape[1] != self.inputs or x.dtype != self._dtype:
            raise ValueError(f"x {x.dtype} {tuple(x.shape)} must be {self._dtype} [T, {self.inputs}]")
        if x.stride(1) != 1:
            x = x.contiguous()
        if out is None:
            out = torch.empty(x.shape[0], self.outputs, dtype=self._dtype)
        elif out.shape != (x.shape[0], self.outputs) or out.dtype != self._dtype or out.stride(1) != 1:
            raise ValueError(
                f"out {out.dtype} {tuple(out.shape)} must be {self._dtype} {(x.shape[0], self.outputs)} "
                f"with contiguous rows"
            )
        self._library.linear(self._layer, x, out)
        return out

    def rows(self, index: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of the weight [R, inputs], as they were: an embedding lookup. Index int32 or int64 [R]; `out`: where to.

        Raises:
            ValueError: A row that does not exist, or a gated layer.
        """
        if self._layer.gate != NO_GATE:
            raise ValueError("a layer with a gate keeps no rows")
        if index.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"rows are numbered by int32 or int64, not {index.dtype}")
        if out is None:
            out = torch.empty(len(index), self.inputs, dtype=self._dtype)
        elif out.shape != (len(index), self.inputs) or out.dtype != self._dtype or not out.is_contiguous():
            raise ValueError(
                f"out {out.dtype} {tuple(out.shape)} must be {self._dtype} {(len(index), self.inputs)}, contiguous"
            )
        self._library.linear_rows(self._layer, index.contiguous(), out)
        return out


def pack_linear(weight: Tensor, bias: Tensor | None = None, gate: Gate | None = None) -> PackedLinear | None:
    """Pack weight [outputs, inputs], or [2 · outputs, inputs] under a gate (gate first), and bias.

    None where torch's own product is to be used: not on a CPU, no C library, or torch's is faster (see `is_ours`).

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """
    if weight.dim() != 2 or (gate is not None and len(weight) % 2):
        raise ValueError(f"weight {tuple(weight.shape)} must be [outputs, inputs], twice as many outputs with a gate")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(f"bias {bias.dtype} {tuple(bias.shape)} does not fit weight {weight.dtype} {weight.shape}")
    if weight.device.type != "cpu":
        return None
    library = library_for(weight)
    if library is None or not is_ours(library.isa, weight.dtype):
        return None
    return PackedLinear(library, weight, bias, gate)


def is_ours(isa: str, dtype: torch.dtype) -> bool:
    """True when the C kernels multiply: decided by instruction set and dtype alone, so that no start differs.

    Everywhere but where torch's product was measured to be faster, or must be: bf16 on AMX, whose tiles oneDNN uses,
    and vectors of four. docs/adr/0004 has the figures.
    """
    return isa in _OURS[dtype]
