"""Which device `--device auto` means, and what an engine's limits are there. Imports no torch: the feeder asks too."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from nightmill.records import EngineOptions

CPU, CUDA = "cpu", "cuda"
DEVICES = ("auto", CPU, CUDA)
_SEQS = {CPU: 64, CUDA: 256}
# Of a step. CPU: 50–100 ms for a small model. CUDA: the weights are read for enough tokens to be worth it.
_BATCHED_TOKENS = {CPU: 512, CUDA: 8192}
_DEVICE_NODES = Path("/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What EngineOptions leave open, decided."""

    device: str
    max_num_seqs: int
    max_num_batched_tokens: int


def resolve_limits(options: EngineOptions, device: str | None = None) -> StepLimits:
    """Device and limits of a step.

    Args:
        options: What was asked for.
        device: What `auto` is, of somebody who has torch at hand; None: a guess by what is installed.
    """
    if options.device != "auto":
        device = options.device
    device = device or expected_device()
    max_num_seqs = options.max_num_seqs or _SEQS.get(device, _SEQS[CPU])
    batched_tokens = max(_BATCHED_TOKENS.get(device, _BATCHED_TOKENS[CPU]), max_num_seqs)
    return StepLimits(
        device=device,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or batched_tokens,
    )


def expected_device() -> str:
    """`cuda` when there is an NVIDIA GPU that this process may see and a torch that can use it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return CPU
    has_gpu = any(_DEVICE_NODES.glob("nvidia[0-9]*")) or (_DEVICE_NODES / "dxg").exists()  # dxg: WSL
    return CUDA if has_gpu and _torch_has_cuda() else CPU


def _torch_has_cuda() -> bool:
    spec = find_spec("torch")
    folders = [] if spec is None else (spec.submodule_search_locations or [])
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders)
