"""What attention's launches take of a device: shared memory and room for their programs, by compiled builds."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nightmill_kernels.backend import use_triton
from nightmill_kernels.check.budget import Allowance, Budget
from nightmill_kernels.gpu import device_limits, paged_attention
from nightmill_kernels.gpu.attention_config import AttentionConfig, choose_config, num_programs
from nightmill_kernels.gpu.device_limits import DEFAULT_SHARED_LIMIT, KIB, SHARED_LIMITS
from nightmill_kernels.gpu.spec import KernelSpec

PLANTED = Path(__file__).parent / "planted"
BUDGET = Budget.read(Path(__file__).parents[2] / "bench" / "kernels" / "budget.json")
VERSIONS = sorted({key[0] for key in BUDGET.allowances})
SMALL = 99 * KIB


def room_left(shared_bytes: int, config: AttentionConfig, limit: int) -> int:
    """Bytes of an SM that a persistent grid's programs leave. It has 1 KiB more than a block, and each takes 1 more."""
    return limit + KIB - config.programs_per_sm * (shared_bytes + KIB)


def launched_builds(arch: int) -> Iterator[tuple[KernelSpec, AttentionConfig, Allowance]]:
    """The builds of attention for an architecture, by every version of triton in the budget."""
    for spec in paged_attention.specs():
        if "BLOCK_N" not in spec.constants or not spec.runs_on(arch):
            continue
        config = choose_config(
            head_dim=spec.constants["HEAD_DIM"],
            itemsize={"*bf16": 2, "*fp32": 4}[spec.signature["q"]],
            has_wide=spec.constants["HAS_WIDE"],
            shared_limit=SHARED_LIMITS[arch],
        )
        assert spec.constants["BLOCK_N"] == config.block_n
        assert spec.max_registers == config.max_registers
        for version in VERSIONS:
            yield spec, config, BUDGET.allowances[version, spec.stem, spec.config, arch]


@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_what_the_product_launches_fits(arch: int) -> None:
    """By what the compilers made of each spec, which `make kernels-check` holds the budget to."""
    sizes = set()
    for spec, config, used in launched_builds(arch):
        sizes.add((spec.constants["HEAD_DIM"], spec.signature["q"], spec.constants["HAS_WIDE"]))
        assert used.shared_bytes <= SHARED_LIMITS[arch], spec.config
        # sm_100 is launched as sm_90 was measured; with 128 x 2 bytes and wide items it lacks 64 bytes for a second.
        assert room_left(used.shared_bytes, config, SHARED_LIMITS[arch]) >= -64 * (arch == 100), spec.config
        given = -(-used.registers // 8) * 8  # what a thread is given
        assert given * 32 * config.num_warps * config.programs_per_sm <= 65_536, spec.config
        assert used.spills == 0, spec.config
    assert sizes >= {(d, kind, wide) for d in (64, 128, 256) for kind in ("*bf16", "*fp32") for wide in (False, True)}


def test_the_tightest_builds_fit(tmp_path: Path) -> None:
    """Head sizes 80 and 96, groups and pages that no spec has, compiled for the devices with the least room."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PLANTED), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "nightmill_kernels.check", "--module", "tight_attention", "--arch", "80", "120"]
    files = ("--json", str(tmp_path / "rows.json"), "--budget", str(tmp_path / "none.json"))
    done = subprocess.run([*command, *files], capture_output=True, text=True, env=env, check=False)
    found = [line for line in done.stderr.splitlines() if line.startswith("✗")]
    # Triton 3.6 spills 16 bytes of head size 80 in fp32: slower by nothing, and right. What does not fit does not run.
    assert not [line for line in found if "spills" not in line], done.stderr
    built = json.loads((tmp_path / "rows.json").read_text())
    assert max(row["spills"] for row in built) <= 16
    rows = {(row["config"], row["arch"]): row["shared_bytes"] for row in built}
    assert len(rows) == 5
    assert {arch for _, arch in rows} == {"sm_80", "sm_120"}
    assert max(shared for (_, arch), shared in rows.items() if arch == "sm_120") > 0.85 * SMALL, "none of them is tight"


@pytest.mark.parametrize("limit", sorted(set(SHARED_LIMITS.values())))
@pytest.mark.parametrize("has_wide", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_head_sizes_of_one_width_are_launched_alike(itemsize: int, has_wide: bool, limit: int) -> None:
    """What is proved of 128 holds for 80 and 96: their tiles are as wide. More memory never means a smaller launch."""

    def chosen(head_dim: int, limit: int = limit) -> AttentionConfig:
        return choose_config(head_dim=head_dim, itemsize=itemsize, has_wide=has_wide, shared_limit=limit)

    assert chosen(80) == chosen(96) == chosen(128)
    for head_dim in (64, 80, 96, 128, 256):
        assert chosen(head_dim, limit + KIB - 1) == chosen(head_dim), "between two sizes the smaller one's fits"
        assert chosen(head_dim, limit - 1).programs_per_sm <= chosen(head_dim).programs_per_sm


def test_an_h100_and_the_interpreter_are_launched_as_ever() -> None:
    """These were measured on an H200: another choice there is another build, and other bits."""
    measured = {
        64: ((64, 4, 4, 4), (64, 4, 4, 3)),
        128: ((64, 4, 3, 3), (64, 4, 3, 2)),
        256: ((32, 4, 3, 3), (32, 8, 4, 1)),
    }
    for head_dim, launches in measured.items():
        for has_wide, (block_n, warps, stages, programs) in enumerate(launches):
            config = choose_config(head_dim=head_dim, itemsize=2, has_wide=bool(has_wide))
            assert config == AttentionConfig(
                block_n=block_n, num_warps=warps, num_stages=stages, programs_per_sm=programs
            )
            assert config == choose_config(
                head_dim=head_dim, itemsize=2, has_wide=bool(has_wide), shared_limit=SHARED_LIMITS[90]
            )


def test_a_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(device: torch.device) -> Any:
        asked.append(device)
        return SimpleNamespace(shared_memory_per_block_optin=SMALL)

    monkeypatch.setattr(device_limits, "_cuda", SimpleNamespace(get_device_properties=properties))
    device_limits.shared_limit.cache_clear()
    try:
        limits = [device_limits.shared_limit(torch.device("cuda", 0)) for _ in range(3)]
        assert device_limits.shared_limit(torch.device("cpu")) == DEFAULT_SHARED_LIMIT
    finally:
        device_limits.shared_limit.cache_clear()
    assert limits == [SMALL] * 3
    assert asked == [torch.device("cuda", 0)]


def test_launches_and_grids_ask_the_device(monkeypatch: pytest.MonkeyPatch, make_case: Any) -> None:
    from nightmill_worker.model.attention_plan import _programs
    from nightmill_worker.model.device import Device

    monkeypatch.setattr(device_limits, "shared_limit", lambda device: SMALL)
    launched = []

    def choose(**asked: Any) -> AttentionConfig:
        launched.append(asked["shared_limit"])
        return choose_config(**asked)

    monkeypatch.setattr(paged_attention, "choose_config", choose)
    with use_triton():
        make_case(query_lens=[1], context_lens=[3], dtype=torch.float32, head_dim=128).run()
        grid = _programs(Device(num_sms=7), torch.empty(1), 128, 2, False)
    assert launched == [SMALL]
    assert grid == num_programs(head_dim=128, itemsize=2, has_wide=False, num_sms=7, shared_limit=SMALL)
    assert grid < num_programs(head_dim=128, itemsize=2, has_wide=False, num_sms=7)
