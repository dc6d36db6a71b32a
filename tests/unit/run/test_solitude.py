import threading
import time

from nightmill_worker.solitude import Solitude


def test_whoever_wants_to_be_alone_waits_for_the_others_and_lets_nobody_in() -> None:
    solitude = Solitude()
    assert solitude.enter()
    assert solitude.enter()
    granted: list[bool] = []
    inside = threading.Event()
    done = threading.Event()

    def search() -> None:
        with solitude.alone(lambda: True) as is_alone:
            granted.append(is_alone)
            inside.set()
            done.wait(30)
        solitude.leave()

    thread = threading.Thread(target=search)
    thread.start()
    while not solitude.is_wanted:
        time.sleep(0.001)
    assert not solitude.enter()
    assert not granted
    solitude.leave()
    assert inside.wait(30)
    assert granted == [True]
    assert not solitude.enter()
    with solitude.alone(lambda: True) as second:
        assert not second  # it would be charged for the deaths of the first one's search
    done.set()
    thread.join()
    assert solitude.enter()


def test_waiting_ends_with_the_reason_to_wait() -> None:
    solitude = Solitude()
    solitude.enter()
    solitude.enter()
    with solitude.alone(lambda: False) as is_alone:
        assert not is_alone
    assert solitude.enter()
