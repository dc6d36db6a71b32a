"""RabbitMQ 4.0 on a machine of Debian 12: the next Debian's packages in a folder, run by chroot."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from deploy.native.failure import NotInstalledError, ServiceError, log_tail
from deploy.native.folder import remove
from deploy.native.packages import DEBOOTSTRAP, install

TREE = Path("/var/tmp/nightmill-trixie")  # 370 MB; kept: making it takes a minute or more
_SUITE = "trixie"


def tree(say: Callable[[str], None]) -> Path:
    """The folder with RabbitMQ 4.0 and all it needs, made when it is not there. Give it to `Rabbitmq` as `chroot`.

    Raises:
        NotInstalledError: we are not root, who alone may make and enter it.
        ServiceError: the packages could not be had.
    """
    if os.geteuid() != 0:
        raise NotInstalledError("RabbitMQ 4 (run by chroot, as root)")
    if not TREE.exists():
        install(DEBOOTSTRAP, say)
        _make(say)
    return TREE


def folder(name: str) -> Path:
    """A place in the tree for a broker's own folder."""
    return TREE / "srv" / name


def _make(say: Callable[[str], None]) -> None:
    say("making a tree of Debian 13 with RabbitMQ 4.0 (once; a minute or more)")
    began = time.monotonic()
    draft, log = TREE.with_suffix(".draft"), TREE.with_suffix(".log")
    remove(draft)
    debootstrap = shutil.which("debootstrap", path="/usr/sbin:/usr/bin:/sbin:/bin") or "debootstrap"
    with log.open("wb") as file:
        command = [debootstrap, "--variant=minbase", "--include=rabbitmq-server", _SUITE, str(draft)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise ServiceError(f"debootstrap failed; {log_tail(log)}")
    draft.rename(TREE)
    say(f"made in {time.monotonic() - began:.0f} s")
