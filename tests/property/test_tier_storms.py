"""Random tier storms: see tier_storm.py for what they watch. Planted bugs show that they can fail."""

from typing import Any

import pytest
from tests.property.tier_storm import TierStorm

from nightmill.errors import EngineError
from nightmill.states import Tier
from nightmill_worker.engine.fairness import TierShares
from nightmill_worker.engine.preemption import Preemption
from nightmill_worker.engine.sequence import Sequence
from nightmill_worker.engine.victims import VictimChooser


def run_storms(seeds: range, *, ahead: bool = False) -> None:
    for seed in seeds:
        TierStorm(seed, ahead=ahead).run()


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_tier_storms(first):
    run_storms(range(first, first + 10))


@pytest.mark.parametrize("first", [2000, 2010])
def test_tier_storms_over_steps_that_overlap(first):
    run_storms(range(first, first + 10), ahead=True)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_a_thousand_tier_storms(first, ahead):
    run_storms(range(first, first + 100), ahead=ahead)


def strict_tiers(patch: pytest.MonkeyPatch) -> None:
    """No ageing: higher tiers always go first, and take whatever they like."""
    patch.setattr(TierShares, "is_starving", lambda self, tier: False)
    patch.setattr(TierShares, "is_below_share", lambda self, tier: False)


def no_protection(patch: pytest.MonkeyPatch) -> None:
    """The same sequence is taken off again and again."""
    patch.setattr(VictimChooser, "_is_protected", lambda self, rows: rows < 0)


def polite_high(patch: pytest.MonkeyPatch) -> None:
    """High waits for a slot to come free."""
    patch.setattr(TierShares, "may_preempt", lambda self, tier, victim: False)


def lose_a_drawn_token(patch: pytest.MonkeyPatch) -> None:
    """A victim forgets what it drew first. (What it drew last would be drawn again, and be the same.)"""
    take_off = Preemption.take_off

    def forgetful(self: Preemption, sequence: Sequence, *rest: Any) -> None:
        take_off(self, sequence, *rest)
        if sequence.request.tier is not Tier.HIGH and not self.is_saved(sequence):
            sequence.generated = sequence.generated[1:]

    patch.setattr(Preemption, "take_off", forgetful)


@pytest.mark.parametrize("plant", [strict_tiers, no_protection, polite_high, lose_a_drawn_token])
def test_planted_bug_is_caught_by_a_storm(plant: Any, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises(EngineError, match="invariant broken"):
        run_storms(range(300))
