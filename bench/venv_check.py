"""`make venv-check`: the engine and the kernels in the Python that a GPU machine has, and nothing of a fleet's.

Makes a virtual environment with Python 3.12, torch 2.11 and triton 3.6 and without queue, database or object store,
then imports everything a GPU run needs there, runs a tiny model, rehearses three models' steps with every launch
compiled, and runs the kernels in Triton's interpreter.
PyPI has torch 2.11 for Linux on x86-64 with CUDA only: about 3 GB to fetch, once; no GPU is needed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("NIGHTMILL_CACHE") or Path.home() / ".cache" / "nightmill")
VENV = CACHE / "venv-3.12"  # far from the checkout, which is copied around
PACKAGES = (
    *("torch==2.11.*", "triton==3.6.0", "transformers==5.17.*", "numpy==2.5.*"),
    *("pytest", "hypothesis", "pyarrow", "rich", "psutil", "jinja2", "prometheus-client", "tokenizers", "safetensors"),
)
# With numpy 2.4 and later triton 3.6's interpreter fails: int() of an array with one element. A device does not care.
INTERPRETER_NUMPY = "numpy==2.3.*"
FLEET_TEST = "tests/unit/engine/test_ledger.py"  # reads the metrics of a worker, with its store
# These call kernels in the interpreter, too.
INTERPRETED = ("tests/unit/model/test_device_sampler.py", "tests/unit/model/test_graphs.py")
TESTS = (
    *("tests/unit/test_import_compatibility.py", "tests/ops/test_kernels_check.py"),
    *("tests/unit/engine", "tests/unit/model"),
)
REHEARSED = ("qwen3-0.6b", "llama-3.1-8b", "gemma-3-1b")
VERSIONS = """
import sys, numpy, torch, transformers, triton
print("python", sys.version.split()[0])
print(*(f"{module.__name__} {module.__version__}" for module in (torch, triton, transformers, numpy)))
"""


def main() -> int:
    """Exit status of the tests; 2: there is no Python 3.12."""
    base = find_python()
    if base is None:
        print("venv-check needs Python 3.12: python3.12 on the PATH, or one of pyenv's (pyenv install 3.12)")
        return 2
    python = VENV / "bin" / "python"
    stamp = VENV / ".packages"
    if not stamp.exists() or stamp.read_text() != "\n".join(PACKAGES):
        print(f"making {VENV} with {base} (about 3 GB to fetch)", flush=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(base), "-m", "venv", "--clear", str(VENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        stamp.write_text("\n".join(PACKAGES))
    if len(sys.argv) > 1:
        return _run(python, sys.argv[1:])
    status = _run(python, [*TESTS, *(f"--ignore={name}" for name in INTERPRETED)])
    status = _rehearse(python) or status
    return _run(python, _interpreter_tests(), before=(_interpreter_numpy(python),)) or status


def _rehearse(python: Path) -> int:
    command = [str(python), "-m", "bench.gpu.rehearsal", "--model", *REHEARSED]
    return subprocess.run(command, check=False, cwd=ROOT, env=_environment()).returncode


def _environment(before: Sequence[Path] = ()) -> dict[str, str]:
    paths = [*before, *(ROOT / name for name in ("jobs", "worker", "kernels", "."))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def _run(python: Path, tests: Sequence[str], before: Sequence[Path] = ()) -> int:
    env = _environment(before) | {"TRITON_INTERPRET": "1"}
    subprocess.run([str(python), "-c", VERSIONS], check=True, env=env)
    command = [str(python), "-m", "pytest", "-q", "-m", "not long", f"--ignore={FLEET_TEST}", *tests]
    return subprocess.run(command, check=False, cwd=ROOT, env=env).returncode


def _interpreter_numpy(python: Path) -> Path:
    target = CACHE / "numpy-2.3-cp312"
    if not target.exists():
        command = [str(python), "-m", "pip", "install", "--quiet", "--target", str(target), INTERPRETER_NUMPY]
        subprocess.run(command, check=True)
    return target


def _interpreter_tests() -> list[str]:
    paths = sorted((ROOT / "tests" / "ops").glob("test_gpu_*.py"))
    return [*INTERPRETED, *(str(path.relative_to(ROOT)) for path in paths)]


def find_python() -> Path | None:
    """A python3.12 that runs, on the PATH or of pyenv."""
    candidates = [Path(found)] if (found := shutil.which("python3.12")) else []
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += sorted(pyenv.glob("versions/3.12*/bin/python3.12"), reverse=True)
    for python in candidates:
        # pyenv's shim is there for versions that are not switched on, and fails.
        probe = subprocess.run(
            [str(python), "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 12))"],
            capture_output=True,
            check=False,
        )
        if probe.returncode == 0:
            return python
    return None


if __name__ == "__main__":
    sys.exit(main())
