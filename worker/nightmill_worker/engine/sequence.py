"""A request's running form."""

from dataclasses import dataclass, field
from enum import Enum

from nightmill_worker.engine.prefix_index import Node
from nightmill_worker.engine.request import Request, TokenLogprobs
from nightmill_worker.engine.stop import StopStrings


class SequenceState(Enum):
    """Where a sequence stands. There is no prefill or decode state: `num_computed` catches up with `num_tokens`."""

    WAITING = "waiting"
    """In its tier's queue, never run or preempted; holds no page."""
    PARKED = "parked"
    """Waits for a prefix that a running sequence is computing; holds no page."""
    RUNNING = "running"
    """Has a row of the running table."""
    FINISHED = "finished"
    """Has its Finished; queues drop it when they meet it."""


@dataclass(slots=True, eq=False)
class Sequence:
    """What must outlive a row of the running table: all that a preempted sequence needs to go on as if untouched.

    Progress itself (`num_computed`, tokens, page table) lives in the running table while `row` is set. Off the table
    nothing is computed, so the tokens are enough.
    """

    request: Request
    arrival: int  # order of arrival in this loop
    state: SequenceState = SequenceState.WAITING
    row: int = -1  # in the running table; -1 while it does not run
    generated: tuple[int, ...] = ()  # drawn so far, as of the last preemption
    nodes: list[Node] = field(default_factory=list)  # prefix chain of its full pages, as far as interned
    num_wanted: int = 0  # leading nodes that count this sequence among those that wait for them
    num_cached: int | None = None  # prompt tokens from the prefix index at first admission
    num_preemptions: int = 0
    max_computed: int = 0  # most tokens ever computed before a preemption: what is computed again is waste
    passed_since: int | None = None  # the engine's computed tokens when others were first let pass it
    expected_tokens: int = 0  # of its answer, predicted when it came
    entry: int = 0  # of the ledger
    stop: StopStrings | None = None
    logprobs: list[TokenLogprobs] | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, while it is off the table."""
        return len(self.request.prompt) + len(self.generated)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens [start, end), while it is off the table."""
        length = len(self.request.prompt)
        if end <= length:
            return self.request.prompt[start:end]
        return self.request.prompt[start:length] + self.generated[max(0, start - length) : end - length]
