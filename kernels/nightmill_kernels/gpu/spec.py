"""How a kernel is launched in the product: what a check without a GPU compiles, and what it expects to see."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One kernel with one set of compile-time constants. Each module of kernels lists its own in `specs()`."""

    stem: str  # the operation
    config: str  # the constants in a few words, unique for the stem
    kernel: Any  # the @triton.jit function
    signature: Mapping[str, str]  # every argument that is not a constant: "*bf16", "i32", "fp32", …
    constants: Mapping[str, Any]
    divisible: frozenset[str]  # pointers and strides that are divisible by 16 at run time
    num_warps: int
    num_stages: int
    wants_tensor_cores: bool = False  # a build without mma or wgmma is refused
    min_arch: int = 80
    max_registers: int | None = None  # of a thread: the launch's maxnreg
    enable_fp_fusion: bool = True  # False: no a · b + c is rounded once; the launch says the same
