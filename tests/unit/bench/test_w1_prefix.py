"""W1's own rows through the engine's scheduler: the 384 shared tokens are computed once, by one row."""

from pathlib import Path

import pytest

from nightmill_worker.bench.own_engine import continuous
from nightmill_worker.bench.workload import make_workloads
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.feed.tokenizer import Tokenizer

pytestmark = pytest.mark.demo_model


def test_the_shared_prompt_is_computed_once(demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(demo_model_dir)
    w1 = make_workloads(lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.decode)["W1"]
    runner = FakeRunnerConfig(num_pages=6000, vocab_size=49152).build()
    measured = continuous(runner, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=8192).run(w1)
    own = sum(len(row.prompt_ids) - 384 + row.max_tokens - 1 for row in w1.rows)
    assert measured.rows_wrong_length == 0
    assert measured.detail["computed_tokens"] == 384 + own
    assert measured.detail["cached_tokens"] == 384 * (len(w1.rows) - 1)
