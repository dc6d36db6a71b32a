"""Finding the OpenMP runtime that torch has loaded: kernels run on its threads and start none of their own."""

import ctypes
import re
from functools import cache
from pathlib import Path

_RUNTIME = re.compile(r"/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*$")


@cache
def team_function() -> int | None:
    """Address of GOMP_parallel in torch's runtime (LLVM's and Intel's have it too); None: kernels run on one thread."""
    for path in loaded_runtimes():
        try:
            # The path is mapped already: this is a handle on that copy, not a second one.
            library = ctypes.CDLL(path)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def loaded_runtimes() -> tuple[str, ...]:
    """Paths of the OpenMP runtimes mapped into this process, torch's own first."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    paths = {path for path in (line.partition("/")[2] for line in lines) if _RUNTIME.search("/" + path)}
    return tuple(sorted(("/" + path for path in paths), key=lambda path: ("/torch/" not in path, path)))
