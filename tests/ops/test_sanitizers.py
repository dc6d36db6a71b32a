"""The C library under AddressSanitizer and UndefinedBehaviorSanitizer, driven by a C program of its own."""

import subprocess
from pathlib import Path

import pytest

from nightmill_kernels.cpu import loader
from nightmill_kernels.cpu.isa import ISA_FLAGS, isas_to_test

DRIVER = Path(__file__).with_name("sanitize_driver.c")
ROUNDS = 100
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O1")


@pytest.mark.parametrize("isa", sorted({isas_to_test()[0], isas_to_test()[-1], "portable"}))
def test_no_access_outside_and_no_undefined_behaviour(isa: str, tmp_path: Path) -> None:
    program = tmp_path / "driver"
    flags = [flag for flag in loader.FLAGS if flag != "-O2"]
    sources = [DRIVER, *(loader.SOURCE_DIR / name for name in loader.SOURCES)]
    command = [*loader.find_compiler().command, *flags, *SANITIZE, *ISA_FLAGS[isa], f"-I{loader.SOURCE_DIR}"]
    subprocess.run([*command, "-o", program, *sources, "-lm", "-lpthread"], check=True, timeout=300)
    result = subprocess.run([program, str(ROUNDS)], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
