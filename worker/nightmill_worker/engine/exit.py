"""The way out of the engine: whatever a sequence holds is given back here, and its Finished is made."""

from nightmill_worker.engine.admission import AdmissionGate
from nightmill_worker.engine.idle_jobs import IdleJobs
from nightmill_worker.engine.ledger import Ledger
from nightmill_worker.engine.request import Finished, FinishReason
from nightmill_worker.engine.residency import Residency
from nightmill_worker.engine.running_table import RunningTable
from nightmill_worker.engine.sequence import Sequence, SequenceState
from nightmill_worker.engine.stats import Counters
from nightmill_worker.engine.swap import Swap
from nightmill_worker.engine.waiting_queue import WaitingQueue


class Exit:
    """Ends sequences, from every state, and keeps their Finished until they are taken.

    Args:
        pads: The static policy: who has an answer keeps the row, padded, until all others of the group have theirs.
    """

    def __init__(
        self,
        table: RunningTable,
        queue: WaitingQueue,
        residency: Residency,
        swap: Swap | None,
        gate: AdmissionGate,
        counters: Counters,
        ledger: Ledger,
        *,
        pads: bool,
    ) -> None:
        self._table = table
        self._queue = queue
        self._residency = residency
        self._swap = swap
        self._gate = gate
        self._counters = counters
        self._ledger = ledger
        self._pads = pads
        self._jobs = IdleJobs()
        self._finished: list[Finished] = []

    @property
    def has_finished(self) -> bool:
        """`take` would return something."""
        return bool(self._finished)

    def take(self) -> list[Finished]:
        """What has ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def expect(self, sequence: Sequence) -> None:
        """A sequence has come in."""
        self._jobs.begin(sequence.request.job_id)

    def refuse(self, sequence: Sequence, why: str) -> None:
        """A sequence can never run, and does not come in."""
        self._finished.append(_finished(sequence, FinishReason.ERROR, error=why))
        self._counters.errors += 1
        self._ledger.refuse(sequence.entry)
        self._jobs.begin(sequence.request.job_id)
        self._forget(self._jobs.end(sequence.request.job_id))

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        expected_work: int,
        stop_match: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """End a sequence that has come in and has not ended.

        Args:
            sequence: In any state.
            reason: Why.
            expected_work: Tokens that the ledger was told to expect of it when it came.
            stop_match: See Finished.
            error: See Finished.
        """
        was_admitted = sequence.num_cached is not None
        if sequence.state is SequenceState.RUNNING:
            row = sequence.row
            sequence.generated = self._table.generated(row)
            if self._pads and reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._table.pad(row)
            else:
                self._vacate(sequence, discard=reason is FinishReason.ERROR)
        else:
            self._queue.discard(sequence)
            self._residency.let_go(sequence)
            if self._swap is not None:
                self._swap.drop(sequence)
        sequence.state = SequenceState.FINISHED
        self._gate.on_end(sequence, reason)
        if was_admitted:
            self._queue.settle(sequence, sequence.expected_tokens)
        self._finished.append(_finished(sequence, reason, stop_match=stop_match, error=error))
        self._count(reason)
        self._ledger.end(sequence.entry, reason, 0 if was_admitted else expected_work, sequence.num_preemptions)
        self._forget(self._jobs.end(sequence.request.job_id))
        if self._pads:
            self._end_group()

    def _vacate(self, sequence: Sequence, *, discard: bool = False) -> None:
        row = sequence.row
        self._residency.release(sequence, discard=discard)
        self._residency.let_go(sequence)
        self._table.unbind(row)

    def _end_group(self) -> None:
        """When no row of the group is left to compute, all of them leave."""
        rows = self._table.rows()
        if self._table.is_padding[rows].all():
            for row in rows.tolist():
                self._vacate(self._table.sequence(row))

    def _forget(self, job_ids: list[str]) -> None:
        for job_id in job_ids:
            self._queue.forget_job(job_id)
            self._gate.forget_job(job_id)
        self._ledger.forget(job_ids)

    def _count(self, reason: FinishReason) -> None:
        if reason is FinishReason.ERROR:
            self._counters.errors += 1
        elif reason is FinishReason.ABORT:
            self._counters.aborted += 1
        else:
            self._counters.finished += 1


def _finished(
    sequence: Sequence, reason: FinishReason, *, stop_match: str | int | None = None, error: str | None = None
) -> Finished:
    return Finished(
        request_id=sequence.request.request_id,
        token_ids=sequence.generated,
        finish_reason=reason,
        stop_match=stop_match,
        num_prompt_tokens=len(sequence.request.prompt),
        num_cached_tokens=sequence.num_cached or 0,
        num_preemptions=sequence.num_preemptions,
        logprobs=None if sequence.logprobs is None else tuple(sequence.logprobs),
        error=error,
    )
