"""`nightmill doctor`: what this machine has, what is missing, what to do about it. Imports nothing heavy."""

import contextlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import click

from nightmill import __version__
from nightmill.cli.show import json_option, show_json
from nightmill.config import Settings
from nightmill.errors import ExitCode, NightmillError
from nightmill.store import Store

GIB = 1 << 30
MIN_MEMORY_BYTES = 2 * GIB  # the demo model, its pool, two Python processes
MIN_DISK_BYTES = 2 * GIB
_PACKAGES = ("pyarrow", "sqlalchemy", "tokenizers", "transformers", "torch", "triton")
_OPTIONAL = {"triton": "only GPUs need it"}


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Nothing to do."""
    WARN = "warn"
    """Works, but slower or with less than it could."""
    FAIL = "fail"
    """`nightmill run` will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    level: Level
    detail: str
    todo: str | None = None


# What /proc/cpuinfo calls the instruction sets of NIGHTMILL_CPU_ISA.
_ISA_FLAGS = {"amx_bf16": "amx_bf16", "avx512_bf16": "avx512_bf16", "avx512": "avx512f", "avx2": "avx2"}


@click.command(epilog="Example: nightmill doctor --json | jq '.[] | select(.level != \"ok\")'")
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine: each line says ok, warn or fail, and what to do. Exit code 1 when something fails."""
    findings = list(examine())
    if as_json:
        show_json([asdict(finding) for finding in findings])
    else:
        _show(findings)
    return ExitCode.FAILED if any(f.level is Level.FAIL for f in findings) else ExitCode.DONE


def examine() -> Iterator[Finding]:
    """Every check; one that breaks is a finding, not an end."""
    yield Finding("nightmill", Level.OK, __version__)
    yield _python()
    try:
        settings = Settings.from_env()
    except NightmillError as error:
        yield Finding("settings", Level.FAIL, error.message, error.hint or "correct or unset it")
        return
    for check in (_cpu, _memory, _compiler, _kernels, _packages, _gpu, _disk, _store, _model_cache):
        yield from _guarded(check, settings)


def _guarded(check: Callable[[Settings], Iterator[Finding]], settings: Settings) -> Iterator[Finding]:
    try:
        yield from check(settings)
    except OSError as error:
        yield Finding(check.__name__.strip("_"), Level.WARN, f"could not be checked: {error}")


def _python() -> Finding:
    level = Level.OK if sys.version_info >= (3, 11) else Level.FAIL
    return Finding("python", level, f"{platform.python_version()} ({sys.executable})", "use Python 3.11 or newer")


def _cpu(settings: Settings) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = _cpu_flags()
    isa = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
    todo = None if isa else "without AVX2 the kernels run their portable form, which is slow"
    level = Level.OK if isa or not flags else Level.WARN
    yield Finding("cpu", level, f"{cores} cores, {platform.machine()} {' '.join(isa)}".rstrip(), todo)
    needed = _ISA_FLAGS.get(settings.cpu_isa or "")
    if needed and flags and needed not in flags:
        what = f"NIGHTMILL_CPU_ISA={settings.cpu_isa}, which this processor does not have: no run will start"
        yield Finding("instruction set", Level.FAIL, what, "unset NIGHTMILL_CPU_ISA to get the best there is")
    elif settings.cpu_isa:
        what = f"NIGHTMILL_CPU_ISA={settings.cpu_isa}: kernels are held to it"
        yield Finding("instruction set", Level.OK, what)


def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def _memory(settings: Settings) -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit()
    usable = min(total, limit) if limit else total
    what = f"{usable / GIB:.1f} GiB" + (" (limited by the container)" if usable < total else "")
    level = Level.OK if usable >= MIN_MEMORY_BYTES else Level.WARN
    yield Finding("memory", level, what, None if level is Level.OK else "use a smaller model or --max-num-seqs")


def _cgroup_limit() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(name).read_text())
    return None


def _compiler(settings: Settings) -> Iterator[Finding]:
    compiler = os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler and shutil.which(compiler.split()[0]):
        yield Finding("compiler", Level.OK, str(shutil.which(compiler.split()[0])))
    else:
        todo = "apt-get install gcc (or set CC): the CPU kernels are compiled on first use"
        yield Finding(
            "compiler", Level.WARN, "no C compiler: the engine falls back to plain torch, which is slow", todo
        )


def _kernels(settings: Settings) -> Iterator[Finding]:
    spec = find_spec("nightmill_kernels")
    if spec is None:
        yield Finding("kernels", Level.WARN, "not installed", "pip install 'nightmill[worker]'")
        return
    folder = settings.cache / "kernels"
    if folder.exists() and (folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022):
        what = f"{folder} is not used, since others may write there: every run compiles the kernels again"
        yield Finding(
            "kernels", Level.WARN, what, f"chmod go-w {folder}, or set NIGHTMILL_CACHE to a folder of your own"
        )
        return
    built = list(folder.glob("nightmill-*.so"))
    yield Finding("kernels", Level.OK, f"{len(built)} built in {folder}" if built else "built at the first run")


def _packages(settings: Settings) -> Iterator[Finding]:
    for name in _PACKAGES:
        try:
            yield Finding(name, Level.OK, version(name))
        except PackageNotFoundError:
            if name in _OPTIONAL:
                yield Finding(name, Level.OK, f"not installed: {_OPTIONAL[name]}")
            else:
                yield Finding(name, Level.FAIL, "not installed", "pip install 'nightmill[worker]'")


def _gpu(settings: Settings) -> Iterator[Finding]:
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    yield Finding("gpu", Level.OK, ", ".join(d.name for d in devices) or "none: the engine runs on the CPU")


def _disk(settings: Settings) -> Iterator[Finding]:
    for name, path in (
        ("store disk", settings.home),
        ("cache disk", settings.cache),
        ("temporary disk", Path(tempfile.gettempdir())),
    ):
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        level = Level.OK if free >= MIN_DISK_BYTES else Level.WARN
        todo = None if level is Level.OK else f"make room on the disk of {existing}"
        yield Finding(name, level, f"{free / GIB:.1f} GiB free at {path}", todo)


def _store(settings: Settings) -> Iterator[Finding]:
    try:
        store = Store(settings.database_url)
        try:
            store.migrate()
            num_jobs = len(store.jobs(limit=1000))
        finally:
            store.close()
    except NightmillError as error:
        yield Finding("store", Level.FAIL, error.message, error.hint)
        return
    yield Finding("store", Level.OK, f"{num_jobs} jobs in {_without_password(settings.database_url)}")


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _model_cache(settings: Settings) -> Iterator[Finding]:
    if not settings.cache.is_dir():
        yield Finding("model cache", Level.OK, f"empty: {settings.cache}")
        return
    size = sum(path.stat().st_size for path in settings.cache.rglob("*") if path.is_file())
    yield Finding("model cache", Level.OK, f"{size / GIB:.2f} GiB in {settings.cache} (safe to delete)")


def _show(findings: list[Finding]) -> None:
    colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
    width = max(len(f.name) for f in findings)
    for finding in findings:
        level = click.style(finding.level.value.ljust(4), fg=colours[finding.level])
        click.echo(f"{level}  {finding.name.ljust(width)}  {finding.detail}")
        if finding.todo and finding.level is not Level.OK:
            click.echo(f"      {' ' * width}  → {finding.todo}")
