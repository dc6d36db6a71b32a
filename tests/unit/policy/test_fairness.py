import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.errors import ConfigError
from nightmill.states import Tier
from nightmill.tier_weights import TierWeights
from nightmill_worker.engine.fairness import JobShares, TierShares

HIGH, NORMAL, LOW = Tier.HIGH, Tier.NORMAL, Tier.LOW


def serve(shares: TierShares, wanting: set[Tier], steps: int, budget: int = 1000) -> dict[Tier, int]:
    """A strict scheduler: each step goes wholly to the first tier in order."""
    got = dict.fromkeys(Tier, 0)
    for _ in range(steps):
        tier = shares.order(wanting)[0]
        got[tier] += budget
        shares.account({tier: budget}, wanting)
    return got


@pytest.mark.parametrize(
    ("wanting", "expected"),
    [
        ({HIGH, NORMAL, LOW}, {HIGH: 0.80, NORMAL: 0.15, LOW: 0.05}),
        ({NORMAL, LOW}, {NORMAL: 0.95, LOW: 0.05}),
        ({HIGH, LOW}, {HIGH: 0.80, LOW: 0.20}),
        ({HIGH, NORMAL}, {HIGH: 0.80, NORMAL: 0.20}),
        ({LOW}, {LOW: 1.0}),
        (set(), {}),
    ],
)
def test_unused_share_flows_down(wanting, expected):
    owed = TierShares().entitlement(wanting)
    assert owed == pytest.approx(expected)


@settings(deadline=None)
@given(st.sets(st.sampled_from(list(Tier)), min_size=1), st.integers(1, 3000))
def test_no_tier_falls_below_its_share_over_a_window(wanting, steps):
    window = 50_000
    shares = TierShares(window_tokens=window)
    got = serve(shares, wanting, steps)
    for tier, fraction in shares.entitlement(wanting).items():
        if fraction == shares.share(tier):  # what flows down is no guarantee
            assert got[tier] >= shares.share(tier) * 1000 * steps - shares.share(tier) * window - 1000


def test_low_never_starves_under_endless_high_work():
    got = serve(TierShares(window_tokens=20_000), {HIGH, LOW}, 10_000)
    assert got[LOW] >= 0.05 * 10_000 * 1000 - 2000


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(list(Tier)), st.integers(0, 9999)), st.sets(st.sampled_from(list(Tier)))
        ),
        max_size=200,
    )
)
def test_deficits_stay_within_the_window(steps):
    shares = TierShares(window_tokens=10_000)
    for computed, wanting in steps:
        shares.account(computed, wanting)
        for tier in Tier:
            limit = 10_000 * shares.share(tier)
            assert -limit - 1e-6 <= shares.deficit(tier) <= 2 * limit + 1e-6
        assert sorted(shares.order(wanting)) == sorted(wanting)


def test_an_idle_tier_saves_nothing_up():
    shares = TierShares()
    serve(shares, {HIGH, LOW}, 20)
    assert shares.deficit(LOW) > 0
    shares.account({HIGH: 1000}, {HIGH})
    assert shares.deficit(LOW) == 0


def test_a_higher_tier_takes_from_a_lower_one_only_while_that_has_its_share():
    shares = TierShares()
    shares.account({LOW: 8192}, {LOW})
    assert shares.may_preempt(HIGH, LOW)
    shares.account({HIGH: 16384}, {HIGH, LOW})
    assert shares.may_preempt(HIGH, LOW)  # who has had the engine for itself gives way for a while
    shares.account({HIGH: 16384}, {HIGH, LOW})
    assert not shares.may_preempt(HIGH, LOW)
    shares.account({LOW: 8192}, {HIGH, LOW})
    assert shares.may_preempt(HIGH, LOW)


def test_a_tier_that_is_served_in_full_is_owed_no_more():
    """Few urgent rows decode among many others: that they use little of their share is nobody's debt."""
    shares = TierShares(window_tokens=10_000)
    for _ in range(500):
        shares.account({HIGH: 0, NORMAL: 10, LOW: 90}, {LOW})
    assert not shares.is_starving(NORMAL)
    assert shares.deficit(NORMAL) <= 0


@pytest.mark.parametrize("tier", Tier)
def test_nobody_preempts_its_own_tier_or_a_higher_one(tier):
    shares = TierShares()
    assert not any(shares.may_preempt(tier, victim) for victim in Tier if victim.rank <= tier.rank)


def test_shares_are_read_from_text():
    assert TierWeights.parse("high=60, low=40") == TierWeights(high=60, normal=15, low=40)
    assert TierWeights.parse(str(TierWeights(high=1, normal=0, low=0.5))) == TierWeights(high=1, normal=0, low=0.5)
    assert TierShares(TierWeights(high=3, normal=0, low=1)).share(LOW) == 0.25


@pytest.mark.parametrize(
    "bad", ["", "high", "high=", "high=x", "urgent=3", "high=1,high=2", "high=-1", "low=nan", "high=0,normal=0,low=0"]
)
def test_impossible_shares_are_refused(bad):
    with pytest.raises(ConfigError, match="tier shares"):
        TierWeights.parse(bad)


def test_jobs_are_served_evenly_whatever_their_request_sizes():
    jobs = JobShares()
    cost = {"a": 7, "b": 100, "c": 31}
    served = dict.fromkeys(cost, 0)
    for job in cost:
        jobs.join(job)
    for _ in range(3000):
        job = jobs.next()
        served[job] += cost[job]
        jobs.charge(job, cost[job])
    assert max(served.values()) - min(served.values()) <= max(cost.values())


def test_a_newcomer_starts_level_and_a_returning_job_keeps_its_debt():
    jobs = JobShares()
    jobs.join("old")
    for _ in range(10):
        jobs.charge(jobs.next(), 100)
    jobs.next()
    jobs.join("new")
    turns = []
    for _ in range(4):
        turns.append(jobs.next())
        jobs.charge(turns[-1], 100)
    assert turns.count("new") == 2
    jobs.charge("old", 1000)
    jobs.leave("old")
    jobs.join("old")
    assert jobs.next() == "new"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("jlc"), st.sampled_from("abc"), st.integers(1, 50)), max_size=100))
def test_next_is_always_the_least_served_that_waits(operations):
    jobs = JobShares()
    for what, job, tokens in operations:
        if what == "j":
            jobs.join(job)
        elif what == "l":
            jobs.leave(job)
        else:
            jobs.charge(job, tokens)
        chosen = jobs.next()
        assert (chosen is None) == (len(jobs) == 0)
        if chosen is not None:
            assert jobs._served[chosen] == min(jobs._served.values())
