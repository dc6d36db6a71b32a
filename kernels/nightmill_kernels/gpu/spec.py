"""How a kernel is launched in the product: what a check without a GPU compiles, and what it expects to see."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedOn:
    """The GPUs, by compute capability."""

    min_arch: int = 80
    archs: Collection[int] | None = None  # these alone, whose shared memory a launch was chosen for; None: all

    def runs_on(self, arch: int) -> bool:
        """Whether it is launched there."""
        return arch >= self.min_arch and (self.archs is None or arch in self.archs)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec(LaunchedOn):
    """One kernel with one set of compile-time constants. Each module of kernels lists its own in `specs()`."""

    stem: str  # the operation
    config: str  # the constants in a few words, unique for the stem on an architecture
    kernel: Any  # the @triton.jit function
    signature: Mapping[str, str]  # every argument that is not a constant: "*bf16", "i32", "fp32", …
    constants: Mapping[str, Any]
    divisible: frozenset[str]  # pointers and strides that are divisible by 16 at run time
    num_warps: int
    num_stages: int
    wants_tensor_cores: bool = False  # a build without mma or wgmma is refused
    max_registers: int | None = None  # of a thread: the launch's maxnreg
    enable_fp_fusion: bool = True  # False: no a · b + c is rounded once; the launch says the same
