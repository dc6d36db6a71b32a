import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.states import Tier
from nightmill.tier_weights import TierWeights
from nightmill_worker.engine.growth import Candidate, GrowthRound, Holders, Margin, grid, reserve_pages
from nightmill_worker.engine.length_model import LengthDistribution
from nightmill_worker.engine.survival_tables import SurvivalTables


def holders(rows, known=True):
    """Rows of (own tokens, generated, limit)."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Holders(
        own_tokens=table[:, 0],
        generated=table[:, 1],
        limits=table[:, 2],
        is_known=np.broadcast_to(np.array(known), len(table)).copy(),
        distribution=np.zeros(len(table), np.int64),
    )


def replay(rows, page_size):
    """Pages held in each step until all have ended."""
    steps = max((limit - generated for _, generated, limit in rows), default=0)
    return [
        sum(-(-(own + k) // page_size) for own, generated, limit in rows if limit - generated > k) for k in range(steps)
    ]


def begin(running, model=None, *, page_size=16, shared=0, z=1.5, horizon=1000):
    tables = SurvivalTables([model] if model else [])
    return GrowthRound(page_size, running, tables, shared_pages=shared, z=z, grid=grid(horizon))


def admit(running, candidates, model=None, *, known=True, limit, slots=1000, **options):
    """Indices of the candidates that get in, in order, as the scheduler asks for them."""
    admissions = begin(running, model, **options)
    admitted = []
    for index, (own, generated, end) in enumerate(candidates):
        candidate = Candidate(own_tokens=own, generated=generated, limit=end, is_known=known, distribution=0)
        if len(admitted) < slots and admissions.fits(candidate, limit):
            admissions.add(candidate)
            admitted.append(index)
    return admitted


ROWS = st.tuples(st.integers(0, 90), st.integers(0, 5), st.integers(6, 70))


@settings(deadline=None)
@given(st.lists(ROWS, max_size=12), st.sampled_from([1, 3, 16, 64]))
def test_the_predicted_peak_of_known_lengths_is_the_true_one(rows, page_size):
    assert begin(holders(rows), page_size=page_size, z=9.0).peak == max(replay(rows, page_size), default=0)


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
    admitted = admit(holders(running), candidates, page_size=page_size, limit=limit, slots=slots)
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


@pytest.fixture(scope="module")
def model():
    model = LengthDistribution(1000)
    rng = np.random.default_rng(0)
    for length in np.minimum(rng.geometric(1 / 100, 3000), 1000):
        model.observe(int(length))
    model.fit(np.zeros(0, np.int64))
    return model


def test_unknown_lengths_admit_far_more_than_reserving_max_tokens(model):
    admitted = admit(holders([]), [(100, 0, 1000)] * 100, model, known=False, limit=1000)
    assert len(admitted) > 2 * (1000 // -(-1100 // 16))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_admitted_of_unknown_length_nearly_always_fits(model, seed):
    rng = np.random.default_rng(seed)
    admitted = admit(holders([]), [(100, 0, 1000)] * 100, model, known=False, limit=1000, z=3.0)
    over = 0
    for _ in range(100):
        lengths = np.minimum(rng.geometric(1 / 100, len(admitted)), 1000)
        over += max(replay([(100, 0, int(n)) for n in lengths], 16)) > 1000
    assert len(admitted) > 60
    assert over <= 5


def test_a_larger_z_admits_less(model):
    candidates = [(100, 0, 1000)] * 130
    counts = [len(admit(holders([]), candidates, model, known=False, limit=1000, z=z)) for z in (0.0, 1.5, 4.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2]


def test_shared_pages_count_once_and_throughout():
    assert len(admit(holders([]), [(16, 0, 1)] * 12, limit=10)) == 10
    assert len(admit(holders([]), [(16, 0, 1)] * 12, limit=10, shared=3)) == 7


def test_lent_pages_are_the_borrowers_once_the_lender_has_ended():
    lender = holders([(160, 0, 5)])  # 10 pages, and one more from its second token on
    for ends, fits in ((5, 12), (100, 12)):
        borrower = Candidate(
            own_tokens=16, generated=0, limit=9, is_known=True, distribution=0, lent_pages=10, lender_ends=ends
        )
        # With the lender 11 + 2; afterwards its ten pages are still held by the borrower: 10 + 2.
        assert begin(lender).fits(borrower, 13)
        assert not begin(lender).fits(borrower, fits)
    late = Candidate(own_tokens=16, generated=0, limit=900, is_known=True, distribution=0, lent_pages=10, lender_ends=5)
    assert begin(lender).fits(late, 10 + -(-915 // 16))
    assert not begin(lender).fits(late, 10 + -(-915 // 16) - 1)


def test_mixed_known_and_unknown_are_both_counted(model):
    known, unknown = [(160, 0, 64)] * 20, [(160, 0, 1000)] * 20
    both = begin(holders(known + unknown, known=[True] * 20 + [False] * 20), model, z=0.0).peak
    alone = begin(holders(known), model, z=0.0).peak
    assert alone == 20 * 14
    # Half of the unknown ones, about, are still there when the known ones end.
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
    assert [reserve_pages(tier, 5000, 0.04, TierWeights()) for tier in Tier] == [0, 168, 200]


LONG_ROWS = st.tuples(st.integers(0, 90), st.integers(0, 5), st.integers(6, 900))


@settings(deadline=None, max_examples=300)
@given(
    rows=st.lists(st.tuples(ROWS, st.booleans()), min_size=1, max_size=10),
    candidates=st.lists(st.tuples(LONG_ROWS, st.booleans()), max_size=5),
    hint=st.one_of(st.none(), st.integers(0, 80)),
    limit=st.integers(3, 60),
    page_size=st.sampled_from([3, 16]),
)
def test_a_candidate_fits_when_the_peak_with_it_does(model, rows, candidates, hint, limit, page_size):
    tables = SurvivalTables([model])

    def begin_with(taken, first):
        running = holders([row for row, _ in taken], known=[known for _, known in taken])
        return GrowthRound(page_size, running, tables, shared_pages=2, z=1.5, grid=grid(1000), hint=first)

    admissions = begin_with(rows, hint)
    for (own, generated, end), known in candidates:
        candidate = Candidate(own_tokens=own, generated=generated, limit=end, is_known=known, distribution=0)
        rows = [*rows, ((own, generated, end), known)]
        peak = begin_with(rows, None).peak
        if abs(peak - limit) > 1e-6:
            assert admissions.fits(candidate, limit) == (peak <= limit)
        if peak > limit or not admissions.fits(candidate, limit):
            rows = rows[:-1]
            continue
        admissions.add(candidate)
