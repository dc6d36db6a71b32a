"""Lengths of time as people write them: `90s`, `30m`, `12h`, `2d`; and as they read them: `1:02:03`."""

import re
from datetime import timedelta

MAX_DURATION_S = 100 * 365 * 86400
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(value: str | float | timedelta) -> float:
    """Seconds of `90s`, `1.5h`, a number of seconds or a timedelta.

    Raises:
        ValueError: it is none of these, not above zero, or longer than MAX_DURATION_S.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value).strip())
    seconds = float(match[1]) * _SECONDS[match[2] or "s"] if match else 0.0
    if not 0 < seconds <= MAX_DURATION_S:
        text = repr(value)
        raise ValueError(f"{text if len(text) <= 40 else text[:40] + '…'} is not a duration like 90s, 30m, 12h or 2d")
    return seconds


def clock(seconds: float | None) -> str:
    """`4:05`, `1:02:03`, `3 d 4:05:06`; `unknown` for None."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    short = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {short}" if days else short
