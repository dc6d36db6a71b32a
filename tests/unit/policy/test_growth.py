import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.states import Tier
from nightmill_worker.engine.growth import GrowthGate, Holders, Margin, reserve_pages
from nightmill_worker.engine.length_model import LengthDistribution


def holders(rows, known=True):
    """Rows of (own tokens, generated, limit)."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Holders(
        own_tokens=table[:, 0],
        generated=table[:, 1],
        limits=table[:, 2],
        is_known=np.full(len(table), known),
        distribution=np.zeros(len(table), np.int64),
    )


def replay(rows, page_size):
    """Pages held in each step until all have ended."""
    steps = max((limit - generated for _, generated, limit in rows), default=0)
    return [
        sum(-(-(own + k) // page_size) for own, generated, limit in rows if limit - generated > k) for k in range(steps)
    ]


ROWS = st.tuples(st.integers(0, 90), st.integers(0, 5), st.integers(6, 70))


@settings(deadline=None)
@given(st.lists(ROWS, max_size=12), st.sampled_from([1, 3, 16, 64]))
def test_the_predicted_peak_of_known_lengths_is_the_true_one(rows, page_size):
    peak = GrowthGate(page_size).peak(holders(rows), [], shared_pages=0, z=9.0)
    assert peak == max(replay(rows, page_size), default=0)


@settings(deadline=None)
@given(
    st.lists(ROWS, max_size=8),
    st.lists(ROWS, min_size=1, max_size=8),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 80),
    st.integers(0, 9),
)
def test_known_lengths_never_outgrow_the_pool_and_none_is_refused_that_fits(
    running, candidates, page_size, limit, slots
):
    if max(replay(running, page_size), default=0) > limit:
        return
    admitted = GrowthGate(page_size).admit(
        holders(running),
        holders(candidates),
        [],
        shared_pages=0,
        slack_pages=0,
        limits=np.full(len(candidates), limit),
        z=1.5,
        max_admitted=slots,
    )
    inside = list(running)
    for index, candidate in enumerate(candidates):
        if len(inside) - len(running) == slots:
            assert index not in admitted
            continue
        fits = max(replay([*inside, candidate], page_size)) <= limit
        assert (index in admitted) == fits
        if fits:
            inside.append(candidate)
    assert max(replay(inside, page_size), default=0) <= limit


def admit_all(running, candidates, model, *, limit, z=1.5, slots=100, shared=0, slack=0):
    return GrowthGate(16).admit(
        running,
        candidates,
        [model],
        shared_pages=shared,
        slack_pages=slack,
        limits=np.full(len(candidates), limit),
        z=z,
        max_admitted=slots,
    )


@pytest.fixture
def model():
    model = LengthDistribution(1000)
    rng = np.random.default_rng(0)
    for length in np.minimum(rng.geometric(1 / 100, 3000), 1000):
        model.observe(int(length))
    model.fit(np.zeros(0, np.int64))
    return model


def test_unknown_lengths_admit_far_more_than_reserving_max_tokens(model):
    candidates = holders([(100, 0, 1000)] * 100, known=False)
    admitted = admit_all(holders([]), candidates, model, limit=1000)
    assert len(admitted) > 2 * (1000 // -(-1100 // 16))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_admitted_of_unknown_length_nearly_always_fits(model, seed):
    rng = np.random.default_rng(seed)
    admitted = admit_all(holders([]), holders([(100, 0, 1000)] * 200, known=False), model, limit=1000, z=3.0, slots=200)
    over = 0
    for _ in range(100):
        lengths = np.minimum(rng.geometric(1 / 100, len(admitted)), 1000)
        over += max(replay([(100, 0, int(n)) for n in lengths], 16)) > 1000
    assert len(admitted) > 60
    assert over <= 5


def test_a_larger_z_admits_less(model):
    candidates = holders([(100, 0, 1000)] * 300, known=False)
    counts = [len(admit_all(holders([]), candidates, model, limit=1000, z=z, slots=300)) for z in (0.0, 1.5, 4.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2]


def test_shared_pages_and_slack_count_once_and_throughout(model):
    candidates = holders([(16, 0, 1)] * 10)
    assert len(admit_all(holders([]), candidates, model, limit=10)) == 10
    assert len(admit_all(holders([]), candidates, model, limit=10, shared=3)) == 7
    assert len(admit_all(holders([]), candidates, model, limit=10, shared=3, slack=2)) == 5


def test_a_candidate_that_does_not_fit_does_not_stop_the_smaller_one_behind_it(model):
    assert admit_all(holders([]), holders([(64, 0, 1), (800, 0, 5), (96, 0, 1)]), model, limit=10) == [0, 2]


def test_mixed_known_and_unknown_are_both_counted(model):
    known, unknown = [(160, 0, 64)] * 20, [(160, 0, 1000)] * 20
    table = np.array(known + unknown, np.int64)
    running = Holders(
        own_tokens=table[:, 0],
        generated=table[:, 1],
        limits=table[:, 2],
        is_known=np.arange(40) < 20,
        distribution=np.zeros(40, np.int64),
    )
    gate = GrowthGate(16)
    both = gate.peak(running, [model], shared_pages=0, z=0.0)
    alone = gate.peak(holders(known), [model], shared_pages=0, z=0.0)
    assert alone == 20 * 14
    # Half of the unknown ones, at least, are still there when the known ones end.
    assert alone + 20 * 14 * 0.4 < both <= alone + 20 * 15


def test_the_margin_learns_from_preemptions_and_forgets_slowly():
    margin = Margin()
    assert margin.z == 1.5
    margin.on_memory_preemption()
    assert margin.z == 1.75
    for _ in range(100):
        margin.on_step()
    assert 1.70 < margin.z < 1.75
    for _ in range(200_000):
        margin.on_step()
    assert margin.z == pytest.approx(Margin.FLOOR)
    for _ in range(1000):
        margin.on_memory_preemption()
    assert margin.z == Margin.CEILING


def test_only_lower_tiers_leave_a_reserve():
    assert [reserve_pages(tier, 5000) for tier in Tier] == [0, 200, 200]
