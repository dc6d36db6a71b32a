"""What a compiler made of one kernel for one architecture."""

from dataclasses import asdict, dataclass
from typing import Any

from nightmill_kernels.gpu.spec import LaunchedOn


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecKey(LaunchedOn):
    """A KernelSpec as a process knows it that has no triton."""

    module: str
    index: int  # in the module's specs()
    stem: str
    config: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.stem} [{self.config}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """One row of the table. Counts are of instructions in the PTX."""

    stem: str
    config: str
    triton: str  # its version
    arch: int  # 90 for sm_90
    registers: int = 0  # of a thread
    spills: int = 0  # bytes of a thread's stack: spilled registers, or arrays that found no registers
    shared_bytes: int = 0  # of a block
    mma: int = 0
    wgmma: int = 0
    tcgen05: int = 0  # sm_100's matrix products
    cp_async: int = 0
    loads_128: int = 0  # loads of 128 bits from global memory
    seconds: float = 0.0
    wants_tensor_cores: bool = False
    error: str | None = None  # why there is no build

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.stem} [{self.config}] for sm_{self.arch} by triton {self.triton}"

    def as_row(self) -> dict[str, Any]:
        """The object of `--json`."""
        row = asdict(self)
        row["arch"] = f"sm_{self.arch}"
        return row
