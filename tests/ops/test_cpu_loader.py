"""Building, caching, choosing and doing without the C library."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nightmill_kernels import backend
from nightmill_kernels.cpu import isa as isa_module
from nightmill_kernels.cpu import loader, openmp
from nightmill_kernels.cpu.library import ABI
from nightmill_kernels.gated_mul import silu_mul

KERNELS = Path(loader.__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own; the library's place in it."""
    monkeypatch.delenv("NIGHTMILL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nightmill" / "kernels"


def write_tiny(directory: Path, answer: str) -> None:
    """A library with one function."""
    source = f'__attribute__((visibility("default"))) int nm_abi(void) {{ return {answer}; }}\n'
    (directory / "tiny.c").write_text(source)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One small source instead of the library: these tests are about files, not about kernels."""
    write_tiny(tmp_path, "7")
    monkeypatch.setattr(loader, "SOURCE_DIR", tmp_path)
    monkeypatch.setattr(loader, "SOURCES", ("tiny.c",))
    monkeypatch.setattr(loader, "HEADERS", ())


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process's choice of library forgotten, before and after."""
    monkeypatch.delenv(isa_module.ISA_VARIABLE, raising=False)
    backend._library.cache_clear()
    backend._default_isa.cache_clear()
    yield
    backend._library.cache_clear()
    backend._default_isa.cache_clear()


def python(code: str, **variables: str) -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(KERNELS)} | variables
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


def test_builds_once_and_leaves_nothing_else(cache, tiny):
    assert loader.load("portable").nm_abi() == 7
    (built,) = cache.iterdir()
    inode = built.stat().st_ino
    assert loader.load("portable").nm_abi() == 7
    assert [path.stat().st_ino for path in cache.iterdir()] == [inode]
    assert cache.stat().st_mode & 0o077 == 0


def test_the_products_own_cache_comes_first(cache, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("NIGHTMILL_CACHE", str(tmp_path / "own"))
    loader.load("portable")
    assert len(list((tmp_path / "own" / "kernels").iterdir())) == 1
    assert not cache.exists()


def test_another_source_or_flag_is_another_library(cache, tiny, tmp_path, monkeypatch):
    assert loader.load("portable").nm_abi() == 7
    write_tiny(tmp_path, "8")
    assert loader.load("portable").nm_abi() == 8
    monkeypatch.setattr(loader, "FLAGS", (*loader.FLAGS, "-O1"))
    assert loader.load("portable").nm_abi() == 8
    assert len(list(cache.iterdir())) == 3


def test_processes_that_build_at_once_all_get_a_whole_library(cache, tmp_path):
    code = "from nightmill_kernels.cpu import loader; print(loader.load('portable').nm_abi())"
    racers = [python(code, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    assert [finished(racer) for racer in racers] == [(f"{ABI}\n", "")] * 2
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:100],
        lambda content: content[: len(content) // 2],  # loads, and dies where what is missing is read
        lambda content: content[:-1],
        lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
    ],
    ids=["empty", "only a header", "half", "all but a byte", "a bit"],
)
def test_a_damaged_library_is_built_again(cache, tiny, monkeypatch, damage):
    loader.load("portable")
    (built,) = cache.iterdir()
    whole = built.read_bytes()
    # A new file, not the one that is mapped here: writing into that would be writing into our own code.
    built.unlink()
    built.write_bytes(damage(whole))
    with monkeypatch.context() as without:
        without.setenv("CC", "/nonexistent")
        with pytest.raises(loader.BuildError, match="no C compiler"):
            loader.load("portable")
    assert loader.load("portable").nm_abi() == 7
    assert built.read_bytes() == whole


def test_works_without_a_usable_cache(tiny, tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.delenv("NIGHTMILL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert loader.load("portable").nm_abi() == 7


def test_does_not_trust_a_folder_others_may_write_to(cache, tiny):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert loader.load("portable").nm_abi() == 7
    assert list(cache.iterdir()) == []


def test_a_library_built_earlier_needs_no_compiler(cache, tiny, monkeypatch):
    loader.load("portable")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert loader.load("portable").nm_abi() == 7
    (next(cache.iterdir())).unlink()
    with pytest.raises(loader.BuildError, match=r"no C compiler.*no-such-compiler.*install gcc or set CC"):
        loader.load("portable")


def test_a_build_that_fails_says_what_the_compiler_said(cache, tiny, tmp_path):
    write_tiny(tmp_path, "undeclared_name")
    with pytest.raises(loader.BuildError, match=r"could not build the portable library: .*undeclared_name"):
        loader.load("portable")
    assert list(cache.iterdir()) == []


def test_without_a_compiler_one_line_says_so_and_results_are_right(tmp_path):
    code = (
        "import torch\n"
        "from nightmill_kernels.backend import active_isa\n"
        "from nightmill_kernels.gated_mul import silu_mul\n"
        "x = torch.tensor([[0.0, 1.0, 2.0, 3.0]])\n"
        "y = silu_mul(x); silu_mul(x)\n"
        "print(active_isa(), torch.allclose(y, torch.tensor([[0.0, 2.193176]])))\n"
    )
    out, err = finished(python(code, CC="no-such-compiler", XDG_CACHE_HOME=str(tmp_path)))
    assert out == "reference True\n"
    (line,) = err.splitlines()
    assert "several times slower" in line
    assert "install gcc or set CC" in line


def test_fallback_is_logged_once(cache, fresh_choice, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            silu_mul(torch.randn(2, 8))
    assert len(caplog.records) == 1
    assert backend.active_isa() == "reference"


@pytest.mark.parametrize("name", [*isa_module.available_isas(), "reference"])
def test_the_environment_picks_the_instruction_set(fresh_choice, monkeypatch, name):
    monkeypatch.setenv(isa_module.ISA_VARIABLE, name)
    assert backend.active_isa() == name


def test_an_instruction_set_this_machine_lacks_is_refused(fresh_choice, monkeypatch):
    monkeypatch.setenv(isa_module.ISA_VARIABLE, "avx9")
    with pytest.raises(ValueError, match=r"NIGHTMILL_CPU_ISA is 'avx9'.*portable"):
        silu_mul(torch.randn(2, 8))
    with pytest.raises(ValueError, match="avx9"), backend.use_isa("avx9"):
        pass


@pytest.mark.parametrize(
    ("features", "best"),
    [
        ("avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni amx_tile amx_bf16", "amx_bf16"),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni", "avx512_bf16"),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16", "avx512"),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("avx2 fma avx512f", "avx2"),
        ("avx fma", "portable"),
        ("", "portable"),
    ],
)
def test_the_best_instruction_set_is_what_the_processor_has(monkeypatch, features, best):
    monkeypatch.setattr(isa_module, "_cpu_features", lambda: frozenset(features.split()))
    isa_module.available_isas.cache_clear()
    try:
        assert isa_module.available_isas()[0] == best
    finally:
        isa_module.available_isas.cache_clear()


def test_kernels_run_on_torchs_threads(c_isa):
    """One OpenMP runtime in the process, and no thread more than torch had."""
    torch.set_num_threads(3)
    torch.randn(3000, 300).square().sum()
    before = len(list(Path("/proc/self/task").iterdir()))
    silu_mul(torch.randn(300, 4096))
    assert len(list(Path("/proc/self/task").iterdir())) == before
    assert len(openmp.loaded_runtimes()) == 1
    assert openmp.team_function() is not None
