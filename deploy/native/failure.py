"""The one error of the native services."""

from pathlib import Path


class ServiceError(Exception):
    """A service could not be installed, started or stopped: what happened, where its log is, what to do next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{message}\n  {hint}" if hint else message)


class NotInstalledError(ServiceError):
    """A service's programs are not on this machine."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not installed", hint="run: make services")


def log_tail(path: Path, *, lines: int = 30) -> str:
    """The last lines of a log, for an error message; a missing or empty log is said to be so."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"
    tail = "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])
    return f"the end of {path}:\n{tail}" if tail else f"({path} is empty)"
