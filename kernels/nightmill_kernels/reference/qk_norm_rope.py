"""Head norms, rotation and the write into the page pool, one after the other in plain torch."""

from torch import Tensor

from nightmill_kernels.reference.rms_norm import rms_norm
from nightmill_kernels.reference.rope import rope
from nightmill_kernels.reference.store_kv import store_kv


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
    norms: tuple[Tensor, Tensor, float, float] | None,
) -> Tensor:
    """The q that attention takes. norms: weights of q and k, eps, what is added to the weights. Inputs are kept."""
    q, k = q.clone(), k.clone()
    if norms is not None:
        q_weight, k_weight, eps, weight_offset = norms
        q, k = rms_norm(q, q_weight, eps, weight_offset), rms_norm(k, k_weight, eps, weight_offset)
    if cos_sin is not None:
        rope(q, k, positions, cos_sin)
    store_kv(k, v, k_pool, v_pool, slots)
    return q
