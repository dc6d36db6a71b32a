"""Thousands of rows wait in the engine: its planner sees them, and a crash loses none of them."""

import random
from dataclasses import replace

import pytest
from tests.integration.conftest import Bench

from nightmill.records import EngineOptions, JobOptions
from nightmill.sampling import SamplingParams
from nightmill_worker.supervisor import FeedLimits

GROUPS, MEMBERS, PAGE = 64, 32, 16
PREFIX = 4 * PAGE


def shuffled_groups() -> list[str]:
    prompts = []
    for group in range(GROUPS):
        prefix = [100 + group, *(2 + (group * 7 + i) % 90 for i in range(PREFIX - 1))]
        prompts += [" ".join(map(str, [*prefix, 200 + member, 300 + member])) for member in range(MEMBERS)]
    random.Random(7).shuffle(prompts)
    return prompts


@pytest.fixture
def full_lookahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine starts when it has everything, however slow the machine is."""
    limits = replace(FeedLimits.of(16, GROUPS * MEMBERS - 16), quiet_s=600.0, prime_s=600.0)
    monkeypatch.setattr(FeedLimits, "of", lambda *_: limits)


@pytest.mark.usefixtures("full_lookahead")
def test_case_I067_shuffled_groups_are_computed_once_each(bench: Bench) -> None:
    bench.write(shuffled_groups(), row_group_size=500)
    # Two prefixes, a page for each running row's own tokens, and the null page.
    pages = 2 * PREFIX // PAGE + 16 + 1
    result = bench.run(
        fake=f'{{"num_pages": {pages}, "page_size": {PAGE}}}',
        in_process=False,
        sampling=SamplingParams(max_tokens=6),
        engine=EngineOptions(max_num_seqs=16),
        options=JobOptions(shard_rows=500),
    )
    assert result.summary.rows_ok == GROUPS * MEMBERS
    best = GROUPS * (MEMBERS - 1) * PREFIX
    assert result.summary.cached_tokens >= 0.99 * best
    assert [row["row_index"] for row in bench.rows()] == list(range(GROUPS * MEMBERS))
