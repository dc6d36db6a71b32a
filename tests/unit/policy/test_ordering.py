import random
from collections import Counter
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill_worker.engine.ordering import ArrivalQueue, PlannedQueue


def drain(queue, batch=1):
    order = []
    while queue:
        for key in queue.head(batch):
            queue.remove(key)
            order.append(key)
    return order


def group_rows(groups, rows, seed=0):
    """(key, path, group) of a shuffled file: two pages shared by the group, one of the row's own."""
    items = [
        (g * rows + r, (10 * g + 1, 10 * g + 2, 10**6 + g * rows + r), g) for g in range(groups) for r in range(rows)
    ]
    random.Random(seed).shuffle(items)
    return items


def test_groups_of_a_shuffled_file_run_together():
    queue = PlannedQueue(slots=16)
    rows = group_rows(64, 32)
    for key, path, _ in rows:
        queue.add(key, "job", path, 48, 10)
    group = {key: g for key, _, g in rows}
    runs = [g for g, _ in groupby(drain(queue), key=group.get)]
    assert sorted(runs) == list(range(64))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(1, 99)), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_every_prefix_is_left_only_once_and_every_key_comes_once(specs, slots, batch):
    uids: dict[tuple[int, ...], int] = {}
    paths = [
        tuple(uids.setdefault(tuple(pages[: i + 1]), len(uids) + 1) for i in range(len(pages))) for pages, _ in specs
    ]
    queue = PlannedQueue(slots=slots)
    for key, (path, (_, expected)) in enumerate(zip(paths, specs, strict=True)):
        queue.add(key, "job", path, 16 * len(path) + 1, expected)
    order = drain(queue, batch)
    assert sorted(order) == list(range(len(specs)))
    for prefix in {path[:n] for path in paths for n in range(1, len(path) + 1)}:
        inside = [paths[key][: len(prefix)] == prefix for key in order]
        assert len([value for value, _ in groupby(inside) if value]) == 1, (
            f"prefix {prefix} was left and taken up again"
        )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 999)), min_size=1, max_size=60))
def test_same_requests_same_order(specs):
    orders = []
    for _ in range(2):
        queue = PlannedQueue(slots=4)
        for key, (prompt, expected) in enumerate(specs):
            queue.add(key, "job", (key + 1,), prompt, expected)
        orders.append(drain(queue, 3))
    assert orders[0] == orders[1]


def test_longest_first_when_the_end_is_in_sight():
    queue = PlannedQueue(slots=64)
    for key, expected in enumerate([5, 90, 20, 300, 7]):
        queue.add(key, "job", (key + 1,), 100, expected)
    assert drain(queue) == [3, 1, 2, 4, 0]


def test_longest_first_inside_a_group():
    queue = PlannedQueue(slots=64)
    for key, expected in enumerate([5, 90, 20]):
        queue.add(key, "job", (1, 10 + key), 100, expected)
    queue.add(9, "job", (2,), 100, 400)
    assert drain(queue) == [9, 1, 2, 0]


def test_compute_heavy_and_memory_heavy_alternate_far_from_the_end():
    queue = PlannedQueue(slots=2)
    kinds = {}
    for key in range(400):
        long_prompt = key % 2 == 0
        kinds[key] = long_prompt
        queue.add(key, "job", (key + 1,), 2000 if long_prompt else 50, 20 if long_prompt else 60)
    order = drain(queue)
    prompt_ahead, worst = 0.0, 0.0
    mix = (200 * 2000 + 200 * 50) / (200 * 20 + 200 * 60)
    for key in order[:380]:
        prompt_ahead += 2000 - mix * 20 if kinds[key] else 50 - mix * 60
        worst = max(worst, abs(prompt_ahead))
    assert worst <= 2 * (2000 + mix * 60)


def test_an_overtaken_request_goes_next_after_so_many_others():
    queue = PlannedQueue(slots=1, patience=100)
    queue.add(-1, "job", (1, 9), 50, 50)
    queue.add(0, "job", (2,), 50, 50)  # of no group, and the group that runs never ends
    order = []
    for key in range(1, 600, 2):
        queue.add(key, "job", (1, key + 10), 500, 10)
        queue.add(key + 1, "job", (1, key + 11), 10, 500)
        taken = queue.head(1)[0]
        queue.remove(taken)
        order.append(taken)
    assert 0 not in order[:90]
    assert 0 in order[:110]


@pytest.mark.parametrize("shared", [True, False], ids=["one prefix", "no prefix"])
def test_of_an_endless_stream_nobody_is_left_behind(shared: bool):
    """W1's shape: what lies between the extremes must not wait until the shards of it are all of the memory."""
    rng, window = random.Random(3), 512
    queue = PlannedQueue(slots=64)
    overtaken = []
    for key in range(8000):
        path = (1, 2, 3, 1000 + key) if shared else (1000 + key,)
        queue.add(key, "job", path, 384 + rng.randint(16, 96), rng.randint(8, 64))
        if len(queue) > window:
            taken = queue.head(1)[0]
            queue.remove(taken)
            overtaken.append(key - taken)
    assert max(overtaken) < 2 * window


def test_jobs_of_a_tier_share_evenly():
    queue = PlannedQueue(slots=8)
    for key in range(3000):
        queue.add(key, "huge", (key + 1,), 100, 100)
    for key in range(3000, 3050):
        queue.add(key, "small", (key + 1,), 300, 100)
    taken = Counter()
    for _ in range(150):
        key = queue.head(1)[0]
        queue.remove(key)
        taken["small" if key >= 3000 else "huge"] += 1
    assert taken == {"huge": 100, "small": 50}  # 200 tokens each against 400


def test_settled_service_moves_the_turn():
    queue = PlannedQueue(slots=8)
    for key in range(10):
        queue.add(key, "a" if key < 5 else "b", (key + 1,), 10, 10)
    queue.settle("a", 45)
    order = drain(queue)
    assert order[:3] == [5, 6, 7]


def test_the_head_is_stable_until_it_is_removed():
    queue = PlannedQueue(slots=8)
    for key in range(10):
        queue.add(key, "a", (key + 1,), 10, 10)
    head = queue.head(4)
    queue.add(99, "a", (999,), 10, 10_000)
    assert queue.head(4) == head
    queue.remove(head[1])
    assert queue.head(3) == [head[0], *head[2:]]


@pytest.mark.parametrize("make", [lambda: PlannedQueue(slots=4), ArrivalQueue], ids=["planned", "arrival"])
@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "cancel", "admit"]), st.integers(0, 10**6)), max_size=60))
def test_queues_hold_what_was_added_and_not_removed(make, operations):
    queue, present = make(), {}
    for key, (what, number) in enumerate(operations):
        if what == "add":
            queue.add(key, f"job{number % 3}", (number % 5, 100 + key), number % 100 + 1, number % 50 + 1)
            present[key] = True
        elif present and what == "cancel":
            victim = sorted(present)[number % len(present)]
            queue.remove(victim)
            del present[victim]
        elif present:
            key = queue.head(1 + number % 3)[0]
            queue.remove(key)
            del present[key]
        assert len(queue) == len(present)
        assert set(queue.head(1000)) == set(present)


def test_arrival_order_is_arrival_order():
    queue = ArrivalQueue()
    for key in (3, 1, 2):
        queue.add(key, "j", (), 1, key)
    assert drain(queue, 2) == [3, 1, 2]
