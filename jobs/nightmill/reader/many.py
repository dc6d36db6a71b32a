"""The same look at many files: side by side where each is a wait for a network."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nightmill.storage.location import is_s3

Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Gets how many files are done, and of how many."""

MAX_READERS = 32
"""At once. Each holds a footer and what its reader reads ahead."""


def map_files(look: Callable[[str], Result], uris: Sequence[str], *, progress: Progress | None = None) -> list[Result]:
    """`look` at each file; results in the order of `uris`. The first error, in that order, ends it."""
    readers = min(MAX_READERS, sum(map(is_s3, uris)))
    if readers < 2:
        return _collect(map(look, uris), len(uris), progress)
    pool = ThreadPoolExecutor(readers, thread_name_prefix="nightmill-files")
    try:
        return _collect(pool.map(look, uris), len(uris), progress)
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(results: Iterable[Result], total: int, progress: Progress | None) -> list[Result]:
    found: list[Result] = []
    for result in results:
        found.append(result)
        if progress is not None:
            progress(len(found), total)
    return found
