"""Gated activations of the feed-forward layer."""

from enum import Enum

import torch
from torch import Tensor

from nightmill_kernels.backend import library_for, on_triton
from nightmill_kernels.cpu.library import GELU_TANH, SILU
from nightmill_kernels.reference import gated_mul as reference


class Gate(Enum):
    """What is done to the first half of a row before it is multiplied with the second."""

    SILU = SILU
    GELU_TANH = GELU_TANH


def gated_mul(gate_up: Tensor, gate: Gate) -> Tensor:
    """gate(first half) · second half of gate_up [T, 2F] as [T, F], computed in fp32, rounded once."""
    return silu_mul(gate_up) if gate is Gate.SILU else gelu_mul(gate_up)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of gate_up [T, 2F] (gate first) as [T, F], computed in fp32, rounded once."""
    out = _by_kernel(gate_up, SILU)
    return reference.silu_mul(gate_up) if out is None else out


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up, the tanh form, of gate_up [T, 2F] (gate first) as [T, F]."""
    out = _by_kernel(gate_up, GELU_TANH)
    return reference.gelu_mul(gate_up) if out is None else out


def _by_kernel(gate_up: Tensor, gate: int) -> Tensor | None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must be [T, 2F] with contiguous rows, not {gate_up.stride()}")
    on_gpu = on_triton(gate_up)
    library = None if on_gpu else library_for(gate_up)
    if library is None and not on_gpu:
        return None
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    if library is None:
        from nightmill_kernels.gpu import gated_mul as gpu

        gpu.gated_mul(gate_up, out, gelu=gate == GELU_TANH)
        return out
    library.gated_mul(gate_up, out, gate)
    return out
