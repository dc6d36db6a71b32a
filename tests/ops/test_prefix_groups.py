"""Attention over pages that several decodes have in common: groups against the oracle, and against no groups."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.test_paged_attention import assert_close, c_isa, dtype, isa, on_threads  # noqa: F401

from nightmill_kernels.paged_attention import AttentionMetadata, PrefixGroups

Sharing = list[tuple[list[int], int]]

# Chunks at 2 and 6, a decode without a group at 4, one whose context is just the shared pages at 7.
MIXED = {
    "query_lens": [1, 1, 17, 1, 1, 1, 40, 1, 1, 1],
    "context_lens": [150, 131, 30, 200, 64, 129, 40, 128, 97, 300],
}
SHARED: Sharing = [([0, 3, 5, 7, 1], 8), ([8, 9], 6)]


def grouped(case, sharing: Sharing):
    """The case with its sharing told, sequences in an order of their own."""
    members = [torch.tensor(ids[::-1], dtype=torch.int32) for ids, _ in sharing]
    groups = PrefixGroups(
        starts=torch.tensor([0, *(len(ids) for ids, _ in sharing)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        sequences=torch.cat(members) if members else torch.empty(0, dtype=torch.int32),
        num_pages=torch.tensor([count for _, count in sharing], dtype=torch.int32),
    )
    return dataclasses.replace(case, meta=dataclasses.replace(case.meta, groups=groups))


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size"),
    [(64, 1, 16), (64, 3, 16), (64, 8, 16), (80, 2, 16), (128, 7, 16), (256, 4, 16), (16, 1, 16), (48, 9, 24)],
)
def test_groups_match_the_oracle(isa, dtype, head_dim, group, page_size, make_case, oracle):  # noqa: F811
    lens = MIXED if page_size == 16 else MIXED | {"context_lens": [2 * n for n in MIXED["context_lens"]]}
    case = make_case(**lens, dtype=dtype, head_dim=head_dim, group=group, page_size=page_size, unowned=2, shared=SHARED)
    case = grouped(case, SHARED)
    assert_close(case, case.run(), oracle)


def test_a_group_changes_no_bit(c_isa, dtype, make_case):  # noqa: F811
    case = make_case(**MIXED, dtype=dtype, shared=SHARED)
    alone = case.run()
    for count in range(9):  # whole pages up to what is shared; blocks of 64 keys begin at every fourth
        assert torch.equal(grouped(case, [(SHARED[0][0], count), SHARED[1]]).run(), alone)


@pytest.mark.parametrize("shared_pages", [31, 32, 33, 36, 64, 70])
def test_a_long_prefix_changes_no_bit(c_isa, dtype, shared_pages, make_case):  # noqa: F811
    """Segments of 512 keys: the prefix ends before, at and after their borders, and so do the sequences."""
    contexts = [16 * shared_pages + extra for extra in (0, 1, 63, 65, 512, 600, 7)]
    sharing: Sharing = [(list(range(7)), shared_pages)]
    case = make_case(query_lens=[1] * 7, context_lens=contexts, dtype=dtype, kv_heads=1, shared=sharing)
    alone = case.run()
    for threads in (1, 3):
        assert torch.equal(on_threads(threads, grouped(case, sharing).run), alone)


def test_bits_do_not_depend_on_the_group(c_isa, dtype, make_case):  # noqa: F811
    """Large groups are cut into tiles: other mates, other tiles, another order, the same bits."""
    contexts = [130 + 7 * s for s in range(60)]
    everyone = list(range(60))
    case = make_case(query_lens=[1] * 60, context_lens=contexts, dtype=dtype, shared=[(everyone, 8)])
    whole = grouped(case, [(everyone, 8)]).run()
    assert torch.equal(grouped(case, [(everyone[::2], 8), (everyone[1::2], 5)]).run(), whole)
    assert torch.equal(on_threads(8, grouped(case, [(everyone[3:50], 7)]).run), whole)


def test_softcap_and_window(isa, dtype, make_case, oracle):  # noqa: F811
    for window in (None, 33, 150):
        case = grouped(make_case(**MIXED, dtype=dtype, softcap=2.0, window=window, shared=SHARED), SHARED)
        assert_close(case, case.run(), oracle)


def test_scores_far_apart_between_prefix_and_suffix(isa, dtype, make_case, oracle):  # noqa: F811
    """Merging rescales by the difference of two maxima; it must be the right one, whichever side is larger."""
    for scale in (0.01, 30.0):
        case = make_case(**MIXED, dtype=torch.float32, shared=SHARED)
        case.k_pool[case.meta.page_tables[0, :8].long()] *= scale
        case = dataclasses.replace(case, keys=[k.clone() for k in case.keys])
        for s in SHARED[0][0]:
            case.keys[s][: 8 * 16] *= scale
        want, _ = oracle(case)
        assert torch.allclose(grouped(case, SHARED).run().double(), want, atol=1e-3)


def test_a_broken_shared_key_reaches_its_group_only(isa, make_case, break_key):  # noqa: F811
    case = grouped(make_case(**MIXED, dtype=torch.bfloat16, shared=SHARED), SHARED)
    clean = case.run()
    break_key(case.k_pool, case.meta.page_tables[0, 3], 5)
    broken = case.run()
    starts = case.meta.query_starts.tolist()
    for s in range(10):
        rows = broken[starts[s] : starts[s + 1]]
        if s in SHARED[0][0]:
            assert rows.isnan().all(), "a NaN in the model must be seen, not averaged away"
        else:
            assert torch.equal(rows, clean[starts[s] : starts[s + 1]])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_groups_match_the_oracle(isa, make_case, oracle, data):  # noqa: F811
    page_size = data.draw(st.sampled_from([8, 16, 20, 32, 64]))
    sequences = data.draw(st.integers(1, 9))
    sharing: Sharing = []
    left = data.draw(st.permutations(range(sequences)))
    while left and data.draw(st.booleans()):
        size = data.draw(st.integers(1, len(left)))
        sharing.append((sorted(left[:size]), data.draw(st.integers(0, 160 // page_size))))
        left = left[size:]
    least = {s: count * page_size for ids, count in sharing for s in ids}
    contexts = [least.get(s, 0) + data.draw(st.integers(0 if least.get(s) else 1, 100)) for s in range(sequences)]
    case = make_case(
        query_lens=[1 if s in least else data.draw(st.integers(1, 3)) for s in range(sequences)],
        context_lens=contexts,
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        head_dim=data.draw(st.sampled_from([16, 64, 96])),
        kv_heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.sampled_from([1, 3, 7])),
        page_size=page_size,
        window=data.draw(st.none() | st.integers(1, 300)),
        seed=data.draw(st.integers(0, 100)),
        shared=sharing,
    )
    told = [(ids, data.draw(st.integers(0, count))) for ids, count in sharing]
    case = grouped(case, told)
    assert_close(case, case.run(), oracle)


def _false_groups(meta: AttentionMetadata) -> dict[str, tuple[PrefixGroups, str]]:
    def groups(starts: list[int], sequences: list[int], num_pages: list[int]) -> PrefixGroups:
        return PrefixGroups(
            starts=torch.tensor(starts, dtype=torch.int32),
            sequences=torch.tensor(sequences, dtype=torch.int32),
            num_pages=torch.tensor(num_pages, dtype=torch.int32),
        )

    return {
        "one page too many": (groups([0, 2], [0, 3], [9]), "first pages are the same"),
        "other pages": (groups([0, 2], [0, 4], [1]), "first pages are the same"),
        "more than a context": (groups([0, 1], [4], [5]), "first pages are the same"),
        "a chunk": (groups([0, 1], [2], [1]), "first pages are the same"),
        "a start missing": (groups([0], [0, 3], [8]), "one start more"),
    }


@pytest.mark.parametrize("which", ["one page too many", "other pages", "more than a context", "a chunk"])
def test_refuses_groups_that_are_not_true(isa, which, make_case):  # noqa: F811
    case = make_case(**MIXED, dtype=torch.float32, shared=SHARED)
    groups, message = _false_groups(case.meta)[which]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(case, meta=dataclasses.replace(case.meta, groups=groups)).run()


def test_refuses_malformed_groups(c_isa, make_case):  # noqa: F811
    case = make_case(**MIXED, dtype=torch.float32, shared=SHARED)
    good = grouped(case, SHARED).meta.groups
    for bad in (
        _false_groups(case.meta)["a start missing"][0],
        dataclasses.replace(good, sequences=torch.tensor([0, 3, 5, 7, 0, 8, 9], dtype=torch.int32)),
        dataclasses.replace(good, sequences=torch.tensor([0, 3, 5, 7, 10, 8, 9], dtype=torch.int32)),
        dataclasses.replace(good, starts=torch.tensor([0, 5, 4], dtype=torch.int32)),
        dataclasses.replace(good, num_pages=torch.tensor([8, -1], dtype=torch.int32)),
        dataclasses.replace(good, num_pages=good.num_pages.long()),
    ):
        with pytest.raises(ValueError, match=r"paged_attention|one start more|int32"):
            dataclasses.replace(case, meta=dataclasses.replace(case.meta, groups=bad)).run()
