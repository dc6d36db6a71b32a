"""What the figures were measured on."""

import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from nightmill_worker.bench.machine import this_machine

NO_DEVICE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Device, driver, versions, commit, command."""

    device: str  # NO_DEVICE where there is no GPU
    driver: str
    cpu: str
    num_cpus: int
    python: str
    versions: dict[str, str]
    commit: str
    command: str

    @property
    def has_device(self) -> bool:
        """There is a GPU that torch can use."""
        return self.device != NO_DEVICE


def gather_facts(commit: str | None, command: str) -> Facts:
    """Look at this machine. `commit`: where there is no git checkout to ask."""
    machine = this_machine()
    return Facts(
        device=_device(),
        driver=_driver(),
        cpu=machine.cpu,
        num_cpus=machine.num_cpus,
        python=machine.python,
        versions={name: _version(name) for name in ("torch", "triton", "transformers", "numpy")},
        commit=commit or machine.commit or "unknown",
        command=command,
    )


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return NO_DEVICE
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB, "
        f"sm_{properties.major}{properties.minor}"
    )


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
