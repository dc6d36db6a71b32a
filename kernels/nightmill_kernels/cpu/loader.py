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
SOURCES = ("parallel.c", "pointwise.c", "attention.c", "draw.c", "linear.c", "linear_int8.c", "keep_rows.c", "replay.c")
HEADERS = (
    "nightmill.h",
    "vec.h",
    "product.h",
    "pack.h",
    "softmax.h",
    "pair_strip.h",
    "amx.h",
    "tile_strip.h",
    "tile.h",
    "groups.h",
    "tasks.h",
    "elementary.h",
    "gate.h",
    "linear_int8_rows.h",
    "linear_work.h",
    "linear_tile.h",
)
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
_SEAL = b"nightmill sha256"


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
            probe = _run([*command, "--version"])
            if probe.returncode == 0:
                return Compiler(command, probe.stdout.partition("\n")[0])
    raise BuildError(f"no C compiler ({asked or 'cc, gcc, clang'}): install gcc or set CC")


def cache_dir() -> Path | None:
    """Where built libraries live: `kernels` in $NIGHTMILL_CACHE, $XDG_CACHE_HOME/nightmill or ~/.cache/nightmill.

    Made when missing. None where it cannot be: no home, or a directory in which others could plant a library.
    """
    try:
        ours, base = os.environ.get("NIGHTMILL_CACHE", ""), os.environ.get("XDG_CACHE_HOME", "")
        directory = Path(ours) if ours else (Path(base) if base else Path.home() / ".cache") / "nightmill"
        directory /= "kernels"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
    except (OSError, RuntimeError):
        return None
    return directory if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None


def load(isa: str) -> ctypes.CDLL:
    """The library for an instruction set, built if the cache does not hold it. Raises BuildError."""
    try:
        return _load(isa)
    except OSError as error:
        raise BuildError(f"the {isa} library could not be built: {error}") from error


def _load(isa: str) -> ctypes.CDLL:
    stem = f"nightmill-{isa}-{_digest(_source_words(isa))}"
    directory = cache_dir()
    try:
        compiler = find_compiler()
    except BuildError:
        # An image that was built with a compiler and runs without one still has what that compiler made.
        built = [path for path in sorted(directory.glob(f"{stem}-*.so")) if _is_whole(path)] if directory else []
        if not built:
            raise
        return _open(built[-1])
    name = f"{stem}-{_digest([word.encode() for word in (*compiler.command, compiler.version)])}.so"
    if directory is None or not os.access(directory, os.W_OK):
        # A read-only home is no reason to be slow: build for this process alone.
        with tempfile.TemporaryDirectory(prefix="nightmill-") as scratch:
            return _open(_build(isa, compiler, Path(scratch) / name))
    path = directory / name
    if path.exists():
        try:
            return _open(path)
        except BuildError:
            pass  # cut short by a crash or a full disk, or damaged: built again below
    return _open(_build(isa, compiler, path))


def _source_words(isa: str) -> list[bytes]:
    """All that decides what the library does, but for the compiler."""
    sources = [(SOURCE_DIR / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    return sources + [word.encode() for word in (*FLAGS, *ISA_FLAGS[isa], platform.machine())]


def _digest(words: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(words)).hexdigest()[:16]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not answer in {COMPILE_TIMEOUT_S} s") from error


def _build(isa: str, compiler: Compiler, path: Path) -> Path:
    """Compile into a file of our own beside `path`, then rename: a reader sees all of it or nothing."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        sources = [str(SOURCE_DIR / name) for name in SOURCES]
        result = _run([*compiler.command, *FLAGS, *ISA_FLAGS[isa], "-shared", "-o", str(built), *sources, "-lm"])
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or ["no message"]
            reason = next((line for line in lines if "error" in line), lines[-1])
            raise BuildError(f"{compiler.version} could not build the {isa} library: {reason}")
        _seal(built)
        built.replace(path)
    return path


def _seal(path: Path) -> None:
    """Append a checksum, which the dynamic linker does not read, and have the file on the disk."""
    with path.open("r+b") as file:
        checksum = hashlib.sha256(file.read()).digest()
        file.write(_SEAL + checksum)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    content, seal = path.read_bytes(), len(_SEAL) + hashlib.sha256().digest_size
    return content[-seal:] == _SEAL + hashlib.sha256(content[:-seal]).digest()


def _open(path: Path) -> ctypes.CDLL:
    # The linker maps a file that was cut short, and the process dies of SIGBUS where it reads what is missing.
    if not _is_whole(path):
        raise BuildError(f"{path} is damaged: remove it")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} was built but does not load: {error}") from error
