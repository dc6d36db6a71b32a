"""Rotary embedding in Triton, alone and with the write into the page pool: `qk_norm_rope` without norms."""

from torch import Tensor

from nightmill_kernels.gpu.qk_norm_rope import launch, spec
from nightmill_kernels.gpu.spec import KernelSpec


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q and k in place."""
    launch(q, k, None, positions, cos_sin, None, None, writes_k=True)


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
) -> None:
    """Rotate q and k in place and write k and v at their slots."""
    launch(q, k, v, positions, cos_sin, (k_pool, v_pool, slots), None, writes_k=True)


def specs() -> list[KernelSpec]:
    """The decoder calls `qk_norm_rope`; these are for whoever calls the parts."""
    return [
        spec("rope", 32, 8, 128, 128, stem="rope", stores=False, writes_k=True),
        spec("rope and store", 32, 8, 128, 128, stem="rope", writes_k=True),
    ]
