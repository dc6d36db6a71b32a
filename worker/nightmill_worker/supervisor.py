"""Keeps one engine fed and alive for all shards of a worker, and finds the row that kills it.

    shard thread ──offer──▶ look-ahead ─┐                        ┌─▶ mailbox ──collect──▶ shard thread
    shard thread ──offer──▶ (bounded)  ─┴▶ supervisor ⇄ engine ──┴─▶ mailbox ──collect──▶ shard thread

One thread owns the engine. The engine holds thousands of waiting requests, because its planner needs to see ahead; it
says which have started, before they do. When it dies, those that had started become suspects (isolation.py), a new
engine is started and everything that had not come back runs again; other shards only see a pause.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nightmill.errors import EngineError, NightmillError, RowErrorCode
from nightmill.records import DEFAULT_LOOK_AHEAD
from nightmill.states import Tier
from nightmill_worker.engine.request import Finished, FinishReason, Request
from nightmill_worker.engine.stats import EngineStats
from nightmill_worker.feed.lookahead import Lookahead
from nightmill_worker.isolation import Isolation
from nightmill_worker.service import DeathCause, EngineDiedError, EngineService

log = logging.getLogger(__name__)

POLL_S = 0.2  # only bounds how late a stop is noticed: new work and finished sequences wake the thread
# Deaths in a row without one row finished or convicted: it is not the rows. Of 8192 started ones 13 lead to one alone,
# 3 convict it.
MAX_BARREN_DEATHS = 16
MAX_BARREN_CONVICTIONS = 3  # in a row, without one finished row: an engine that cannot run anything convicts everybody


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedLimits:
    """How much is held where, in the feeder and the engine together."""

    max_requests: int  # of a tier, tokenised and not finished
    max_tokens: int  # of their prompts
    min_requests: int  # may be held whatever their tokens, so that a free slot is filled in the next step
    max_unflushed: int = 256  # finished rows of all shards that are not durable
    quiet_s: float = 0.3  # an idle engine starts when nothing more has come for so long,
    prime_s: float = 2.0  # or so long after the first request: what is planned together is planned better

    @classmethod
    def of(cls, max_num_seqs: int, look_ahead: int = DEFAULT_LOOK_AHEAD, *, max_tokens: int = 1 << 20) -> "FeedLimits":
        """For an engine of so many slots that plans with `look_ahead` waiting requests of each tier."""
        least = max_num_seqs + max(16, max_num_seqs // 2)
        return cls(max_requests=max(least, max_num_seqs + look_ahead), max_tokens=max_tokens, min_requests=least)

    @property
    def max_careful(self) -> int:
        """Requests that a shard has out at once while one of them is suspected of ending the whole process."""
        return self.min_requests


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A request that has no answer because running it alone ended the engine."""

    request_id: int
    code: RowErrorCode
    message: str


Outcome = Finished | Quarantined


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """What is where, for the progress line."""

    waiting: int  # tokenised, in the feeder
    in_engine: int  # waiting ones too
    running: int  # of those, started
    deaths: int
    isolating: bool


@dataclass(slots=True)
class Box:
    """What the supervisor keeps of a mailbox."""

    tier: Tier
    outcomes: list[Outcome] = field(default_factory=list)
    started: list[int] = field(default_factory=list)  # since the shard asked last
    in_engine: int = 0
    running: int = 0  # of those, started
    reruns: int = 0  # requests that had started in an engine that died
    unflushed: int = 0  # finished rows that the shard has not made durable
    must_flush: bool = False


@dataclass(slots=True)
class Inside:
    """A request in the engine."""

    key: int  # of its mailbox
    request: Request
    has_started: bool = False


class Mailbox:
    """One shard's end: offer requests, collect outcomes. Used by that shard's thread only."""

    def __init__(self, supervisor: "EngineSupervisor", key: int) -> None:
        self._supervisor = supervisor
        self._key = key

    @property
    def has_room(self) -> bool:
        """Whether the look-ahead takes more now."""
        return self._supervisor.has_room_for(self._supervisor.box(self._key).tier)

    @property
    def in_engine(self) -> int:
        """How many of its requests are in the engine now, waiting ones too."""
        return self._supervisor.box(self._key).in_engine

    @property
    def running(self) -> int:
        """How many of its requests have started and not ended."""
        return self._supervisor.box(self._key).running

    @property
    def reruns(self) -> int:
        """How many of its requests had started in an engine that died."""
        return self._supervisor.box(self._key).reruns

    @property
    def must_flush(self) -> bool:
        """All shards together hold as many finished rows as may be lost, and this one the most of them."""
        return self._supervisor.box(self._key).must_flush

    @property
    def max_careful(self) -> int:
        """See FeedLimits."""
        return self._supervisor.limits.max_careful

    def take_started(self) -> list[int]:
        """Its requests that have started since the last call."""
        return self._supervisor.take_started(self._key)

    def note_unflushed(self, count: int) -> None:
        """Say how many finished rows are not durable."""
        self._supervisor.note_unflushed(self._key, count)

    def offer(self, requests: Sequence[Request]) -> None:
        """Queue requests; ids must be unique over all mailboxes."""
        self._supervisor.offer(self._key, requests)

    def collect(self, timeout_s: float, *, or_room: bool) -> list[Outcome]:
        """Outcomes since the last call. Waits up to `timeout_s` for one, for `must_flush`, or with `or_room` for room.

        Raises:
            NightmillError: The engine is gone for good.
        """
        return self._supervisor.collect(self._key, timeout_s, or_room=or_room)

    def close(self) -> None:
        """Withdraw what waits, cancel what runs, drop what still comes back."""
        self._supervisor.withdraw(self._key)

    def __enter__(self) -> "Mailbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineSupervisor:
    """Owns the engine and its thread. `start_engine` is called at the start and after each death."""

    def __init__(self, start_engine: Callable[[], EngineService], limits: FeedLimits) -> None:
        self._start_engine = start_engine
        self.limits = limits
        self._changed = threading.Condition()
        self._lookahead = Lookahead(
            max_tokens=limits.max_tokens, max_requests=limits.max_requests, min_requests=limits.min_requests
        )
        self._first_offer_at = self._last_offer_at = float("-inf")  # since the engine was idle
        self._boxes: dict[int, Box] = {}
        self._next_key = 0
        self._in_engine: dict[int, Inside] = {}  # by request id, oldest first
        self._to_cancel: list[int] = []
        self._is_primed = False
        self._isolation = Isolation()
        self._suspects: dict[int, tuple[int, Request]] = {}  # of the windows, out of the look-ahead
        self._admitting = True
        self._to_recall = False
        self._stopping = False
        self._error: NightmillError | None = None
        self._deaths = 0
        self._barren_deaths = 0
        self._barren_convictions = 0
        self._past_stats: list[EngineStats] = []  # of engines that died
        self._service = start_engine()
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)
        self._thread.start()

    # -- for the shards ---------------------------------------------------------------------------------------------

    def open(self, tier: Tier = Tier.NORMAL) -> Mailbox:
        """A new mailbox, for requests of this tier."""
        with self._changed:
            key = self._next_key
            self._next_key += 1
            self._boxes[key] = Box(tier)
        return Mailbox(self, key)

    def has_room_for(self, tier: Tier) -> bool:
        """Whether the look-ahead takes more of this tier now."""
        return self._lookahead.has_room(tier)

    @property
    def has_room(self) -> bool:
        """Whether the look-ahead takes more of every tier now."""
        return all(self._lookahead.has_room(tier) for tier in Tier)

    def box(self, key: int) -> Box:
        """The mailbox's counters."""
        return self._boxes[key]

    def offer(self, key: int, requests: Sequence[Request]) -> None:
        """See Mailbox.offer."""
        with self._changed:
            self._last_offer_at = time.monotonic()
            if not self._in_engine and not len(self._lookahead):
                self._first_offer_at = self._last_offer_at
            self._lookahead.add(key, requests)
        self._service.wake()

    def collect(self, key: int, timeout_s: float, *, or_room: bool) -> list[Outcome]:
        """See Mailbox.collect."""
        box = self._boxes[key]
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    box.outcomes
                    or box.must_flush
                    or self._error is not None
                    or (or_room and self._lookahead.has_room(box.tier))
                ),
                timeout_s,
            )
            if not box.outcomes and self._error is not None:
                raise self._error
            outcomes, box.outcomes = box.outcomes, []
        return outcomes

    def take_started(self, key: int) -> list[int]:
        """See Mailbox.take_started."""
        box = self._boxes[key]
        with self._changed:
            started, box.started = box.started, []
        return started

    def note_unflushed(self, key: int, count: int) -> None:
        """See Mailbox.note_unflushed."""
        with self._changed:
            box = self._boxes[key]
            box.unflushed = count
            box.must_flush &= count > 0
            if sum(box.unflushed for box in self._boxes.values()) >= self.limits.max_unflushed:
                fullest = max(self._boxes.values(), key=lambda box: box.unflushed)
                if not fullest.must_flush:
                    fullest.must_flush = True
                    self._changed.notify_all()

    def withdraw(self, key: int) -> None:
        """See Mailbox.close."""
        with self._changed:
            self._boxes.pop(key, None)
            self._lookahead.withdraw(key)
            self._to_cancel += [i for i, inside in self._in_engine.items() if inside.key == key]
            gone = [i for i, (owner, _) in self._suspects.items() if owner == key and i not in self._in_engine]
            for request_id in gone:
                self._lookahead.done(self._suspects[request_id][1])
            self._forget_suspects(gone)
            self._changed.notify_all()
        self._service.wake()

    # -- for the worker ---------------------------------------------------------------------------------------------

    @property
    def service(self) -> EngineService:
        """The engine of the moment."""
        return self._service

    def begin_now(self) -> None:
        """Everything has been offered: an idle engine need not wait for more to plan with, now or later."""
        if not self._is_primed:
            self._is_primed = True
            self._service.wake()

    def stop_admitting(self) -> None:
        """From now on nothing starts in the engine; what has started runs on, the rest comes back to the look-ahead."""
        with self._changed:
            self._admitting = False
            self._to_recall = True
        self._service.wake()

    def status(self) -> FeedStatus:
        """What is where now."""
        with self._changed:
            return FeedStatus(
                waiting=len(self._lookahead),
                in_engine=len(self._in_engine),
                running=sum(box.running for box in self._boxes.values()),
                deaths=self._deaths,
                isolating=self._isolation.active,
            )

    def stats(self) -> list[EngineStats]:
        """Counters of every engine of this supervisor, the living one last."""
        last = self._service.stats()
        with self._changed:
            return [*self._past_stats, *([last] if last is not None else [])]

    def close(self) -> None:
        """End the engine. What is still inside is lost."""
        with self._changed:
            self._stopping = True
        self._service.wake()
        self._thread.join()
        self._service.close()

    # -- the supervisor's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping and self._error is None:
                self._turn()
        except NightmillError as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001 - the shards must hear of it, or they wait for ever
            self._give_up(EngineError(f"the engine's supervisor failed: {type(error).__name__}: {error}"))

    def _turn(self) -> None:
        try:
            self._cancel_withdrawn()
            self._admit()
            self._hear(self._service.poll(min(POLL_S, self._priming_s() or POLL_S)))
        except EngineDiedError as death:
            self._hear(self._service.leftovers())
            self._bury(death)

    def _cancel_withdrawn(self) -> None:
        with self._changed:
            request_ids, self._to_cancel = self._to_cancel, []
            recall, self._to_recall = self._to_recall, False
        if request_ids:
            self._service.cancel(request_ids)
        if recall:
            self._service.recall()

    def _priming_s(self) -> float:
        """How much longer an idle engine is kept waiting for more to plan with; 0: no longer."""
        if self._is_primed or self._in_engine or self._isolation.active:
            return 0.0
        if not len(self._lookahead) or not self.has_room:
            return 0.0
        limits = self.limits
        ready_at = min(self._last_offer_at + limits.quiet_s, self._first_offer_at + limits.prime_s)
        return max(0.0, ready_at - time.monotonic())

    def _admit(self) -> None:
        with self._changed:
            entries = self._choose() if self._admitting and not self._priming_s() else []
            for key, request in entries:
                self._in_engine[request.request_id] = Inside(key, request)
                self._boxes[key].in_engine += 1
        if entries:
            self._service.submit([request for _, request in entries])

    def _choose(self) -> list[tuple[int, Request]]:
        if self._isolation.active:
            return [self._suspects[i] for i in self._isolation.window if i not in self._in_engine]
        return self._lookahead.take()

    def _hear(self, finished: Sequence[Finished]) -> None:
        """Take note of what the engine has started and ended."""
        started = self._service.take_started()
        if not finished and not started:
            return
        with self._changed:
            for request_id in started:
                self._start(request_id)
            for one in finished:
                self._end(one)
            if finished:
                self._forget_suspects([one.request_id for one in finished])
                self._barren_deaths = self._barren_convictions = 0
                self._changed.notify_all()

    def _start(self, request_id: int) -> None:
        inside = self._in_engine.get(request_id)
        if inside is None or inside.has_started:
            return
        inside.has_started = True
        box = self._boxes.get(inside.key)
        if box is not None:
            box.running += 1
            box.started.append(request_id)

    def _end(self, finished: Finished) -> None:
        inside = self._in_engine.pop(finished.request_id)
        if (
            finished.finish_reason is FinishReason.ABORT
            and not self._admitting
            and not inside.has_started
            and inside.key in self._boxes
        ):  # recalled
            self._boxes[inside.key].in_engine -= 1
            self._lookahead.put_back([(inside.key, inside.request)])
            return
        self._leave(inside)
        self._lookahead.done(inside.request)
        self._put(inside.key, finished)

    def _leave(self, inside: Inside) -> None:
        box = self._boxes.get(inside.key)
        if box is not None:  # else: withdrawn
            box.in_engine -= 1
            box.running -= inside.has_started

    def _put(self, key: int, outcome: Outcome) -> None:
        box = self._boxes.get(key)
        if box is not None:  # else: withdrawn
            box.outcomes.append(outcome)

    def _forget_suspects(self, request_ids: Sequence[int]) -> None:
        self._isolation.settled(request_ids)
        for request_id in request_ids:
            self._suspects.pop(request_id, None)

    def _bury(self, death: EngineDiedError) -> None:
        log.warning("the engine died (%s): %s\n%s", death.cause, death.message, death.detail)
        with self._changed:
            self._deaths += 1
            self._barren_deaths += 1
            self._blame(death)
            last = self._service.stats()
            if last is not None:
                self._past_stats.append(last)
            self._changed.notify_all()
        self._service.close()
        hint = "No row finished in between, so no single row is to blame: run `nightmill doctor`."
        if self._barren_deaths > MAX_BARREN_DEATHS:
            self._give_up(EngineError(f"the engine died {self._barren_deaths} times in a row: {death}", hint=hint))
        elif self._barren_convictions > MAX_BARREN_CONVICTIONS:
            count = self._barren_convictions
            self._give_up(EngineError(f"{count} rows in a row ended the engine, each alone: {death}", hint=hint))
        elif not self._admitting:
            self._give_up(death)  # nothing new would run on another engine
        elif not self._stopping:
            self._service = self._start_engine()

    def _blame(self, death: EngineDiedError) -> None:
        """Sort what was inside into culprit, suspects and cleared."""
        entering = set(self._service.entering)
        suspected: list[int] = []
        withdrawn: list[int] = []
        known = dict(self._suspects)
        for request_id, inside in self._in_engine.items():
            self._leave(inside)
            box = self._boxes.get(inside.key)
            if box is None:
                self._lookahead.done(inside.request)
                known.pop(request_id, None)
                withdrawn.append(request_id)
                continue
            known[request_id] = (inside.key, inside.request)
            box.reruns += inside.has_started
            if inside.has_started or request_id in entering:
                suspected.append(request_id)
        self._in_engine.clear()
        self._to_cancel.clear()
        culprit = self._isolation.crashed(suspected, is_kill=death.cause is DeathCause.KILL).culprit
        self._isolation.settled(withdrawn)
        if culprit is not None:
            self._barren_deaths = 0
            self._barren_convictions += 1
            key, request = known.pop(culprit)
            self._lookahead.done(request)
            self._put(key, Quarantined(culprit, _code(death), _reason(death)))
        self._suspects = {i: known.pop(i) for i in self._isolation.suspects}
        self._lookahead.put_back(known.values())

    def _give_up(self, error: NightmillError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


def _code(death: EngineDiedError) -> RowErrorCode:
    # A step that raises is an answer of the engine; anything else took the process along.
    return RowErrorCode.ENGINE_ERROR if death.cause is DeathCause.EXCEPTION else RowErrorCode.QUARANTINED


def _reason(death: EngineDiedError) -> str:
    return f"running this row alone ended the engine: {death.message}"
