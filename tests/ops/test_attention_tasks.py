"""Steps that mix prefills, decodes and groups: decodes are computed after other tiles, and two blocks at a time."""

import dataclasses

import pytest
import torch
from tests.ops.test_paged_attention import assert_close, c_isa, dtype, growing_case, isa, on_threads  # noqa: F401
from tests.ops.test_prefix_groups import Sharing, grouped

# Decodes of one block, of whole pairs of blocks, and of one key more; prefills of several tiles; a group with its own.
LENS = {
    "query_lens": [1, 130, 1, 1, 1, 75, 1, 1, 1, 1],
    "context_lens": [64, 400, 128, 129, 900, 75, 1300, 193, 321, 448],
}
SHARED: Sharing = [([7, 8, 9], 12)]


def alone(case, s: int) -> torch.Tensor:
    """The rows of one sequence, computed without the others."""
    first, last = case.meta.query_starts[s : s + 2].tolist()
    meta = dataclasses.replace(
        case.meta,
        query_starts=torch.tensor([0, last - first], dtype=torch.int32),
        context_lens=case.meta.context_lens[s : s + 1],
        page_tables=case.meta.page_tables[s : s + 1],
        groups=None,
    )
    return dataclasses.replace(case, q=case.q[first:last], meta=meta).run()


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (96, 2), (128, 1), (64, 8)])
def test_a_mixed_step_gives_the_bits_of_each_alone(c_isa, dtype, head_dim, group, window, make_case):  # noqa: F811
    case = make_case(**LENS, dtype=dtype, head_dim=head_dim, group=group, kv_heads=2, window=window, shared=SHARED)
    want = torch.cat([alone(case, s) for s in range(len(LENS["query_lens"]))])
    for threads in (1, 2, 5):
        for step in (case, grouped(case, SHARED)):
            assert torch.equal(on_threads(threads, step.run), want)


def test_a_mixed_step_matches_the_oracle(isa, dtype, make_case, oracle):  # noqa: F811
    case = grouped(make_case(**LENS, dtype=dtype, kv_heads=1, shared=SHARED, unowned=2), SHARED)
    assert_close(case, on_threads(2, case.run), oracle)


@pytest.mark.parametrize("growth", [-0.04, 0.02, 0.04, 1.0])
def test_a_decode_whose_scores_grow_has_the_bits_of_a_prefill(c_isa, dtype, growth, make_case):  # noqa: F811
    """Of two blocks, the first one's values may have to be added before the second one's scores move m."""
    case = growing_case(make_case, dtype, growth)
    first, last = case.meta.query_starts[1:3].tolist()
    whole = case.run()[first:last]
    for token in range(first, last):
        meta = dataclasses.replace(
            case.meta,
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=case.meta.context_lens[1:2] - (last - token - 1),
            page_tables=case.meta.page_tables[1:2],
        )
        decode = dataclasses.replace(case, q=case.q[token : token + 1], meta=meta).run()
        assert torch.equal(decode[0], whole[token - first])
