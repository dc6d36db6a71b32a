from pathlib import Path
from types import SimpleNamespace

import pytest

from nightmill.records import EngineOptions
from nightmill_worker.model import device_choice
from nightmill_worker.model.device_choice import CPU, CUDA, StepLimits, expected_device, resolve_limits


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU and a torch for it."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "torch/lib/libtorch_cuda.so").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(device_choice, "_DEVICE_NODES", tmp_path / "dev")
    monkeypatch.setattr(device_choice, "find_spec", lambda name: spec)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_gpu_is_used_where_there_is_one_that_torch_can_use(machine: Path) -> None:
    assert expected_device() == CUDA
    (machine / "torch/lib/libtorch_cuda.so").unlink()
    assert expected_device() == CPU


def test_the_control_node_alone_is_no_gpu(machine: Path) -> None:
    (machine / "dev/nvidia0").rename(machine / "dev/nvidiactl")
    assert expected_device() == CPU


@pytest.mark.parametrize(("visible", "expected"), [("", CPU), ("-1", CPU), ("0", CUDA), ("1,2", CUDA)])
def test_a_hidden_gpu_is_none(visible: str, expected: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert expected_device() == expected


def test_limits_follow_the_device_where_they_are_left_open(machine: Path) -> None:
    assert resolve_limits(EngineOptions()) == StepLimits(device=CUDA, max_num_seqs=256, max_num_batched_tokens=8192)
    cpu = StepLimits(device=CPU, max_num_seqs=64, max_num_batched_tokens=512)
    assert resolve_limits(EngineOptions(device="cpu")) == cpu
    assert resolve_limits(EngineOptions(), "cpu") == cpu
    assert resolve_limits(EngineOptions(device="cpu"), "cuda") == cpu, "what was asked for counts"
    own = resolve_limits(EngineOptions(max_num_seqs=3, max_num_batched_tokens=7))
    assert (own.max_num_seqs, own.max_num_batched_tokens) == (3, 7)


def test_a_step_holds_a_token_of_every_row(machine: Path) -> None:
    assert resolve_limits(EngineOptions(device="cpu", max_num_seqs=600)).max_num_batched_tokens == 600
