"""Shards of many jobs and tiers in one engine: who is taken, when, and what the broker is told.

    bell (any thread) ─▶ answer ─▶ slot of its tier ─▶ claim ─▶ crew ─▶ engine
    main thread       ─▶ turn ─▶ look into the store where slots are free or the engine would go hungry ─┘

A bell is only a hint: rows are truth. Whatever is dropped here, the look into the store, the janitor or another worker
finds again.
"""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum

from nightmill.errors import EngineError, ModelError, NightmillError, NotFoundError, StorageError, ValidationError
from nightmill.failpoint import failpoint
from nightmill.records import JobInfo, ModelSpec
from nightmill.states import Tier
from nightmill.store import Store
from nightmill_worker.appetite import Appetite
from nightmill_worker.drain import Drain
from nightmill_worker.error_budget import ErrorBudget
from nightmill_worker.fleet_jobs import JobBook, JobPauses
from nightmill_worker.model_host import ModelHost, Serving
from nightmill_worker.shard import ShardEnd
from nightmill_worker.shard_crew import MAX_SHARDS, EndedShard
from nightmill_worker.slots import Slot, TierSlots

log = logging.getLogger(__name__)

LOOK_S = 3.0  # between looks into the store that found no more; jittered, so that workers do not look in step
MAX_REFUSALS = 3  # tries to load a model, of all workers together, before a job that nobody has begun fails for it
CHOICES = 8  # shards of a job to choose from: workers that look at once should not all want the same one


class BellEnd(StrEnum):
    """What becomes of a message."""

    ENDED = "ended"
    """Its shard has ended: acknowledge."""
    SLICE = "slice"
    """The time slice ended; the shard goes on under its lease: acknowledge."""
    DROPPED = "dropped"
    """Nothing to do here: acknowledge."""
    WAITED = "waited"
    """No slot within the time slice: ring again, then acknowledge."""
    STOPPED = "stopped"
    """The worker stops: give it back."""


class Fleet:
    """What one worker holds. `answer` and `handles` may be called from any thread, the rest from the main one."""

    def __init__(
        self,
        store: Store,
        host: ModelHost,
        slots: TierSlots,
        drain: Drain,
        pauses: JobPauses,
        *,
        worker_id: str,
        lease_ttl_s: float,
        slice_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._store = store
        self._host = host
        self._slots = slots
        self._drain = drain
        self._pauses = pauses
        self._worker_id = worker_id
        self._lease_ttl_s = lease_ttl_s
        self._slice_s = slice_s
        self._on_end = on_end
        self._book = JobBook(store)
        self._budget = ErrorBudget(store, self._book)
        self._claiming = threading.Lock()
        self._bells: set[int] = set()  # shards whose bell is being answered
        self._bells_lock = threading.Lock()
        self._look_at = 0.0
        self._more_is_there = False  # the last look left shards where they are: it had enough
        self._appetite = Appetite()
        self.ends: Counter[str] = Counter()  # attempts, by how they ended
        self.bell_ends: Counter[tuple[Tier, BellEnd]] = Counter()
        self.turned_at = time.monotonic()

    # -- bells ------------------------------------------------------------------------------------------------------

    def handles(self, shard_id: int) -> bool:
        """Whether a bell for this shard says nothing new: it is at work here, or its bell is being answered."""
        serving = self._host.serving
        held = serving is not None and any(run.lease.shard_id == shard_id for run in serving.crew.active)
        return held or shard_id in self._bells

    def answer(self, shard_id: int, tier: Tier) -> BellEnd:
        """Do what a bell asks for; returns when the message is to be acknowledged, after a time slice at the latest."""
        with self._bells_lock:
            known = self.handles(shard_id)
            if not known:
                self._bells.add(shard_id)
        if known:
            end = BellEnd.DROPPED
        else:
            try:
                end = self._answer(shard_id, tier)
            except (StorageError, NotFoundError) as error:
                log.warning("the bell of shard %d is dropped, it will be found in the store: %s", shard_id, error)
                end = BellEnd.DROPPED
            finally:
                self._bells.discard(shard_id)
        self.bell_ends[tier, end] += 1
        return end

    def _answer(self, shard_id: int, tier: Tier) -> BellEnd:
        deadline = time.monotonic() + self._slice_s
        job_id = self._store.job_of_shard(shard_id)
        if job_id is None or self._pauses.is_paused(job_id):
            return BellEnd.DROPPED
        job = self._book.job(job_id)
        if not self._host.accepts(job.spec.model):
            return BellEnd.DROPPED
        if self._host.serving is None:
            self._host.want(job.spec.model)
        serving = self._host.wait(job.spec.model, deadline)
        if serving is None:
            return BellEnd.STOPPED if self._drain.requested else BellEnd.DROPPED
        slot = self._slots.wait(tier, deadline)
        if slot is None:
            return BellEnd.STOPPED if self._drain.requested else BellEnd.WAITED
        if not self._claim_first(serving, job, [shard_id], slot):
            return BellEnd.STOPPED if self._drain.requested else BellEnd.DROPPED
        while not slot.wait_released(min(1.0, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or self._drain.requested:
                return BellEnd.SLICE
        return BellEnd.ENDED

    def _claim_first(self, serving: Serving, job: JobInfo, shard_ids: Sequence[int], slot: Slot) -> bool:
        """Take the first of these shards that is to be had into the slot; False when none is, and the slot is free."""
        taken = False
        try:
            taken = any(self._claim(serving, job, shard_id, slot) for shard_id in shard_ids)
        except ValidationError as error:
            self._store.fail_job(job.job_id, error.code, error.message)
        except (StorageError, ModelError) as error:
            self._leave_alone(job.job_id, error)
        finally:
            if not taken:
                slot.release()
        return taken

    def _claim(self, serving: Serving, job: JobInfo, shard_id: int, slot: Slot) -> bool:
        context = serving.contexts.get(job)
        with self._claiming:
            if self._drain.requested or self._host.serving is not serving or serving.crew.solitude.is_wanted:
                return False
            lease = self._store.claim(shard_id, self._worker_id, self._lease_ttl_s)
            if lease is None:
                return False
            failpoint("after_claim")
            serving.crew.start(lease, context, slot.release)
            return True

    # -- the main thread --------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Judge what has ended, load a model if one is wanted, take more where there is room.

        Raises:
            EngineError: The engine is gone for good.
            NightmillError: The only model that this worker may serve cannot be loaded.
        """
        self.turned_at = time.monotonic()
        self._judge()
        self._look_at_budgets()
        if self._host.wanted is not None and not self.active_jobs:
            self._switch()
        self._note_rate()
        is_due = time.monotonic() >= self._look_at or (self._more_is_there and self._is_hungry)
        if is_due and self._has_place():
            self._look_at = time.monotonic()  # something found: look again as soon as there is a place
            if not self._look():
                self._look_at += LOOK_S * random.uniform(0.7, 1.3)

    def wait(self, timeout_s: float) -> None:
        """Until a shard ends or a signal comes, or for so long."""
        serving = self._host.serving
        if serving is None:
            self._drain.wait(timeout_s)
        else:
            serving.crew.wait(timeout_s)

    def stop_bells(self) -> None:
        """Whoever waits for a slot or a model is sent home."""
        self._slots.close()

    @property
    def active_jobs(self) -> Counter[str]:
        """Shards at work, by job."""
        serving = self._host.serving
        return Counter(run.lease.job_id for run in serving.crew.active) if serving is not None else Counter()

    def _judge(self) -> None:
        serving = self._host.serving
        for ended in serving.crew.gather() if serving is not None else ():
            self._judge_one(ended)

    def _look_at_budgets(self) -> None:
        try:
            self._budget.look(self.active_jobs)
        except (StorageError, NotFoundError) as error:
            log.warning("counting failed rows: %s", error)

    def _judge_one(self, ended: EndedShard) -> None:
        lease, failure = ended.run.lease, ended.failure
        self.ends["failed" if ended.end is None else ended.end.value] += 1
        if failure is None:
            if ended.end is ShardEnd.COMMITTED:
                self._pauses.succeeded(lease.job_id)
            self._on_end()
            return
        if isinstance(failure, EngineError):
            raise failure
        if not isinstance(failure, NightmillError):
            log.error("shard %d of %s failed", lease.range.index, lease.job_id, exc_info=failure)
        self._leave_alone(lease.job_id, failure)

    def _leave_alone(self, job_id: str, failure: BaseException) -> None:
        pause_s = self._pauses.failed(job_id)
        log.warning("%s is left alone for %.0f s: %s: %s", job_id, pause_s, type(failure).__name__, failure)

    def _switch(self) -> None:
        with self._claiming:
            if self.active_jobs:
                return
            wanted = self._host.wanted
            assert wanted is not None
            try:
                self._host.switch()
            except NightmillError as error:
                if self._host.serves_one:
                    raise
                self._tell_refusal(wanted, error)
            self._look_at = 0.0

    def _tell_refusal(self, spec: ModelSpec, error: NightmillError) -> None:
        """Leave jobs of this model to other workers, and say so: where nobody can begin them, they fail for it."""
        log.error("%s cannot be loaded here, its jobs are left to other workers: %s", spec.model, error)
        message = f"no worker could load the model; the last one to try ({self._worker_id}) says: {error.message}"
        try:
            for job_id, _ in self._store.claimable_jobs():
                if self._book.job(job_id).spec.model == spec:
                    self._store.refuse_model(job_id, MAX_REFUSALS, error.code, message)
        except (StorageError, NotFoundError) as trouble:
            log.warning("that could not be told: %s", trouble)

    def _has_place(self) -> bool:
        serving = self._host.serving
        if self._drain.requested:
            return False
        if serving is not None and (len(serving.crew.active) >= MAX_SHARDS or serving.crew.solitude.is_wanted):
            return False
        used = self._slots.used
        return self._is_hungry or any(used[tier] < limit for tier, limit in self._slots.limits.items())

    @property
    def _is_hungry(self) -> bool:
        """Whether the rows at hand would leave the engine without work before more could be fetched."""
        serving = self._host.serving
        if serving is None:
            return False
        crew = serving.crew
        return crew.rows_ahead < self._appetite.rows_wanted(serving.session.limits, crew.start_s)

    def _note_rate(self) -> None:
        serving = self._host.serving
        if serving is not None:
            self._appetite.note(serving.crew.rows_run)

    def _look(self) -> bool:
        """Take shards from the store while there is room; True when one was taken."""
        serving = self._host.serving
        self._more_is_there = False
        try:
            candidates, others = self._candidates(serving)
            if others and not candidates and not self.active_jobs:
                self._host.want(others[0])
            if serving is None:
                return False
            found = [self._fill(serving, tier, candidates) for tier in Tier]
            return any(found)
        except (StorageError, NotFoundError) as error:
            log.warning("looking for shards failed: %s", error)
            return False

    def _candidates(self, serving: Serving | None) -> tuple[list[tuple[Tier, JobInfo]], list[ModelSpec]]:
        """Jobs to claim from on the present model, and the models of others that wait."""
        candidates: list[tuple[Tier, JobInfo]] = []
        others: list[ModelSpec] = []
        for job_id, tier in self._store.claimable_jobs():
            job = self._book.job(job_id)
            if not self._host.accepts(job.spec.model) or self._pauses.is_paused(job_id):
                continue
            if self._host.refuses(job.spec.model):
                continue  # another worker may be able to load it
            if serving is not None and serving.spec == job.spec.model:
                candidates.append((tier, job))
            else:
                others.append(job.spec.model)
        return candidates, others

    def _fill(self, serving: Serving, tier: Tier, candidates: list[tuple[Tier, JobInfo]]) -> bool:
        """Take shards of one tier, the jobs with the fewest at work first."""
        jobs = [job for of, job in candidates if of is tier]
        taken = False
        while jobs and len(serving.crew.active) < MAX_SHARDS:
            slot = self._slots.ask(tier) or (self._slots.extra(tier) if self._is_hungry else None)
            if slot is None:
                self._more_is_there = True
                break
            at_work = self.active_jobs
            job = min(jobs, key=lambda job: at_work[job.job_id])
            shard_ids = self._store.available_shards(CHOICES, job.job_id)
            random.shuffle(shard_ids)
            if self._claim_first(serving, job, shard_ids, slot):
                taken = True
            else:
                jobs.remove(job)
        return taken
