"""NIGHTMILL_CPU_ISA holds for the whole engine process: torch's own libraries are limited with our kernels."""

import os
import subprocess
import sys

import pytest

from nightmill_kernels.cpu.isa import chosen_isa
from nightmill_worker.model.instruction_set import limit_instruction_set

NAMES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
# As the engine process does it: the recipe comes before torch, and fails later, for want of a model.
_CODE = """
import sys
from pathlib import Path
from nightmill.errors import NightmillError
from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.model_recipe import ModelRecipe
assert "torch" not in sys.modules
try:
    ModelRecipe(directory=Path("nowhere"), spec=ModelSpec(model="nowhere"), options=EngineOptions()).build()
except NightmillError:
    pass
import torch
print(torch.backends.cpu.get_cpu_capability())
"""


def limited(monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict[str, str]:
    monkeypatch.delenv("NIGHTMILL_CPU_ISA", raising=False)
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is unset again after the test
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    limit_instruction_set()
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_the_engine_process_holds_torch_to_avx2() -> None:
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", _CODE]
    environment = clean | {"NIGHTMILL_CPU_ISA": "avx2"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() in ("AVX2", "DEFAULT", "NO AVX")  # anything but AVX512


def test_every_library_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limited(monkeypatch, NIGHTMILL_CPU_ISA="avx2") == dict(zip(NAMES, ("AVX2", "avx2", "AVX2"), strict=True))
    assert limited(monkeypatch, NIGHTMILL_CPU_ISA="avx512") == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}


@pytest.mark.parametrize("environment", [{}, {"NIGHTMILL_CPU_ISA": "portable"}, {"NIGHTMILL_CPU_ISA": "reference"}])
def test_nothing_is_limited_unless_asked(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    assert limited(monkeypatch, **environment) == {}


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found = limited(monkeypatch, NIGHTMILL_CPU_ISA="avx2", ONEDNN_MAX_CPU_ISA="AVX2_VNNI")
    assert found["ONEDNN_MAX_CPU_ISA"] == "AVX2_VNNI"


def test_the_name_may_be_in_capitals_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limited(monkeypatch, NIGHTMILL_CPU_ISA="AVX2") == limited(monkeypatch, NIGHTMILL_CPU_ISA="avx2")
    monkeypatch.setenv("NIGHTMILL_CPU_ISA", "Portable")
    assert chosen_isa() == "portable"
