"""Profiles: `default` fits in a test run, `long` is for `make test-long` (or HYPOTHESIS_PROFILE=long)."""

import os

from hypothesis import HealthCheck, settings

_QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

settings.register_profile("default", deadline=None, max_examples=60, suppress_health_check=_QUIET, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=3000, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
