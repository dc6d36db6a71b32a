"""Job ids: `job-20261129-g4kz7m2q`. They sort by time, read well, and do not collide."""

import secrets
from datetime import UTC, datetime

# Crockford's base 32: no i, l, o, u, and in the order of ASCII.
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_TIME_DIGITS = 4  # a day in 32**4 ticks of 82 ms
_RANDOM_DIGITS = 4


def new_job_id(at: datetime | None = None) -> str:
    """A fresh id. The clock only orders ids for the eye; nothing is decided by it."""
    at = (at or datetime.now(UTC)).astimezone(UTC)
    seconds = (at - at.replace(hour=0, minute=0, second=0, microsecond=0)).total_seconds()
    tick = int(seconds / 86400 * 32**_TIME_DIGITS)
    time_digits = "".join(_ALPHABET[tick >> 5 * place & 31] for place in reversed(range(_TIME_DIGITS)))
    random_digits = "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_DIGITS))
    return f"job-{at:%Y%m%d}-{time_digits}{random_digits}"
