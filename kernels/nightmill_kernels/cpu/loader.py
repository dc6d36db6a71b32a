"""Building the C library with the system's compiler at first use, and keeping it in the user's cache."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nightmill_kernels.cpu.isa import ISA_FLAGS

SOURCE_DIR = Path(__file__).parent
SOURCES = ("parallel.c", "pointwise.c", "attention.c")
HEADERS = ("nightmill.h", "vec.h", "tile.h")
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
COMPILE_TIMEOUT_S = 120


class BuildError(RuntimeError):
    """The C library could not be built; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler: how to call it and what it calls itself."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler:
    """The compiler of $CC, else cc, gcc or clang on the path. Raises BuildError when there is none that runs."""
    asked = os.environ.get("CC", "")
    candidates = [tuple(shlex.split(asked))] if asked else [("cc",), ("gcc",), ("clang",)]
    for command in candidates:
        if command and shutil.which(command[0]):
            probe = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=60)
            if probe.returncode == 0:
                return Compiler(command, probe.stdout.partition("\n")[0])
    names = asked or "cc, gcc, clang"
    raise BuildError(f"no C compiler ({names}): install gcc or set CC")


def cache_dir() -> Path:
    """Where built libraries live: $XDG_CACHE_HOME/nightmill/kernels or ~/.cache/nightmill/kernels."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "nightmill" / "kernels"


def build_key(isa: str, compiler: Compiler) -> str:
    """Digest of all that decides what the library's bytes do: sources, flags, compiler, machine."""
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS):
        digest.update((SOURCE_DIR / name).read_bytes() + b"\0")
    for word in (*FLAGS, *ISA_FLAGS[isa], *compiler.command, compiler.version, platform.machine()):
        digest.update(word.encode() + b"\0")
    return digest.hexdigest()[:20]


def load(isa: str) -> ctypes.CDLL:
    """The library for an instruction set, built if the cache does not hold it. Raises BuildError."""
    compiler = find_compiler()
    name = f"nightmill-{isa}-{build_key(isa, compiler)}.so"
    try:
        directory = _private_dir(cache_dir())
    except OSError:
        # A read-only home is no reason to be slow: build for this process alone.
        with tempfile.TemporaryDirectory(prefix="nightmill-") as scratch:
            return _open(_build(isa, compiler, Path(scratch) / name))
    path = directory / name
    if path.exists():
        try:
            return _open(path)
        except BuildError:
            pass  # cut short by a crash or a full disk: built again below
    return _open(_build(isa, compiler, path))


def _private_dir(path: Path) -> Path:
    """Make and check a directory in which nobody else can plant a library. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or not os.access(path, os.W_OK):
        raise PermissionError(f"{path} is not ours alone")
    return path


def _build(isa: str, compiler: Compiler, path: Path) -> Path:
    """Compile into a file of our own beside `path`, then rename: a reader sees all of it or nothing."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        command = [*compiler.command, *FLAGS, *ISA_FLAGS[isa], "-shared", "-o", str(built)]
        command += [str(SOURCE_DIR / name) for name in SOURCES] + ["-lm"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(
                f"{compiler.version} took more than {COMPILE_TIMEOUT_S} s for the {isa} library"
            ) from error
        if result.returncode != 0:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise BuildError(f"{compiler.version} could not build the {isa} library: {last}")
        built.replace(path)
    return path


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} was built but does not load: {error}") from error
