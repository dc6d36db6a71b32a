"""What q, k and v go through between their projection and attention: head norms, rotation, the page pool."""

from dataclasses import dataclass

from torch import Tensor

from nightmill_kernels.backend import on_triton
from nightmill_kernels.layout import heads_dense
from nightmill_kernels.rms_norm import rms_norm
from nightmill_kernels.rope import check_rope, rope_store_kv
from nightmill_kernels.store_kv import check_store, store_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """RMS norms over each head of q and of k."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    eps: float
    weight_offset: float = 0.0  # Gemma keeps weight - 1


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    *,
    cos_sin: Tensor | None,
    norms: HeadNorms | None,
) -> Tensor:
    """`rms_norm` of each head, `rope` (unless cos_sin is None) and `store_kv`; one launch on a GPU.

    Args:
        q: [T, H, D], a view of a fused projection or not; may be overwritten.
        k: [T, Hk, D] likewise; what is in it afterwards is not defined.
        v: [T, Hk, D].
        positions: int32 or int64 [T], each below the length of `cos_sin`.
        k_pool: [N, Hk, page_size, D].
        v_pool: as k_pool.
        slots: int64 [T]; a negative one is padding, whose k and v go nowhere.
        cos_sin: fp32 [max_len, rot], see `rope`; None: no rotation.
        norms: None: q and k as they are.

    Returns:
        The q for attention, which may be the one given.

    Raises:
        ValueError: shapes or layouts do not fit; on a CPU also slots and positions outside of their tables.
    """
    if on_triton(q):
        _check(q, k, v, positions, k_pool, v_pool, slots, cos_sin, norms)
        from nightmill_kernels.gpu import qk_norm_rope as gpu

        gpu.qk_norm_rope(q, k, v, positions, k_pool, v_pool, slots, cos_sin=cos_sin, norms=norms)
        return q
    if norms is not None:
        q = rms_norm(q, norms.q, norms.eps, weight_offset=norms.weight_offset, out=q)
        k = rms_norm(k, norms.k, norms.eps, weight_offset=norms.weight_offset, out=k)
    if cos_sin is None:
        store_kv(k, v, k_pool, v_pool, slots)
    else:
        rope_store_kv(q, k, v, positions, cos_sin, k_pool, v_pool, slots)
    return q


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    cos_sin: Tensor | None,
    norms: HeadNorms | None,
) -> None:
    check_store(k, v, k_pool, v_pool, slots)
    if cos_sin is not None:
        check_rope(q, k, positions, cos_sin)
    elif q.shape[0] != k.shape[0] or not heads_dense(q):
        raise ValueError(f"q {tuple(q.shape)} must have the tokens of k {tuple(k.shape)} and contiguous heads")
    if norms is not None and not norms.q.shape == norms.k.shape == q.shape[2:]:
        raise ValueError(
            f"norms {tuple(norms.q.shape)} and {tuple(norms.k.shape)} must be of the head size {q.shape[2]}"
        )
