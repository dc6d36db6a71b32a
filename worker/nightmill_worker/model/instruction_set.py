"""Holding torch's own libraries to the instruction set that NIGHTMILL_CPU_ISA asks of our kernels. Imports no torch.

Half of a step runs in our C library, the other half in oneDNN, MKL and ATen, each of which looks at the processor for
itself. Without this, `NIGHTMILL_CPU_ISA=avx2` on a new machine says nothing about a machine that has only AVX2.
"""

import os

from nightmill_kernels.cpu.isa import wanted_isa

# oneDNN, ATen, MKL: each reads its own variable when it is loaded or first used. `portable` and `reference` are about
# our C code, not about the machine (another architecture, no compiler), so torch keeps what it has.
_LIMITS: dict[str, dict[str, str]] = {
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}


def limit_instruction_set() -> None:
    """Limit torch's libraries as our kernels are limited, where the environment does not. Call before importing torch.

    What is set already stays. Unset NIGHTMILL_CPU_ISA: nothing is limited.
    """
    for name, value in _LIMITS.get(wanted_isa(), {}).items():
        os.environ.setdefault(name, value)
