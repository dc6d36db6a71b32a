"""Every way of running a model, tried; what would not do on a device is a finding."""

import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.rehearsal.compiler import Launches, checked_builds, compiling
from bench.gpu.rehearsal.fake_tensors import FakeTensors
from bench.gpu.rehearsal.play import WAYS, Played, Way, play
from bench.gpu.rehearsal.shapes import read_shape
from nightmill_kernels.check.build import KernelBuild
from nightmill_kernels.check.rules import check_hardware
from nightmill_worker.model.config import ModelConfig


@dataclass(slots=True)
class Rehearsed:
    """One model in one dtype."""

    model: str
    dtype: str
    played: dict[str, Played] = field(default_factory=dict)  # by way
    num_builds: int = 0
    unchecked: list[KernelBuild] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def rehearse(model: str, dtype: str, arch: int, ways: Sequence[Way] = WAYS) -> Rehearsed:
    """Every way for one model; a way that fails is a finding."""
    result = Rehearsed(model, dtype)
    with tempfile.TemporaryDirectory() as scratch:
        config = read_shape(model, Path(scratch))
    with FakeTensors() as tensors, compiling(tensors, arch) as launches:
        for way in ways:
            _try(config, way, tensors, result)
    _judge(result, launches)
    return result


def _try(config: ModelConfig, way: Way, tensors: FakeTensors, result: Rehearsed) -> None:
    try:
        played = play(config, result.dtype, way, tensors)
    except Exception as error:  # noqa: BLE001  # whatever a device's run would stop with is a finding
        result.findings.append(f"{way.name}: {type(error).__name__}: {str(error).strip()[:300]} ({_place(error)})")
        return
    result.played[way.name] = played
    if max(played.most_to_device, played.most_to_host) > 1:
        copies = f"{played.most_to_device} copies to the device, {played.most_to_host} to the host"
        result.findings.append(f"{way.name}: a step makes {copies}; one each is allowed")


def _judge(result: Rehearsed, launches: Launches) -> None:
    result.num_builds = len(launches)
    result.unchecked = launches.unchecked(checked_builds(launches.arch))
    for build in result.unchecked:
        result.findings += check_hardware(build, spills_allowed=0)


def _place(error: Exception) -> str:
    """The last line of ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/nightmill" in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "not in our code"
