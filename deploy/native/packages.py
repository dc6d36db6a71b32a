"""Debian packages of the services. Installing starts none: each runs only on ports and in folders of ours."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deploy.native.failure import ServiceError

POLICY = Path("/usr/sbin/policy-rc.d")
BASE = ("postgresql-15", "rabbitmq-server")
CEPH = ("ceph-mon", "ceph-mgr", "ceph-osd", "radosgw")
DEBOOTSTRAP = ("debootstrap",)


def missing(packages: Sequence[str]) -> list[str]:
    """Those of `packages` that dpkg does not have fully installed."""
    if shutil.which("dpkg-query") is None:
        return list(packages)
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    present = {line.split()[0] for line in answer.stdout.splitlines() if line.endswith(" installed")}
    return [package for package in packages if package not in present]


def install(packages: Sequence[str], say: Callable[[str], None]) -> None:
    """Install what is missing of `packages`; a second call does nothing.

    Raises:
        ServiceError: not a Debian system, not root, or apt failed (with the end of what it said).
    """
    absent = missing(packages)
    if not absent:
        return
    _require_apt(absent)
    began = time.monotonic()
    say(f"installing {' '.join(absent)} (Debian packages; a minute or two)")
    with _starts_forbidden():
        _apt("update", "-qq")
        _apt("install", "-y", "-qq", "--no-install-recommends", *absent)
    say(f"installed in {time.monotonic() - began:.0f} s")


def _require_apt(absent: Sequence[str]) -> None:
    names = " ".join(absent)
    if shutil.which("apt-get") is None:
        raise ServiceError(
            f"these are not installed: {names}", hint="on systems other than Debian install them yourself"
        )
    if os.geteuid() != 0:
        raise ServiceError(
            f"these Debian packages are not installed: {names}", hint=f"run: sudo apt-get install {names}"
        )


@contextlib.contextmanager
def _starts_forbidden() -> Iterator[None]:
    """Debian starts what it installs unless policy-rc.d forbids it; an existing policy is left alone."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)


def _apt(*arguments: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3", *arguments]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ServiceError(f"{' '.join(command)} failed:\n{tail}", hint="see what apt says above; then run it again")


def main(arguments: Sequence[str]) -> int:
    """`python -m deploy.native.packages [base] [ceph] [debootstrap]`; without a word: base and ceph."""
    sets = {"base": BASE, "ceph": CEPH, "debootstrap": DEBOOTSTRAP}
    try:
        for name in arguments or ("base", "ceph"):
            if name not in sets:
                raise ServiceError(f"{name!r} is none of {', '.join(sets)}")
            install(sets[name], lambda line: _say(line))
    except ServiceError as error:
        _say(str(error))
        return 1
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"services: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
