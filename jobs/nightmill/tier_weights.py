"""What each tier is guaranteed of the computed tokens, as it is configured."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nightmill.errors import ConfigError
from nightmill.states import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class TierWeights:
    """Shares of the tiers, relative to their sum. A tier with 0 runs when the others leave something.

    Raises:
        ConfigError: a weight is negative or no number, or all are 0.
    """

    high: float = 80.0
    normal: float = 15.0
    low: float = 5.0

    def __post_init__(self) -> None:
        weights = [weight for _, weight in self]
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
            raise ConfigError(f"tier shares must be numbers of at least 0 and not all 0, not {self}")

    def __iter__(self) -> Iterator[tuple[Tier, float]]:
        return iter([(tier, float(getattr(self, tier.value))) for tier in Tier])

    def __str__(self) -> str:
        return ",".join(f"{tier.value}={weight:g}" for tier, weight in self)

    @classmethod
    def parse(cls, text: str) -> "TierWeights":
        """Read `high=80,normal=15,low=5`; tiers left out keep their default.

        Raises:
            ConfigError: it does not read like that.
        """
        weights: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in [tier.value for tier in Tier] or name in weights:
                raise ConfigError(_SYNTAX.format(text=text))
            try:
                weights[name] = float(value)
            except ValueError as error:
                raise ConfigError(_SYNTAX.format(text=text)) from error
        return cls(**weights)

    def fraction(self, tier: Tier) -> float:
        """The tier's share of all, in [0, 1]."""
        total = sum(weight for _, weight in self)
        return float(getattr(self, tier.value)) / total


DEFAULT_WEIGHTS = TierWeights()
_SYNTAX = "tier shares read like high=80,normal=15,low=5, each tier once at most, not {text!r}"
