"""The sections of the script, in order of worth, and what each is told."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nightmill_worker.simulate.cost_model import DEVICES, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A module with `run(notebook, task)`, in a process of its own."""

    name: str
    module: str
    what: str  # in a few words
    limit_s: float  # it is killed after that
    relies_on: tuple[str, ...] = ()  # its figures mean something only where these sections' checks passed


SECTIONS = (
    Section(name="probe", module="bench.gpu.sections.probe", what="what the device can do at best", limit_s=40),
    Section(name="ops", module="bench.gpu.sections.ops", what="every kernel against fp64 references", limit_s=110),
    Section(
        name="attention",
        module="bench.gpu.sections.kernels",
        what="decode attention against copy bandwidth, and the other kernels",
        limit_s=90,
        relies_on=("ops",),
    ),
    Section(name="parity", module="bench.gpu.sections.parity", what="the same answers as transformers", limit_s=170),
    Section(
        name="nano",
        module="bench.gpu.sections.nano_small",
        what="W4 on Qwen3-0.6B's shape",
        limit_s=100,
        relies_on=("parity",),
    ),
    Section(
        name="nano8b",
        module="bench.gpu.sections.nano_large",
        what="W4 on Llama-3.1-8B's shape",
        limit_s=100,
        relies_on=("parity",),
    ),
    Section(
        name="shared",
        module="bench.gpu.sections.shared",
        what="shared prefixes, swap against recompute, a steady state",
        limit_s=75,
        relies_on=("parity",),
    ),
    Section(
        name="profile",
        module="bench.gpu.sections.profile",
        what="where the time of a step goes",
        limit_s=50,
        relies_on=("parity",),
    ),
    Section(name="sweep", module="bench.gpu.sections.sweep", what="other launches of decode attention", limit_s=80),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What bounds are computed from."""

    bytes_per_s: float
    flops: float
    is_measured: bool

    @property
    def device(self) -> Device:
        """For CostModel."""
        h200 = DEVICES["h200"]
        return Device(
            name="measured" if self.is_measured else "assumed",
            flops=self.flops,
            bytes_per_s=self.bytes_per_s,
            kv_bytes=h200.kv_bytes,
            host_bytes_per_s=h200.host_bytes_per_s,
        )


ASSUMED = Ceilings(bytes_per_s=DEVICES["h200"].bytes_per_s, flops=DEVICES["h200"].flops, is_measured=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one section is told, through a file."""

    module: str
    notebook: Path
    folder: Path  # for files that stay
    seconds: float
    is_tiny: bool  # tiny shapes on the CPU: whether the script still works, no figures
    ceilings: Ceilings
    without: list[str]  # switches that are off in all runs

    @property
    def device(self) -> str:
        """Where tensors live."""
        return "cpu" if self.is_tiny else "cuda"

    def save(self, path: Path) -> None:
        """Write what `load` reads."""
        path.write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def load(cls, path: Path) -> "Task":
        """Read what `save` wrote."""
        plain = json.loads(path.read_text())
        plain["ceilings"] = Ceilings(**plain["ceilings"])
        return cls(**plain | {name: Path(plain[name]) for name in ("notebook", "folder")})


def chosen(names: Sequence[str] | None) -> tuple[Section, ...]:
    """Sections by name, in their own order; None: all.

    Raises:
        ValueError: no section has this name.
    """
    if names is None:
        return SECTIONS
    unknown = sorted(set(names) - {section.name for section in SECTIONS})
    if unknown:
        known = ", ".join(section.name for section in SECTIONS)
        raise ValueError(f"no section {', '.join(unknown)}; there are {known}")
    return tuple(section for section in SECTIONS if section.name in names)
