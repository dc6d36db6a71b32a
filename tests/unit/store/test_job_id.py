import re
from datetime import UTC, datetime, timedelta, timezone

from nightmill.job_id import new_job_id


def test_ids_are_short_and_readable() -> None:
    assert re.fullmatch(r"job-20261129-[0-9a-hjkmnp-tv-z]{8}", new_job_id(datetime(2026, 11, 29, 12, tzinfo=UTC)))


def test_ids_sort_by_time_within_a_day_and_over_days() -> None:
    begin = datetime(2026, 11, 29, tzinfo=UTC)
    moments = [begin + timedelta(seconds=s) for s in (0, 0.1, 59, 3600, 43200, 86399.99, 86400, 86401)]
    ids = [new_job_id(moment) for moment in moments]
    assert ids == sorted(ids)


def test_the_day_is_utc() -> None:
    late = datetime(2026, 11, 29, 23, tzinfo=timezone(timedelta(hours=-5)))
    assert new_job_id(late).startswith("job-20261130-")


def test_ids_of_one_moment_differ() -> None:
    moment = datetime(2026, 11, 29, tzinfo=UTC)
    assert len({new_job_id(moment) for _ in range(100)}) > 90  # 2**20 to choose from
