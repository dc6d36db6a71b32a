"""What becomes of a bell: a fleet on a real store, with a crew that only holds."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.contract.store_jobs import make_job, make_result

from nightmill.errors import ModelError, StorageError, ValidationError
from nightmill.records import JobInfo, ModelSpec, ShardLease, ShardProgress
from nightmill.states import JobStatus, ShardState, Tier
from nightmill.store import Store
from nightmill_worker.drain import Drain
from nightmill_worker.fleet import MAX_REFUSALS, BellEnd, Fleet
from nightmill_worker.fleet_jobs import JobPauses
from nightmill_worker.slots import TierSlots
from nightmill_worker.solitude import Solitude
from nightmill_worker.supervisor import FeedLimits


@dataclass
class HeldShard:
    lease: ShardLease
    on_end: Callable[[], None]
    progress: ShardProgress


@dataclass
class StillCrew:
    """Holds shards until the test ends them."""

    active: list[HeldShard] = field(default_factory=list)
    contexts_fail_with: Exception | None = None
    solitude: Solitude = field(default_factory=Solitude)
    start_s: float = 0.0
    rows_run: int = 0

    def start(self, lease: ShardLease, context: object, on_end: Callable[[], None]) -> None:
        self.active.append(HeldShard(lease, on_end, ShardProgress(attempt=lease.attempt)))

    def gather(self) -> list[object]:
        return []

    @property
    def rows_ahead(self) -> int:
        return sum(shard.lease.range.num_rows for shard in self.active)

    def get(self, job: JobInfo) -> object:
        if self.contexts_fail_with is not None:
            raise self.contexts_fail_with
        return job

    def end_all(self) -> None:
        active, self.active = self.active, []
        for shard in active:
            shard.on_end()


class Host:
    """A model host without an engine: `demo` is served."""

    def __init__(self, crew: StillCrew) -> None:
        self.model: str | None = "demo"
        self.only: str | None = None
        self.refused: set[str] = set()
        self.wants: list[str] = []
        self.wanted: ModelSpec | None = None
        self._crew = crew
        limits = FeedLimits.of(4, 0)
        session = SimpleNamespace(limits=limits)
        self._serving = SimpleNamespace(spec=None, session=session, crew=crew, contexts=crew)

    @property
    def serving(self) -> Any:
        if self.model is None:
            return None
        self._serving.spec = ModelSpec(model=self.model)
        return self._serving

    def accepts(self, spec: ModelSpec) -> bool:
        return self.only in (None, spec.model)

    def refuses(self, spec: ModelSpec) -> bool:
        return spec.model in self.refused

    def switch(self) -> None:
        assert self.wanted is not None
        self.refused.add(self.wanted.model)
        self.wanted = None
        raise ModelError("too large")

    @property
    def serves_one(self) -> bool:
        return self.only is not None

    def want(self, spec: ModelSpec) -> None:
        self.wants.append(spec.model)

    def wait(self, spec: ModelSpec, deadline: float) -> Any:
        serving = self.serving
        return serving if serving is not None and serving.spec == spec else None


@dataclass
class Place:
    store: Store
    crew: StillCrew
    host: Host
    slots: TierSlots
    drain: Drain
    fleet: Fleet

    def shards(self, num_shards: int = 3, **options: Any) -> list[int]:
        job = make_job(self.store, num_shards, output=f"/out-{time.monotonic_ns()}", **options)
        return self.store.available_shards(100, job.job_id)

    def answer_aside(self, shard_id: int, tier: Tier = Tier.NORMAL) -> tuple[threading.Thread, list[BellEnd]]:
        ends: list[BellEnd] = []
        thread = threading.Thread(target=lambda: ends.append(self.fleet.answer(shard_id, tier)))
        thread.start()
        return thread, ends


@pytest.fixture
def make_place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    stores: list[Store] = []

    def make(slots: dict[Tier, int] | None = None, slice_s: float = 3600.0) -> Place:
        store = Store(f"sqlite:///{tmp_path / 'store.db'}")
        store.migrate()
        stores.append(store)
        crew = StillCrew()
        host = Host(crew)
        tier_slots = TierSlots(slots or {Tier.HIGH: 1, Tier.NORMAL: 2, Tier.LOW: 1})
        drain = Drain()
        fleet = Fleet(
            store,
            host,  # type: ignore[arg-type]
            tier_slots,
            drain,
            JobPauses(),
            worker_id="w",
            lease_ttl_s=30,
            slice_s=slice_s,
            on_end=lambda: None,
        )
        return Place(store, crew, host, tier_slots, drain, fleet)

    yield make
    for store in stores:
        store.close()


def _wait(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_bell_is_answered_when_its_shard_ends(make_place: Callable[..., Place]) -> None:
    place = make_place()
    shard_id = place.shards()[0]
    thread, ends = place.answer_aside(shard_id)
    _wait(lambda: place.crew.active)
    assert place.fleet.handles(shard_id)
    assert place.fleet.answer(shard_id, Tier.NORMAL) is BellEnd.DROPPED  # a redelivery
    place.crew.end_all()
    thread.join()
    assert ends == [BellEnd.ENDED]
    assert not place.fleet.handles(shard_id)
    assert place.slots.used[Tier.NORMAL] == 0


def test_at_the_slices_end_the_message_goes_and_the_shard_keeps_its_slot(make_place: Callable[..., Place]) -> None:
    place = make_place(slice_s=0.05)
    shard_id = place.shards()[0]
    assert place.fleet.answer(shard_id, Tier.NORMAL) is BellEnd.SLICE
    assert place.fleet.handles(shard_id)
    assert place.slots.used[Tier.NORMAL] == 1
    assert place.fleet.answer(shard_id, Tier.NORMAL) is BellEnd.DROPPED


def test_a_bell_that_has_waited_a_slice_for_a_slot_rings_again(make_place: Callable[..., Place]) -> None:
    place = make_place({Tier.NORMAL: 1}, slice_s=0.05)
    first, second, _ = place.shards()
    assert place.fleet.answer(first, Tier.NORMAL) is BellEnd.SLICE
    assert place.fleet.answer(second, Tier.NORMAL) is BellEnd.WAITED
    assert len(place.crew.active) == 1


def test_case_I076_no_tier_holds_more_shards_than_slots_however_many_bells_ring(
    make_place: Callable[..., Place],
) -> None:
    place = make_place({Tier.NORMAL: 2, Tier.HIGH: 1})
    normal, high = place.shards(5), place.shards(2, tier=Tier.HIGH)
    aside = [place.answer_aside(shard_id) for shard_id in normal]
    _wait(lambda: len(place.crew.active) == 2)
    aside.append(place.answer_aside(high[0], Tier.HIGH))  # not behind the bulk
    _wait(lambda: len(place.crew.active) == 3)
    for _ in range(5):
        place.crew.end_all()
        _wait(lambda: place.crew.active or not any(thread.is_alive() for thread, _ in aside))
        assert place.slots.used[Tier.NORMAL] <= 2
    for thread, ends in aside:
        thread.join()
        assert ends == [BellEnd.ENDED]


def test_what_is_not_there_or_not_ours_is_dropped(make_place: Callable[..., Place]) -> None:
    place = make_place()
    taken, other, _ = place.shards()
    assert place.store.claim(taken, "somebody") is not None
    assert place.fleet.answer(taken, Tier.NORMAL) is BellEnd.DROPPED
    assert place.fleet.answer(999, Tier.NORMAL) is BellEnd.DROPPED
    place.host.only = "another"
    assert place.fleet.answer(other, Tier.NORMAL) is BellEnd.DROPPED
    place.host.only, place.host.model = None, "another"
    assert place.fleet.answer(other, Tier.NORMAL) is BellEnd.DROPPED
    assert place.slots.used[Tier.NORMAL] == 0
    assert not place.crew.active


def test_a_drain_gives_bells_back_and_keeps_what_runs(make_place: Callable[..., Place]) -> None:
    place = make_place({Tier.NORMAL: 1})
    first, second, _ = place.shards()
    running, waiting = place.answer_aside(first), None
    _wait(lambda: place.crew.active)
    waiting = place.answer_aside(second)
    _wait(lambda: place.fleet.handles(second))
    place.drain.request(signal.SIGTERM)
    place.fleet.stop_bells()
    for thread, _ in (running, waiting):
        thread.join()
    assert running[1] == [BellEnd.SLICE]
    assert waiting[1] == [BellEnd.STOPPED]
    assert len(place.crew.active) == 1


def test_a_job_that_cannot_run_here_fails_with_its_reason(make_place: Callable[..., Place]) -> None:
    place = make_place()
    shard_id = place.shards()[0]
    place.crew.contexts_fail_with = ValidationError("--chat, and the model has no chat template")
    assert place.fleet.answer(shard_id, Tier.NORMAL) is BellEnd.DROPPED
    (job,) = place.store.jobs()
    assert job.error_message == "--chat, and the model has no chat template"
    assert place.slots.used[Tier.NORMAL] == 0


def test_a_job_whose_input_cannot_be_read_now_is_left_alone_for_a_while(make_place: Callable[..., Place]) -> None:
    place = make_place()
    first, second, _ = place.shards()
    place.crew.contexts_fail_with = StorageError("503")
    assert place.fleet.answer(first, Tier.NORMAL) is BellEnd.DROPPED
    place.crew.contexts_fail_with = None
    assert place.fleet.answer(second, Tier.NORMAL) is BellEnd.DROPPED
    assert place.store.jobs()[0].num_shards_by_state == {ShardState.AVAILABLE: 3}


def test_without_a_broker_shards_are_found_in_the_store_and_jobs_take_turns(make_place: Callable[..., Place]) -> None:
    place = make_place({Tier.NORMAL: 4, Tier.HIGH: 1})
    place.shards(6)
    place.shards(6)
    place.shards(3, tier=Tier.HIGH)
    place.shards(3, tier=Tier.LOW)
    place.fleet.turn()
    assert place.slots.used[Tier.HIGH] == 2  # one slot, and more because the engine would go hungry
    assert place.slots.used[Tier.NORMAL] >= 4
    jobs = place.store.jobs()
    normal = [place.fleet.active_jobs[job.job_id] for job in jobs if job.options.tier is Tier.NORMAL]
    assert abs(normal[0] - normal[1]) <= 1


def test_a_hungry_engine_gets_more_shards_than_slots(make_place: Callable[..., Place]) -> None:
    place = make_place({Tier.NORMAL: 1})
    place.shards(30)  # of 10 rows each; the engine has 4 slots and would like 80 rows at hand
    place.fleet.turn()
    limits = place.host.serving.session.limits
    wanted = min(limits.max_requests, 4 * limits.min_requests)
    assert wanted <= place.crew.rows_ahead < wanted + 10
    assert place.slots.used[Tier.NORMAL] == len(place.crew.active)


def test_what_the_engine_has_had_enough_of_is_taken_the_moment_it_is_hungry(make_place: Callable[..., Place]) -> None:
    place = make_place({Tier.NORMAL: 1, Tier.HIGH: 1})
    place.shards(30)
    place.fleet.turn()
    place.fleet.turn()  # takes nothing: there is enough, and nothing for the free slot
    enough = place.crew.rows_ahead
    place.crew.end_all()
    place.fleet.turn()  # and not three seconds later
    assert place.crew.rows_ahead == enough


def test_what_was_not_there_is_not_looked_for_in_every_turn(make_place: Callable[..., Place]) -> None:
    place = make_place({Tier.NORMAL: 1})
    place.shards(1)
    place.fleet.turn()
    place.fleet.turn()  # hungry, and nothing there
    place.shards(30)
    place.fleet.turn()
    assert len(place.crew.active) == 1


def test_while_a_shard_searches_alone_no_other_one_is_taken(make_place: Callable[..., Place]) -> None:
    place = make_place()
    shard_id = place.shards()[0]
    place.crew.solitude.enter()
    with place.crew.solitude.alone(lambda: True):
        place.fleet.turn()
        assert place.fleet.answer(shard_id, Tier.NORMAL) is BellEnd.DROPPED
        assert not place.crew.active
    place.fleet.turn()
    assert place.crew.active


def test_an_idle_worker_wants_the_model_that_waits(make_place: Callable[..., Place]) -> None:
    place = make_place()
    place.host.model = None
    place.shards(1)
    place.fleet.turn()
    assert place.host.wants == ["demo"]
    place.host.model, place.host.wants = "another", []
    place.fleet._look_at = 0.0
    place.fleet.turn()
    assert place.host.wants == ["demo"]
    place.host.wants = []
    place.host.refused = {"demo"}
    place.fleet._look_at = 0.0
    place.fleet.turn()
    assert place.host.wants == []
    assert place.store.jobs()[0].error_code is None, "another worker may load it"


def refuse(place: Place) -> JobInfo:
    place.host.refused.clear()
    place.host.wanted = ModelSpec(model="demo")
    place.fleet.turn()
    return place.store.jobs()[0]


def test_a_model_that_no_worker_can_load_fails_jobs_that_nobody_has_begun(make_place: Callable[..., Place]) -> None:
    place = make_place()
    place.host.model = None
    place.shards(1)
    assert [refuse(place).error_code for _ in range(MAX_REFUSALS)] == [None] * (MAX_REFUSALS - 1) + [
        "model_unavailable"
    ]
    assert "no worker could load" in str(place.store.jobs()[0].error_message)
    assert "too large" in str(place.store.jobs()[0].error_message)


def test_a_job_that_another_worker_runs_does_not_fail_for_what_this_one_cannot_load(
    make_place: Callable[..., Place],
) -> None:
    place = make_place()
    place.host.model = None
    ids = place.shards(2)
    assert place.store.claim(ids[0], "another") is not None
    for _ in range(MAX_REFUSALS + 2):
        assert refuse(place).error_code is None


def test_case_I006_the_error_budget_counts_every_workers_rows(make_place: Callable[..., Place]) -> None:
    place = make_place({Tier.NORMAL: 1})
    ids = place.shards(3, max_failed_rows=5)
    for shard_id in ids[:2]:  # another worker's
        lease = place.store.claim(shard_id, "other")
        assert lease is not None
        place.store.commit_shard(lease, make_result(lease, failed=3))
    place.fleet.turn()
    assert place.crew.active
    place.fleet._budget._look_at = 0.0
    place.fleet.turn()
    (job,) = place.store.jobs()
    assert (job.error_code, job.status) == ("error_budget_exceeded", JobStatus.IN_PROGRESS)
    place.crew.end_all()
