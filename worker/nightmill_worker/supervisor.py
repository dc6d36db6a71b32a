"""Keeps one engine fed and alive for all shards of a worker, and finds the row that kills it.

    shard thread ──offer──▶ look-ahead ─┐                        ┌─▶ mailbox ──collect──▶ shard thread
    shard thread ──offer──▶ (bounded)  ─┴▶ supervisor ⇄ engine ──┴─▶ mailbox ──collect──▶ shard thread

One thread owns the engine. When it dies, the requests that were inside become suspects (isolation.py), a new engine
is started and everything that had not come back runs again; other shards only see a pause.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nightmill.errors import EngineError, NightmillError, RowErrorCode
from nightmill_worker.engine.request import Finished, Request
from nightmill_worker.engine.stats import EngineStats
from nightmill_worker.feed.lookahead import Lookahead
from nightmill_worker.isolation import Isolation
from nightmill_worker.service import DeathCause, EngineDiedError, EngineService

log = logging.getLogger(__name__)

POLL_S = 0.2  # only bounds how late a stop is noticed: new work and finished sequences wake the thread
MAX_BARREN_DEATHS = 16  # deaths in a row without one finished row: it is not the rows. 1 + log2(8192 in flight) fit


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedLimits:
    """How much is held where."""

    max_in_engine: int  # requests; running ones and a few that wait, so that a free slot is filled in the next step
    max_lookahead_requests: int
    max_lookahead_tokens: int

    @classmethod
    def of(cls, max_num_seqs: int) -> "FeedLimits":
        """Enough that the engine never waits, little enough that a crash recomputes little."""
        in_engine = max_num_seqs + max(16, max_num_seqs // 2)
        return cls(max_in_engine=in_engine, max_lookahead_requests=4 * in_engine, max_lookahead_tokens=1 << 20)


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
    in_engine: int
    deaths: int
    isolating: bool


@dataclass(slots=True)
class Box:
    """What the supervisor keeps of a mailbox."""

    outcomes: list[Outcome] = field(default_factory=list)
    in_engine: int = 0
    reruns: int = 0  # requests that were inside an engine when it died
    last_admitted: int = -1  # id of the request that entered the engine last


class Mailbox:
    """One shard's end: offer requests, collect outcomes. Used by that shard's thread only."""

    def __init__(self, supervisor: "EngineSupervisor", key: int) -> None:
        self._supervisor = supervisor
        self._key = key

    @property
    def has_room(self) -> bool:
        """Whether the look-ahead takes more now."""
        return self._supervisor.has_room

    @property
    def in_engine(self) -> int:
        """How many of its requests are in the engine now."""
        return self._supervisor.box(self._key).in_engine

    @property
    def last_admitted(self) -> int:
        """Id of its request that entered the engine last; -1 before the first."""
        return self._supervisor.box(self._key).last_admitted

    @property
    def reruns(self) -> int:
        """How many of its requests were in an engine that died."""
        return self._supervisor.box(self._key).reruns

    def offer(self, requests: Sequence[Request]) -> None:
        """Queue requests; ids must be unique over all mailboxes."""
        self._supervisor.offer(self._key, requests)

    def collect(self, timeout_s: float, *, or_room: bool) -> list[Outcome]:
        """Outcomes since the last call. Waits up to `timeout_s` for one, or with `or_room` for room to offer more.

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
        self._limits = limits
        self._changed = threading.Condition()
        self._lookahead = Lookahead(max_tokens=limits.max_lookahead_tokens, max_requests=limits.max_lookahead_requests)
        self._boxes: dict[int, Box] = {}
        self._next_key = 0
        self._in_engine: dict[int, tuple[int, Request]] = {}  # request id → (mailbox, request), oldest first
        self._to_cancel: list[int] = []
        self._isolation = Isolation()
        self._suspects: dict[int, tuple[int, Request]] = {}  # of the windows, out of the look-ahead
        self._admitting = True
        self._stopping = False
        self._error: NightmillError | None = None
        self._deaths = 0
        self._barren_deaths = 0
        self._past_stats: list[EngineStats] = []  # of engines that died
        self._service = start_engine()
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)
        self._thread.start()

    # -- for the shards ---------------------------------------------------------------------------------------------

    def open(self) -> Mailbox:
        """A new mailbox."""
        with self._changed:
            key = self._next_key
            self._next_key += 1
            self._boxes[key] = Box()
        return Mailbox(self, key)

    @property
    def has_room(self) -> bool:
        """Whether the look-ahead takes more now."""
        return self._lookahead.has_room

    def box(self, key: int) -> Box:
        """The mailbox's counters."""
        return self._boxes[key]

    def offer(self, key: int, requests: Sequence[Request]) -> None:
        """See Mailbox.offer."""
        with self._changed:
            self._lookahead.add(key, requests)
        self._service.wake()

    def collect(self, key: int, timeout_s: float, *, or_room: bool) -> list[Outcome]:
        """See Mailbox.collect."""
        box = self._boxes[key]
        with self._changed:
            self._changed.wait_for(
                lambda: box.outcomes or self._error is not None or (or_room and self._lookahead.has_room), timeout_s
            )
            if not box.outcomes and self._error is not None:
                raise self._error
            outcomes, box.outcomes = box.outcomes, []
        return outcomes

    def withdraw(self, key: int) -> None:
        """See Mailbox.close."""
        with self._changed:
            self._boxes.pop(key, None)
            self._lookahead.withdraw(key)
            self._to_cancel += [i for i, (owner, _) in self._in_engine.items() if owner == key]
            gone = [i for i, (owner, _) in self._suspects.items() if owner == key and i not in self._in_engine]
            self._forget_suspects(gone)
        self._service.wake()

    # -- for the worker ---------------------------------------------------------------------------------------------

    @property
    def service(self) -> EngineService:
        """The engine of the moment."""
        return self._service

    def stop_admitting(self) -> None:
        """From now on nothing enters the engine; what is inside runs on."""
        with self._changed:
            self._admitting = False

    def status(self) -> FeedStatus:
        """What is where now."""
        with self._changed:
            return FeedStatus(len(self._lookahead), len(self._in_engine), self._deaths, self._isolation.active)

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
            self._deliver(self._service.poll(POLL_S))
        except EngineDiedError as death:
            self._deliver(self._service.leftovers())
            self._bury(death)

    def _cancel_withdrawn(self) -> None:
        with self._changed:
            request_ids, self._to_cancel = self._to_cancel, []
        if request_ids:
            self._service.cancel(request_ids)

    def _admit(self) -> None:
        with self._changed:
            entries = self._choose() if self._admitting else []
            for key, request in entries:
                self._in_engine[request.request_id] = (key, request)
        if entries:
            self._service.submit([request for _, request in entries])
            with self._changed:
                self._changed.notify_all()  # the look-ahead has room

    def _choose(self) -> list[tuple[int, Request]]:
        if self._isolation.active:
            chosen = [self._suspects[i] for i in self._isolation.window if i not in self._in_engine]
        else:
            chosen = self._lookahead.take(self._limits.max_in_engine - len(self._in_engine))
        for key, request in chosen:
            box = self._boxes[key]
            box.in_engine += 1
            box.last_admitted = max(box.last_admitted, request.request_id)
        return chosen

    def _deliver(self, finished: Sequence[Finished]) -> None:
        if not finished:
            return
        with self._changed:
            for one in finished:
                key, _ = self._in_engine.pop(one.request_id)
                self._put(key, one)
            self._forget_suspects([one.request_id for one in finished])
            self._barren_deaths = 0
            self._changed.notify_all()

    def _put(self, key: int, outcome: Outcome) -> None:
        box = self._boxes.get(key)
        if box is not None:  # else: withdrawn
            box.in_engine -= 1
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
        if self._barren_deaths > MAX_BARREN_DEATHS:
            hint = "No row finished in between, so no single row is to blame: run `nightmill doctor`."
            self._give_up(EngineError(f"the engine died {self._barren_deaths} times in a row: {death}", hint=hint))
        elif not self._admitting:
            self._give_up(death)  # nothing new would run on another engine
        elif not self._stopping:
            self._service = self._start_engine()

    def _blame(self, death: EngineDiedError) -> None:
        """Sort what was inside into culprit, suspects and cleared."""
        inside = {i: entry for i, entry in self._in_engine.items() if entry[0] in self._boxes}
        for key, _ in inside.values():
            self._boxes[key].in_engine -= 1
            self._boxes[key].reruns += 1
        self._in_engine.clear()
        self._to_cancel.clear()
        known = self._suspects | inside
        verdict = self._isolation.crashed(list(inside))
        if verdict.culprit is not None:
            key, _ = known.pop(verdict.culprit)
            self._boxes[key].in_engine += 1  # _put takes it off again
            self._put(key, Quarantined(verdict.culprit, _code(death), _reason(death)))
        cleared = set(verdict.cleared)
        self._suspects = {i: entry for i, entry in known.items() if i not in cleared}
        self._lookahead.put_back(entry for i, entry in known.items() if i in cleared and entry[0] in self._boxes)

    def _give_up(self, error: NightmillError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


def _code(death: EngineDiedError) -> RowErrorCode:
    # A step that raises is an answer of the engine; anything else took the process along.
    return RowErrorCode.ENGINE_ERROR if death.cause is DeathCause.EXCEPTION else RowErrorCode.QUARANTINED


def _reason(death: EngineDiedError) -> str:
    return f"running this row alone ended the engine: {death.message}"
