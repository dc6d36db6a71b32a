"""What a device has that launches must fit into. Called through this module, where checks without a GPU replace it."""

from functools import cache
from typing import Any

import torch

KIB = 1024
# Bytes that a block may have at most, by compute capability: CUDA C++ Programming Guide, "Technical Specifications".
SHARED_LIMITS = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
DEFAULT_SHARED_LIMIT = SHARED_LIMITS[90]
"""Bytes, where there is no device: what the interpreter runs is what an H100 or H200 is given."""

_cuda: Any = torch.cuda  # the field is missing in torch's stubs


@cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block may have on a device. Asked once: every launch of attention wants to know."""
    if device.type != "cuda":
        return DEFAULT_SHARED_LIMIT
    return int(_cuda.get_device_properties(device).shared_memory_per_block_optin)


def archs_of(limit: int) -> frozenset[int]:
    """Compute capabilities whose blocks may have so many bytes of shared memory."""
    return frozenset(arch for arch, most in SHARED_LIMITS.items() if most == limit)
