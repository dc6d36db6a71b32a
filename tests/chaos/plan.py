"""Which parts break when: drawn from a seed, so that a run can be had again."""

import random
from dataclasses import dataclass
from enum import StrEnum


class Target(StrEnum):
    """A part of the system; the keys of `kills` in the result."""

    WORKER = "worker"
    BROKER = "broker"
    POSTGRES = "postgres"
    STORE = "store"
    JANITOR = "janitor"
    ENGINE = "engine"


class Fault(StrEnum):
    """What is done to it."""

    KILL = "kill"
    """SIGKILL, and started again. PostgreSQL: SIGQUIT, as its own crash."""
    STOP = "stop"
    """The graceful signal, and started again."""
    WIPE = "wipe"
    """Killed, and started without anything that it had kept."""
    REFUSE = "refuse"
    """Half of all requests are answered 503 for a while."""
    SLOW = "slow"
    """Every answer comes late for a while."""


KINDS: dict[Target, tuple[Fault, ...]] = {
    Target.WORKER: (Fault.KILL, Fault.STOP, Fault.KILL),
    Target.BROKER: (Fault.KILL, Fault.WIPE, Fault.STOP),
    Target.POSTGRES: (Fault.KILL, Fault.STOP),
    Target.STORE: (Fault.REFUSE, Fault.KILL, Fault.SLOW),
    Target.JANITOR: (Fault.KILL,),
    Target.ENGINE: (Fault.KILL,),
}
# In 90 seconds; for other durations in proportion, and each part at least once.
_TIMES = {
    Target.WORKER: 6,
    Target.BROKER: 3,
    Target.POSTGRES: 3,
    Target.STORE: 5,
    Target.JANITOR: 2,
    Target.ENGINE: 5,
}


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """One fault, `at_s` seconds after the job was submitted."""

    at_s: float
    target: Target
    fault: Fault


def draw_events(seed: int, duration_s: float) -> list[Event]:
    """Faults in the order of their times, spread over the duration: each part's at random within equal spans."""
    random_ = random.Random(seed)
    events = []
    for target, kinds in KINDS.items():
        count = max(1, round(_TIMES[target] * duration_s / 90))
        order = list(kinds)
        random_.shuffle(order)
        for i in range(count):
            at_s = duration_s * (i + random_.uniform(0.1, 0.9)) / count
            events.append(Event(at_s, target, order[i % len(order)]))
    return sorted(events)
