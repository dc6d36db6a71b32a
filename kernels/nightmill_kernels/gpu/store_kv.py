"""The write of K and V into the page pool in Triton: `qk_norm_rope` without norms and rotation."""

from torch import Tensor

from nightmill_kernels.gpu.qk_norm_rope import launch, spec
from nightmill_kernels.gpu.spec import KernelSpec


def store_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Write k and v at their slots; negative slots are skipped."""
    launch(None, k, v, None, None, (k_pool, v_pool, slots), None, writes_k=False)


def specs() -> list[KernelSpec]:
    """The decoder calls `qk_norm_rope`; this is for whoever calls the part."""
    return [spec("store", 0, 8, 128, 0, stem="store_kv")]
