"""What `--dtype auto` means on this machine."""

from pathlib import Path

import torch

from nightmill.errors import ModelError
from nightmill_worker.model.config import DTYPE_BYTES, ModelConfig

_CPUINFO = Path("/proc/cpuinfo")
# avx512_bf16 and amx_bf16 on x86, bf16 on Arm: dot products of bf16 pairs summed in float32.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_FIRST_WITH_BF16 = (8, 0)


def resolve_dtype(
    requested: str, config: ModelConfig, device: str = "cpu", *, capability: tuple[int, int] | None = None
) -> str:
    """The dtype of weights, activations and KV pages: `float32`, `bfloat16` or `float16`.

    `auto` is bfloat16 where the processor multiplies it natively, whatever the file holds. Elsewhere it is float32 on
    a CPU (emulated bfloat16 is slower than float32, so it would only lose digits) and float16 on a GPU, whose compute
    `capability` is below 8.0 then.

    Raises:
        ModelError: an unknown name, float16 on a CPU, or bfloat16 on a GPU that does not have it.
    """
    has_bf16 = cpu_has_bf16() if device == "cpu" else capability is None or capability >= _FIRST_WITH_BF16
    if requested == "auto":
        return "bfloat16" if has_bf16 else "float32" if device == "cpu" else "float16"
    if requested not in DTYPE_BYTES:
        raise ModelError(f"dtype {requested!r} is unknown", hint=f"Known: auto, {', '.join(DTYPE_BYTES)}.")
    if requested == "float16" and device == "cpu":
        raise ModelError(
            f"{config.architecture}: float16 is not supported on a CPU", hint="Use --dtype bfloat16 or float32."
        )
    if requested == "bfloat16" and device != "cpu" and not has_bf16:
        raise ModelError(
            f"{config.architecture}: this GPU has no bfloat16 (compute capability {capability})",
            hint="Use --dtype float16; numbers beyond 65,504 overflow in it, which shows as rows that fail.",
        )
    return requested


def torch_dtype(name: str) -> torch.dtype:
    """torch's object of a name that resolve_dtype returned."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def cpu_has_bf16() -> bool:
    """True when the processor has bfloat16 dot products."""
    try:
        text = _CPUINFO.read_text()
    except OSError:  # no /proc: macOS and others
        return False
    flags = (line.partition(":")[2] for line in text.splitlines() if line.lower().startswith(("flags", "features")))
    return not _BF16_FLAGS.isdisjoint(next(flags, "").split())
