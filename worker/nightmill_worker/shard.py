"""The main path: one attempt at one shard, from its lease to its commit.

lease → rows without a durable answer → requests → engine → completions → checkpoints → part → commit
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

import pyarrow as pa

from nightmill.errors import RowErrorCode, StoreError
from nightmill.failpoint import failpoint
from nightmill.output.checkpoint import CheckpointReader, CheckpointWriter
from nightmill.output.folder import OutputFolder
from nightmill.output.part import PartInfo, publish_part
from nightmill.reader import read_shard
from nightmill.records import Completion, JobInfo, ShardLease, ShardProgress, ShardResult, TokenCounts
from nightmill.rows import InputRow, parse_rows
from nightmill.states import Tier
from nightmill.storage import Storage, is_source_lost
from nightmill.store import LEASE_TTL_S, Store
from nightmill_worker.drain import Drain
from nightmill_worker.feed.completions import completion_of, error_completion
from nightmill_worker.feed.requests import RequestMaker, RowRequest
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.inflight import InflightMark, windows
from nightmill_worker.shard_answers import ShardAnswers
from nightmill_worker.shard_output import FirstPart, RetriedPart, shard_output
from nightmill_worker.solitude import Solitude
from nightmill_worker.supervisor import EngineSupervisor, Mailbox, Outcome, Quarantined

log = logging.getLogger(__name__)

FEED_ROWS = 64  # tokenised at once
CHECKPOINT_ROWS = 256
CHECKPOINT_S = 5.0  # a finished row is durable after this long at the latest
TURN_S = 0.2  # how late a stop is noticed


def never(_: BaseException) -> bool:
    """Whatever a run alone fails with, its user sees it, and calls again."""
    return False


def keep(_: ShardLease) -> None:
    """Whoever started the run alone puts the input back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What all shards of a job share in this process."""

    job: JobInfo
    store: Store
    storage: Storage  # of the output
    folder: OutputFolder
    source_schema: pa.Schema
    model_name: str
    tokenizer: Tokenizer
    maker: RequestMaker
    sources: Storage | None = None  # of the input, as planned; None: as it stands now
    lease_ttl_s: float = LEASE_TTL_S
    retries_commit: bool = False  # a store that fails may be back before the lease is gone: a server, not a full disk
    charges: Callable[[BaseException], bool] = never  # whether an attempt that raised this uses up the shard's budget
    gives_up_source: Callable[[ShardLease], None] = keep  # after an attempt whose input is gone or was overwritten


class ShardEnd(StrEnum):
    """How an attempt ended."""

    COMMITTED = "committed"
    """The part stands and the store knows."""
    RELEASED = "released"
    """Stopped early; what is finished is durable, the lease was given back."""
    LOST = "lost"
    """Another attempt holds the shard; nothing more was written."""


class ShardRun:
    """One attempt. `run` is called once, on a thread of its own; the rest may be read from other threads."""

    def __init__(
        self,
        lease: ShardLease,
        context: JobContext,
        supervisor: EngineSupervisor,
        drain: Drain,
        solitude: Solitude,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_read` is called on the shard's thread when its last row has been offered."""
        self.lease = lease
        self.progress = ShardProgress(attempt=lease.attempt)
        self.is_reading = True  # more rows will be offered
        self.start_s: float | None = None  # until the first row was there for the engine
        self.rows_resumed = 0
        self.rows_recomputed = 0
        self._context = context
        self._supervisor = supervisor
        self._drain = drain
        self._solitude = solitude
        self._on_read = on_read
        self._lost = False
        self._job_stopped = False
        self._pending: dict[int, RowRequest] = {}  # by request id: offered, not back yet
        self._counts: Counter[str] = Counter()
        index = lease.range.index
        self._checkpoints = context.folder.checkpoints(lease.generation)
        self._answers = ShardAnswers(
            CheckpointWriter(context.storage, self._checkpoints, index, lease.attempt, max_rows=2 * CHECKPOINT_ROWS)
        )
        self._mark = InflightMark(context.storage, self._checkpoints, index)
        self._began_at = self._flushed_at = time.monotonic()
        self._name = f"shard {lease.range.index} of {lease.job_id}"

    @property
    def tier(self) -> Tier:
        """Of its job."""
        return self._context.job.options.tier

    def lose(self) -> None:
        """The lease is gone: stop and write nothing."""
        self._lost = True

    def stop_job(self) -> None:
        """The job is cancelled, failing or over: stop, keep what is finished."""
        self._job_stopped = True

    def run(self) -> ShardEnd:
        """Answer every row, write the part, commit; or stop early.

        Raises:
            NightmillError: Reading or writing failed, the engine is gone, or the lease was lost at the commit. The
                lease has been given back, and what was durable stays.
        """
        if not self._solitude.enter():
            self.is_reading = False
            self._release()
            return ShardEnd.RELEASED
        try:
            return self._attempt()
        finally:
            self._solitude.leave()  # with the lease given back: what kills us from now on is not charged to it

    def _attempt(self) -> ShardEnd:
        try:
            end = self._run()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self.is_reading = False
        if end is ShardEnd.RELEASED:
            self._release()
        return end

    def _fail(self, error: BaseException) -> None:
        if not is_source_lost(error, self.lease.range.source_file):
            self._release(failed=self._context.charges(error))
            return
        try:
            self._flush()  # nobody can compute them again
        finally:
            self._release(failed=self._context.charges(error))
            self._context.gives_up_source(self.lease)

    def _run(self) -> ShardEnd:
        context, shard = self._context, self.lease.range
        output = shard_output(context, self.lease)
        part, checkpoints = self._look(output)
        if part is not None:  # an earlier attempt died between its part and its commit
            self.rows_resumed = part.rows.total
            self.progress = replace(self.progress, rows_completed=part.rows.completed, rows_failed=part.rows.failed)
        else:
            if not self._answer(self._resume(output.kept(), checkpoints)):
                return ShardEnd.LOST if self._lost else ShardEnd.RELEASED
            part = output.write(self._answers.all(checkpoints))
        result = part.result(rows_resumed=self.rows_resumed, rows_recomputed=self.rows_recomputed)
        self._commit(result)
        failpoint("after_commit")
        publish_part(context.storage, context.folder, shard.index, self.lease.attempt)
        return ShardEnd.COMMITTED

    def _look(self, output: FirstPart | RetriedPart) -> tuple[PartInfo | None, CheckpointReader]:
        """What earlier attempts have left: both looks at once, each may be a wait for a network."""
        context, index = self._context, self.lease.range.index
        with ThreadPoolExecutor(1, thread_name_prefix="shard-look") as pool:
            standing = pool.submit(output.standing)
            checkpoints = CheckpointReader(context.storage, self._checkpoints, index)
            return standing.result(), checkpoints

    def _commit(self, result: ShardResult) -> None:
        """Tell the store, as often as it takes: the part stands, and computing it again would cost a shard."""
        while True:
            try:
                return self._context.store.commit_shard(self.lease, result)
            except StoreError as error:
                if not self._context.retries_commit or self._lost or self._drain.at_once:
                    raise
                log.warning("the commit will be tried again: %s", error)
                time.sleep(random.uniform(0.5, 1.5))

    def _resume(self, kept: Sequence[Completion], checkpoints: CheckpointReader) -> set[int]:
        """Count what is durable; return its row indices."""
        durable = {**checkpoints.read(), **{completion.row_index: completion for completion in kept}}
        for completion in durable.values():
            self._count(completion)
        self.rows_resumed = len(durable)
        self._mark.read(checkpoints.names)
        return set(durable)

    def _answer(self, durable: set[int]) -> bool:
        """Give every missing row its completion; False when stopped before that."""
        missing = set(range(self.lease.range.row_start, self.lease.range.row_end)) - durable
        suspects = self._mark.suspects(missing, self.lease.num_failures)
        parked = self._mark.parked(missing, suspects)
        if suspects:
            log.warning("earlier attempts died with %d rows of %s: they run last", len(suspects), self._name)
        with self._supervisor.open(self._context.job.options.tier) as mailbox:
            finished = self._answer_rows(mailbox, missing.difference(suspects, parked), last=not suspects)
            if finished and self._mark.is_convicted(suspects):
                self._convict(suspects[0])
                suspects = ()
            groups = [group for group in (suspects, parked) if group]
            if finished and groups:
                finished = self._search(mailbox, groups)
            self.rows_recomputed += mailbox.reruns
        if finished:
            self._flush(last=True)
        elif not self._lost:
            self._flush()
            self._mark.end_in_order()
        return finished

    def _search(self, mailbox: Mailbox, groups: Sequence[Sequence[int]]) -> bool:
        """Run those who may end the process, with no other shard in it; False when stopped before their end."""
        self._flush()
        with self._solitude.alone(lambda: not self._must_stop(mailbox, finished=False)) as is_alone:
            return is_alone and all(self._answer_suspects(mailbox, group, last=group is groups[-1]) for group in groups)

    def _answer_suspects(self, mailbox: Mailbox, suspects: Sequence[int], *, last: bool) -> bool:
        for window in windows(suspects):
            # What is durable must be known to the store before this: an attempt without progress counts as a failure.
            self._flush()
            self._context.store.heartbeat(
                self.lease.worker_id, {self.lease.shard_id: self.progress}, self._context.lease_ttl_s
            )
            if self._mark.narrows(window):
                self._context.store.excuse(self.lease)  # a search that gets on may take as long as it takes
            self._mark.begin_window(window)
            if not self._answer_rows(mailbox, set(window), last=last and window[-1] == suspects[-1]):
                return False
        self._mark.end_windows()
        return True

    def _answer_rows(self, mailbox: Mailbox, wanted: Collection[int], *, last: bool) -> bool:
        """Run these rows to their end; False when stopped before that."""
        # The last attempt died: few rows at once then, and known before they start.
        careful = mailbox.max_careful if self.lease.num_failures else None
        batches = self._requests(wanted, min(FEED_ROWS, careful or FEED_ROWS)) if wanted else iter(())
        exhausted = False
        while True:
            has_room = mailbox.has_room if careful is None else len(self._pending) < careful
            if not exhausted and has_room and not self._drain.requested:
                batch = next(batches, None)
                exhausted = batch is None
                if self.start_s is None:
                    self.start_s = time.monotonic() - self._began_at
                self._offer(mailbox, batch or [])
            if self.is_reading and exhausted and last:
                self.is_reading = False
                self._on_read()
            may_offer = careful is None and not exhausted and not self._drain.requested
            outcomes = mailbox.collect(TURN_S, or_room=may_offer)
            # First: a flush on the way writes the mark, and who has started by now belongs into it.
            self._mark_started(mailbox)
            for outcome in outcomes:
                self._take(outcome)
            self._tell(mailbox)
            finished = exhausted and not self._pending
            if self._must_stop(mailbox, finished=finished):
                self._take_last(mailbox)
                return False
            if finished:
                return True
            is_due = time.monotonic() - self._flushed_at > CHECKPOINT_S or mailbox.must_flush
            if self._answers.pending and is_due:
                self._flush()
                mailbox.note_unflushed(0)

    def _take_last(self, mailbox: Mailbox) -> None:
        """What ended after the last look must not be left behind as if it had not run."""
        if not self._lost and not self._drain.at_once:
            for outcome in mailbox.collect(0.0, or_room=False):
                self._take(outcome)
            self._tell(mailbox)

    def _convict(self, row_index: int) -> None:
        """A row that took the whole process along, twice, alone."""
        for batch in self._requests({row_index}):
            for made in batch:
                message = "running this row alone ended the whole worker process, more than once"
                if isinstance(made, RowRequest):
                    made = error_completion(made, RowErrorCode.QUARANTINED, message, attempt=self.lease.attempt)
                self._keep(made)
        self._flush()
        self._mark.end_windows()

    def _requests(
        self, wanted: Collection[int], piece_rows: int = FEED_ROWS
    ) -> Iterator[list[RowRequest | Completion]]:
        spec = self._context.job.spec
        for batch in read_shard(self.lease.range, spec, storage=self._context.sources):
            rows = (row for row in parse_rows(batch, spec) if row.row_index in wanted)
            while piece := list(islice(rows, piece_rows)):
                made = iter(self._context.maker.make([row for row in piece if isinstance(row, InputRow)]))
                yield [next(made) if isinstance(row, InputRow) else row for row in piece]

    def _offer(self, mailbox: Mailbox, batch: Sequence[RowRequest | Completion]) -> None:
        requests = []
        for made in batch:
            if isinstance(made, Completion):
                self._keep(made)
                continue
            self._pending[made.request.request_id] = made
            self.rows_recomputed += self._mark.covers(made.row.row_index)
            requests.append(made.request)
        if requests:
            if self.lease.num_failures:  # the last attempt died: now it must be known before, not soon after
                self._mark.start(made.row.row_index for made in batch if isinstance(made, RowRequest))
                self._mark.write()
            mailbox.offer(requests)

    def _take(self, outcome: Outcome) -> None:
        made = self._pending.pop(outcome.request_id)
        attempt = self.lease.attempt
        if isinstance(outcome, Quarantined):
            self._keep(error_completion(made, outcome.code, outcome.message, attempt=attempt))
        else:
            self._keep(completion_of(made, outcome, self._context.tokenizer, attempt=attempt))

    def _keep(self, completion: Completion) -> None:
        self._count(completion)
        self._answers.add(completion)
        if self._answers.pending >= CHECKPOINT_ROWS:
            self._flush()

    def _count(self, completion: Completion) -> None:
        if completion.error_code is not None:
            self._counts["failed"] += 1
            return
        self._counts["completed"] += 1
        self._counts["prompt"] += completion.prompt_tokens or 0
        self._counts["completion"] += completion.completion_tokens or 0
        self._counts["cached"] += completion.cached_tokens or 0

    def _flush(self, *, last: bool = False) -> None:
        if not last:  # then nobody is inside
            self._mark.write()  # first: a crash in between must not hide who was inside
        self._mark.settle(self._answers.flush())
        self._flushed_at = time.monotonic()

    def _must_stop(self, mailbox: Mailbox, *, finished: bool) -> bool:
        if self._lost or self._job_stopped:
            return True
        if finished:  # only the part is left to write: sooner done than done again
            return False
        return self._drain.requested and (mailbox.in_engine == 0 or self._drain.at_once)

    def _mark_started(self, mailbox: Mailbox) -> None:
        started = mailbox.take_started()
        if started:
            self._mark.start(self._pending[i].row.row_index for i in started if i in self._pending)

    def _tell(self, mailbox: Mailbox) -> None:
        mailbox.note_unflushed(self._answers.pending)
        counts = self._counts
        self.progress = ShardProgress(
            attempt=self.lease.attempt,
            rows_completed=counts["completed"],
            rows_failed=counts["failed"],
            rows_running=mailbox.running,
            rows_durable=counts["completed"] + counts["failed"] - self._answers.pending,
            tokens=TokenCounts(prompt=counts["prompt"], completion=counts["completion"], cached=counts["cached"]),
        )

    def _release(self, *, failed: bool = False) -> None:
        if not self._lost:
            self._context.store.release(self.lease, failed=failed, progressed=self._answers.has_written)
