"""Named crash points: `NIGHTMILL_FAILPOINT=after_part_put:2` kills the process at the second time it gets there.

They make each crash window reproducible on its own. Unset (always, outside tests) a point costs one comparison.
"""

import itertools
import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Literal, NoReturn, get_args

from nightmill.errors import ConfigError

FailpointName = Literal[
    "after_job_file",  # job.json is written, the store knows nothing
    "after_claim",  # a shard is leased, nothing is read
    "after_checkpoint_put",  # a checkpoint is durable, no heartbeat has told
    "after_part_put",  # the part stands, the store knows nothing
    "before_commit",  # inside the commit's transaction
    "after_commit",  # committed, nobody has been told
    "in_finalize",  # manifest is written, _SUCCESS is not
    "after_publish",  # the broker has confirmed a batch of the outbox, which is not deleted yet
]
FAILPOINTS: frozenset[str] = frozenset(get_args(FailpointName))
VARIABLE = "NIGHTMILL_FAILPOINT"

_SPEC = os.environ.get(VARIABLE, "")


def failpoint(name: FailpointName) -> None:
    """Die here by SIGKILL if the environment says so: no handler, no `finally`, no flush.

    Raises:
        ConfigError: the variable is set and names an unknown point or a bad count.
    """
    if _SPEC:
        _armed(_SPEC)(name)


def parse_failpoints(spec: str) -> dict[str, int]:
    """Parse `name[:n][,name[:n]…]` into {name: n}; n counts from 1.

    Raises:
        ConfigError: unknown name, or n is not a positive number.
    """
    hits: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, _, count = item.partition(":")
        if name not in FAILPOINTS:
            raise ConfigError(f"{VARIABLE}: unknown point {name!r}; known: {', '.join(sorted(FAILPOINTS))}")
        if count and not (count.isascii() and count.isdigit() and int(count) > 0):
            raise ConfigError(f"{VARIABLE}: {item!r} must be name or name:n with n from 1")
        hits[name] = int(count or 1)
    return hits


@cache
def _armed(spec: str) -> Callable[[str], None]:
    hits = parse_failpoints(spec)
    counters = {name: itertools.count(1) for name in hits}  # next() is atomic: threads hit points at once

    def hit(name: str) -> None:
        if name in hits and next(counters[name]) == hits[name]:
            _die()

    return hit


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
