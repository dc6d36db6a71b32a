"""Cos and sin tables of every supported rotary embedding, equal to transformers'."""

import math

import torch
from torch import Tensor

from nightmill_worker.model.config import RopeConfig


def rope_table(rope: RopeConfig, max_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Float32 [max_len, rotary_dim]: cos of the rotary_dim / 2 frequencies, then their sin."""
    positions = torch.arange(max_len, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope)[None, :]
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    return table.to(device)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Float32 [rotary_dim / 2]: radians by which one position turns each pair of dimensions.

    `dynamic` and `longrope` give what holds within the original length; ModelConfig.resolve_max_model_len keeps
    sequences inside it.
    """
    dim = rope.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    powers: Tensor = rope.theta**exponents
    match rope.kind:
        case "linear":
            return 1.0 / powers / rope.factor
        case "llama3":
            return _llama3(rope, 1.0 / powers)
        case "yarn":
            return _yarn(rope, powers)
        case "longrope":
            return 1.0 / (torch.tensor(rope.short_factor, dtype=torch.float32) * powers)
        case _:
            return 1.0 / powers


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Long wavelengths are slowed down by `factor`, short ones kept, those between interpolated."""
    original = _original(rope)
    wavelength = 2 * math.pi / inverse
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    scaled = torch.where(wavelength > longest, inverse / rope.factor, inverse)
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((wavelength < shortest) | (wavelength > longest), scaled, between)


def _yarn(rope: RopeConfig, powers: Tensor) -> Tensor:
    """NTK by parts: dimensions that turn often are kept, those that turn rarely are interpolated."""
    dim, original = rope.rotary_dim, _original(rope)

    def dimension_of(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers does: no division by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _original(rope: RopeConfig) -> int:
    assert rope.original_max_position is not None, rope.kind
    return rope.original_max_position
