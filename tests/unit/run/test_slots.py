import threading
import time

from nightmill.states import Tier
from nightmill_worker.slots import TierSlots

LATER = time.monotonic() + 3600


def test_a_tier_never_has_more_than_its_slots_and_others_do_not_care() -> None:
    slots = TierSlots({Tier.HIGH: 1, Tier.LOW: 2})
    low = [slots.ask(Tier.LOW), slots.ask(Tier.LOW)]
    assert all(low)
    assert slots.ask(Tier.LOW) is None
    assert slots.ask(Tier.NORMAL) is None  # without a limit there is no slot
    assert slots.ask(Tier.HIGH) is not None
    assert slots.used == {Tier.HIGH: 1, Tier.NORMAL: 0, Tier.LOW: 2}


def test_a_slot_given_back_twice_is_one_slot() -> None:
    slots = TierSlots({Tier.LOW: 1})
    first = slots.ask(Tier.LOW)
    assert first is not None
    first.release()
    second = slots.ask(Tier.LOW)
    first.release()
    assert second is not None
    assert slots.ask(Tier.LOW) is None


def test_who_waits_goes_before_who_asks() -> None:
    slots = TierSlots({Tier.LOW: 1})
    held = slots.ask(Tier.LOW)
    assert held is not None
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(slots.wait(Tier.LOW, LATER)))
    waiter.start()
    while slots._waiting[Tier.LOW] == 0:
        time.sleep(0.001)
    held.release()
    assert slots.ask(Tier.LOW) is None
    waiter.join()
    assert got[0] is not None


def test_nobody_waits_past_the_deadline_or_the_end() -> None:
    slots = TierSlots({Tier.LOW: 0})
    assert slots.wait(Tier.LOW, time.monotonic()) is None
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(slots.wait(Tier.LOW, LATER)))
    waiter.start()
    slots.close()
    waiter.join()
    assert got == [None]


def test_an_extra_slot_goes_beyond_the_limit_and_counts() -> None:
    slots = TierSlots({Tier.LOW: 1})
    extra = slots.extra(Tier.LOW)
    assert slots.ask(Tier.LOW) is None
    extra.release()
    assert extra.wait_released(0)
    assert slots.ask(Tier.LOW) is not None
