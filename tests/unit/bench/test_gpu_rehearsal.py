"""The GPU path on tensors without values: it holds, and each planted fault is found. In processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Each is a fault that no test on a CPU can see. `DeviceRunner` is what is changed; one way is enough to find it.
PLANTED = {
    "a value on the host": (
        """
keep = DeviceRunner._keep_drawn
def spoiled(self, tokens):
    keep(self, tokens * int(tokens[0].item() >= 0))
DeviceRunner._keep_drawn = spoiled
""",
        "DataDependentOutputException",
    ),
    "a copy to the host": (
        "DeviceRunner._keep_drawn = lambda self, tokens: tokens.to('cpu')",
        "HostWaitsError",
    ),
    "two devices": (
        """
DeviceRunner._keep_drawn = lambda self, tokens: tokens.add_(torch.zeros(len(tokens), dtype=torch.int32))
""",
        "Expected all tensors to be on the same device",
    ),
    "a kernel's argument on the host": (
        """
from nightmill_kernels.gpu import argmax
DeviceRunner._keep_drawn = lambda self, tokens: argmax.argmax(torch.zeros(4, 8, dtype=torch.bfloat16), tokens)
""",
        "WrongDeviceError",
    ),
    "memory of a graph freed": (
        """
decode, submit = DeviceRunner._decode, DeviceRunner.submit
def spoiled(self, tensors, size):
    if not hasattr(self, "scratch"):
        self.scratch = torch.zeros(4, device=self.device.torch_device)
    decode(self, tensors, size)
    self.scratch[:2].add_(1)
def forgetful(self, plan):
    submit(self, plan)
    self.__dict__.pop("scratch", None)
DeviceRunner._decode, DeviceRunner.submit = spoiled, forgetful
""",
        "FreedError",
    ),
    "memory of one step in a graph": (
        """
decode, submit = DeviceRunner._decode, DeviceRunner.submit
kept = []
def spoiled(self, tensors, size):
    decode(self, tensors, size)
    if kept:
        kept[-1].add_(1)
def fresh(self, plan):
    kept.append(torch.zeros(4, device=self.device.torch_device))
    submit(self, plan)
DeviceRunner._decode, DeviceRunner.submit = spoiled, fresh
""",
        "StaleError",
    ),
    "a copy that is not counted": (
        """
DeviceRunner._keep_drawn = lambda self, tokens: tokens + torch.tensor([1], device=self.device.torch_device)
""",
        "UnstagedCopyError",
    ),
    "a copy back that is not counted": (
        "DeviceRunner._keep_drawn = lambda self, tokens: torch.zeros(len(tokens), dtype=torch.int32).copy_(tokens)",
        "UnstagedCopyError",
    ),
    "two copies": (
        """
submit = DeviceRunner.submit
def twice(self, plan):
    self._inputs.staging.put(plan.token_ids)
    self._inputs.staging.flush()
    submit(self, plan)
DeviceRunner.submit = twice
""",
        "2 copies to the device",
    ),
    "too much shared memory": (
        """
from dataclasses import replace
from bench.gpu.rehearsal import verdict
from nightmill_kernels.gpu import paged_attention
checked = verdict.checked_builds(90)
verdict.checked_builds = lambda arch: checked
choose = paged_attention.choose_config
paged_attention.choose_config = lambda *a, **k: replace(choose(*a, **k), num_stages=16)
""",
        "bytes of shared memory",
    ),
}
_PRELUDE = """
import torch
from bench.gpu.rehearsal.play import WAYS
from bench.gpu.rehearsal.verdict import rehearse
from nightmill_worker.model.device_runner import DeviceRunner
"""
_ONE_WAY = """
for finding in rehearse("smollm2-135m", "bfloat16", 90, WAYS[1:2]).findings:
    print(finding)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)


def test_a_model_with_windows_passes() -> None:
    done = run("-m", "bench.gpu.rehearsal", "--model", "gemma-3-1b", "--way", "graphs, greedy rows")
    assert done.returncode == 0, done.stderr
    assert "0 findings" in done.stderr


@pytest.mark.long
def test_every_model_passes_in_every_dtype() -> None:
    done = run("-m", "bench.gpu.rehearsal", "--dtype", "bfloat16", "float16")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    code, words = PLANTED[fault]
    done = run("-c", _PRELUDE + code + _ONE_WAY)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_every_way_passes_and_meets_every_kind_of_step() -> None:
    """What does not occur is not rehearsed: chunks without a draw, shared prefixes, preemptions of both kinds."""
    code = """
result = rehearse("qwen3-0.6b", "bfloat16", 90, WAYS)
assert not result.findings, result.findings
print(*(min(p.undrawn_steps, p.shared_rows, p.preemptions or not "preempted" in n) for n, p in result.played.items()))
print(len(result.played), result.num_builds - len(result.unchecked) > 15)
"""
    done = run("-c", _PRELUDE + code)
    assert done.returncode == 0, done.stderr
    counts, rest = done.stdout.splitlines()
    assert min(map(int, counts.replace("True", "1").split())) > 0, counts
    assert rest == "6 True"
