"""Launches of attention that leave the least shared memory free and that no spec of the product compiles."""

from nightmill_kernels.gpu.paged_attention import AttentionShape, attention_spec
from nightmill_kernels.gpu.spec import KernelSpec

KIB = 1024
SIZE_80 = AttentionShape(model="size-80", heads=16, kv_heads=8, head_dim=80)
SIZE_96 = AttentionShape(model="size-96", heads=8, kv_heads=8, head_dim=96)
SIZE_256 = AttentionShape(model="size-256", heads=32, kv_heads=2, head_dim=256)


def specs() -> list[KernelSpec]:
    return [
        attention_spec(shape, page_size, itemsize, has_wide, kib * KIB)
        for shape, page_size, itemsize, has_wide, kib in (
            (SIZE_80, 16, 4, False, 99),
            (SIZE_80, 64, 4, True, 99),
            (SIZE_96, 16, 2, True, 99),
            (SIZE_256, 64, 2, True, 99),
            (SIZE_256, 16, 2, True, 163),
        )
    ]
