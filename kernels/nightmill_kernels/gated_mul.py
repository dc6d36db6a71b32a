"""Gated activations of the feed-forward layer."""

from torch import Tensor

from nightmill_kernels.reference import gated_mul as reference


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of gate_up [T, 2F] (gate first) as [T, F], computed in fp32, rounded once."""
    _check(gate_up)
    return reference.silu_mul(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up, the tanh form, of gate_up [T, 2F] (gate first) as [T, F]."""
    _check(gate_up)
    return reference.gelu_mul(gate_up)


def _check(gate_up: Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must be [T, 2F]")
