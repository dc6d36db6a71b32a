"""The search for the row that ends the engine, without an engine."""

import math

from hypothesis import given
from hypothesis import strategies as st

from nightmill_worker.isolation import CONVICT_AFTER_KILLS, Isolation


def search(suspects: list[int], culprits: set[int]) -> tuple[list[int], set[int], int]:
    """Play the engine: a window that holds a culprit crashes. Returns convicted, still to run, crashes."""
    isolation = Isolation()
    convicted: list[int] = []
    crashes = 1
    released = set(isolation.crashed(suspects).cleared)
    while isolation.active:
        window = isolation.window
        if culprits & set(window):
            verdict = isolation.crashed(window)
            crashes += 1
            released |= set(verdict.cleared)
            convicted += [verdict.culprit] if verdict.culprit is not None else []
        else:
            isolation.settled(window)
    return convicted, released, crashes


@given(st.data())
def test_one_culprit_is_found_within_the_bound(data: st.DataObject) -> None:
    suspects = data.draw(st.lists(st.integers(0, 10_000), min_size=1, max_size=300, unique=True))
    culprit = data.draw(st.sampled_from(suspects))
    convicted, _, crashes = search(suspects, {culprit})
    assert convicted == [culprit]
    assert crashes <= 2 + math.ceil(math.log2(len(suspects)))


@given(st.data())
def test_nobody_innocent_is_convicted(data: st.DataObject) -> None:
    suspects = data.draw(st.lists(st.integers(0, 10_000), min_size=1, max_size=100, unique=True))
    culprits = set(data.draw(st.lists(st.sampled_from(suspects), max_size=5)))
    convicted, released, _ = search(suspects, culprits)
    assert set(convicted) <= culprits
    assert culprits <= set(convicted) | released  # the others run again, and crash again


def test_a_first_crash_with_one_request_inside_convicts_nobody() -> None:
    isolation = Isolation()
    assert isolation.crashed([7]).culprit is None
    assert isolation.window == (7,)
    assert isolation.crashed([7]).culprit == 7
    assert not isolation.active


def test_a_kill_alone_convicts_nobody_but_a_third_one_does() -> None:
    isolation = Isolation()
    isolation.crashed([7, 8], is_kill=True)
    for _ in range(CONVICT_AFTER_KILLS - 1):
        assert isolation.crashed([7], is_kill=True).culprit is None
        assert isolation.window == (7,)
    assert isolation.crashed([7], is_kill=True).culprit == 7
    assert not isolation.active


def test_kills_of_one_row_are_not_counted_for_the_next() -> None:
    isolation = Isolation()
    isolation.crashed([7, 8], is_kill=True)
    isolation.settled([7])
    for number in (8, 9):
        for _ in range(CONVICT_AFTER_KILLS - 1):
            assert isolation.crashed([number], is_kill=True).culprit is None
        isolation.settled([number])
        isolation.crashed([9], is_kill=True)
    assert isolation.crashed([9]).culprit == 9, "a fault of its own convicts at once"


def test_case_I048_a_crash_without_culprit_clears_everybody() -> None:
    convicted, _, crashes = search(list(range(64)), set())
    assert convicted == []
    assert crashes == 1


def test_a_cancelled_window_does_not_stop_the_search() -> None:
    isolation = Isolation()
    isolation.crashed(range(8))
    isolation.settled(range(8))
    assert not isolation.active


def test_a_crash_while_idle_blames_nobody() -> None:
    isolation = Isolation()
    isolation.crashed([])
    assert not isolation.active
