"""How torch's OpenMP threads wait for each other. Imports no torch: what it sets is read when torch is loaded."""

import os

# Times a thread looks for work before it sleeps: some 20 µs, about a gap between two operators. GNU OpenMP's own
# default is some ms, which on processors shared with other work stops the very thread that is waited for: measured
# on 2 busy cores, a decode step of 64 rows took 1,184 ms with the default, 362 ms with this, 420 ms never spinning.
_SPIN_COUNT = "1000"
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Let waiting threads sleep soon, unless the environment says how to wait. Call it before importing torch."""
    if not any(name in os.environ for name in _SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT
