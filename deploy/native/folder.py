"""Folders that a service's own user can reach and write."""

import os
import shutil
import tempfile
from pathlib import Path

from deploy.native.failure import ServiceError
from deploy.native.process import owner


def prepare(folder: Path, user: str | None) -> Path:
    """Make `folder` and give it, with all it holds, to `user` (when we are root); returns it absolute.

    Raises:
        ServiceError: a folder above it keeps `user` out.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    ids = owner(user)
    if ids is not None:
        shut = closed_parent(folder)
        if shut is not None:
            raise ServiceError(
                f"user {user} cannot enter {shut}, which holds {folder}",
                hint="choose a folder that all users can reach",
            )
        for path in (folder, *folder.rglob("*")):
            os.chown(path, *ids, follow_symlinks=False)
    return folder


def closed_parent(folder: Path) -> Path | None:
    """The first folder above `folder` that other users cannot enter."""
    return next(
        (path for path in reversed(folder.absolute().parents) if path.exists() and not path.stat().st_mode & 1), None
    )


def scratch(prefix: str) -> Path:
    """A new folder under the system's temporary folder that every user can enter."""
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-"))
    folder.chmod(0o755)
    return folder


def remove(folder: Path) -> None:
    """Remove a service's folder with all it holds."""
    shutil.rmtree(folder, ignore_errors=True)
