"""Sampling parameters: the job's defaults, and a row's own values over them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from nightmill.errors import RowError, RowErrorCode

MAX_STOP_STRINGS = 16
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are drawn. Temperature below 1e-5 is greedy, ties to the lowest token id."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high):
                raise RowError(
                    RowErrorCode.INVALID_SAMPLING_PARAMS, f"{name} must be between {low} and {high}, not {value}"
                )
        if self.n != 1:
            raise RowError(
                RowErrorCode.INVALID_SAMPLING_PARAMS, f"n must be 1, not {self.n}: one row has one completion"
            )
        if not all(self.stop):
            raise _invalid("stop must not hold an empty string: it would end every completion before its first token")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _invalid(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS}")
        if not all(0 <= token_id <= MAX_TOKEN_ID for token_id in self.stop_token_ids):
            raise _invalid(f"stop_token_ids must lie between 0 and {MAX_TOKEN_ID}")
        if self.min_tokens > self.max_tokens:
            raise RowError(
                RowErrorCode.INVALID_SAMPLING_PARAMS,
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
            )

    @property
    def is_greedy(self) -> bool:
        """True when the highest logit is taken, whatever the seed."""
        return self.temperature < 1e-5


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-3, 100.0),
    "logprobs": (0, 20),
}
_INTEGERS = frozenset({"top_k", "max_tokens", "min_tokens", "seed", "n", "logprobs"})
_ALIASES = {"max_completion_tokens": "max_tokens"}
_NAMES = frozenset(f.name for f in fields(SamplingParams))


def merge_sampling(base: SamplingParams, override: Mapping[str, Any] | str | None) -> SamplingParams:
    """Apply a row's `sampling_params` (a mapping or a JSON object) over the job's.

    Null members are ignored: Arrow pads structs with keys a row never had.

    Raises:
        RowError: `invalid_sampling_params`, naming the key, for an unknown key, a wrong type or a value out of range.
    """
    if override is None:
        return base
    if isinstance(override, str):
        try:
            override = json.loads(override)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"sampling_params is not valid JSON: {error}") from error
        if override is None:
            return base
    if not isinstance(override, Mapping):
        raise _invalid(f"sampling_params must be an object, not {type(override).__name__}")
    changes: dict[str, Any] = {}
    for key, value in override.items():
        if value is None:
            continue
        name = _ALIASES.get(key, key)
        if name not in _NAMES:
            raise _invalid(f"unknown key {key!r}; known: {', '.join(sorted(_NAMES | set(_ALIASES)))}")
        if name in changes:
            raise _invalid(f"{key!r} and its alias are both given")
        changes[name] = _coerce(name, value)
    return replace(base, **changes) if changes else base


def _coerce(name: str, value: object) -> object:
    if name == "ignore_eos":
        if not isinstance(value, bool):
            raise _invalid(f"ignore_eos must be true or false, not {value!r}")
        return value
    if name == "stop":
        strings = (value,) if isinstance(value, str) else value
        if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
            raise _invalid("stop must be a string or a list of them")
        return tuple(strings)
    if name == "stop_token_ids":
        if not isinstance(value, (list, tuple)) or not all(_is_integer(i) for i in value):
            raise _invalid("stop_token_ids must be a list of token ids")
        return tuple(int(i) for i in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _invalid(f"{name} must be a number, not {value!r}")
    if name in _INTEGERS:
        # Arrow and JSON both turn integers into doubles when one row of a column has a fraction.
        if isinstance(value, float) and not (math.isfinite(value) and value.is_integer()):
            raise _invalid(f"{name} must be a whole number, not {value!r}")
        # vLLM and OpenAI write "all" as -1.
        return 0 if name == "top_k" and value == -1 else int(value)
    try:
        number = float(value)
    except OverflowError:  # JSON integers have no end
        number = math.inf
    if not math.isfinite(number):
        raise _invalid(f"{name} must be finite, not {value!r}")
    return number


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(message: str) -> RowError:
    return RowError(RowErrorCode.INVALID_SAMPLING_PARAMS, message)
