"""Instruction sets the C library is built for, and which of them this machine has."""

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

ISA_VARIABLE = "NIGHTMILL_CPU_ISA"
"""Environment variable that picks one of ISA_FLAGS' names, or `reference` for plain torch. Unset: the best there is."""

REFERENCE = "reference"

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mprefer-vector-width=512")

_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")

EMULATED = "amx_emulated"
"""`amx_bf16` with its tiles in plain C, slow: for tests on machines that have AVX512-BF16 and no AMX."""

ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "amx_bf16": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
    EMULATED: (*_AVX512_BF16, "-DNM_EMULATE_AMX"),
}
"""Compiler flags of each, best first. Named features, not -march=native: a cache may be shared by unlike machines."""

_PAIRS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "avx512_bf16", "avx512_vnni"})

_NEEDS: dict[str, frozenset[str]] = {
    "amx_bf16": _PAIRS | {"amx_tile", "amx_bf16"},
    "avx512_bf16": _PAIRS,
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}),
    "avx2": frozenset({"avx2", "fma"}),
    "portable": frozenset(),
}


@cache
def available_isas() -> tuple[str, ...]:
    """Names this machine can run, best first; `portable` always among them."""
    features = _cpu_features()
    return tuple(name for name, needs in _NEEDS.items() if needs <= features)


@cache
def isas_to_test() -> tuple[str, ...]:
    """`available_isas`, and EMULATED where it can run and the real thing cannot. Nothing chooses that by itself."""
    available = available_isas()
    return (*available, EMULATED) if "avx512_bf16" in available and "amx_bf16" not in available else available


def wanted_isa() -> str:
    """What the environment asks for, in any case of letters; empty: the best."""
    return os.environ.get(ISA_VARIABLE, "").lower()


def chosen_isa() -> str:
    """What the environment asks for, else the best. Raises ValueError for a name that is unknown or cannot run here."""
    wanted = wanted_isa()
    if not wanted:
        return available_isas()[0]
    check_isa(wanted, ISA_VARIABLE)
    return wanted


def check_isa(name: str, source: str) -> None:
    """Raise ValueError when `name`, given by `source`, is unknown or cannot run on this machine."""
    choices = (*available_isas(), REFERENCE)
    if name not in (*choices, *isas_to_test()):
        raise ValueError(f"{source} is {name!r}: this machine can run {', '.join(choices)}; unset it to get the best")


def _cpu_features() -> frozenset[str]:
    """Features the processor has and the kernel lets us use; none where that cannot be told."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            features = frozenset(line.partition(":")[2].split())
            return features if "amx_tile" not in features or _allow_tiles() else features - {"amx_tile"}
    return frozenset()


def _allow_tiles() -> bool:
    """Ask Linux for the tiles' state, which a process must before it uses them; False where it says no."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(arch_prctl, request_permission, tile_data) == 0)
