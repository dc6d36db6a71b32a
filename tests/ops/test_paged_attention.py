"""Attention over pages: every implementation against an fp64 oracle, and the promises about bits."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.conftest import put_keys

from nightmill_kernels.backend import active_isa, use_isa
from nightmill_kernels.cpu.isa import REFERENCE, isas_to_test

FP32_TOLERANCE = 1e-5
"""Outputs are means of N(0, 1) values: a few dozen roundings of 2^-24 each, ten times over."""

BF16_HALF_ULP = 2**-8
"""Relative rounding of a bf16 result, and of each weight where a bf16 dot product takes them."""

BF16_SLACK = 1e-4
"""What fp32 scores of bf16 inputs add: far below one rounding of the output."""

MIXED = {"query_lens": [1, 17, 1, 2, 40, 1, 1], "context_lens": [50, 30, 1, 131, 40, 0, 64]}


def assert_close(case, out, oracle):
    want, spread = oracle(case)
    error = (out.double() - want).abs()
    if out.dtype == torch.float32:
        allowed = torch.full_like(error, FP32_TOLERANCE)
    else:
        # The output is rounded (|want|); the weights may have been (mean of |v|).
        allowed = BF16_HALF_ULP * (want.abs() + spread) + BF16_SLACK
    assert torch.isfinite(out).all(), "something that is nobody's reached an output, or an output was not written"
    assert (error <= allowed).all(), f"worst {float((error / allowed).max()):.2f} times the tolerance"


@pytest.fixture(params=[*isas_to_test(), REFERENCE])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """As in conftest, and with emulated tiles where there are no real ones."""
    with use_isa(request.param):
        assert active_isa() == request.param
        yield request.param


@pytest.fixture(params=isas_to_test())
def c_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with use_isa(request.param):
        assert active_isa() == request.param
        yield request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def on_threads(count: int, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size"),
    [
        (64, 1, 16),
        (64, 3, 16),
        (64, 8, 64),
        (80, 2, 32),
        (96, 4, 16),
        (128, 7, 32),
        (256, 4, 64),
        (16, 1, 16),
        (48, 9, 24),
        (64, 3, 1),
    ],
)
def test_matches_the_oracle(isa, dtype, head_dim, group, page_size, make_case, oracle):
    case = make_case(**MIXED, dtype=dtype, head_dim=head_dim, group=group, page_size=page_size, unowned=2)
    assert_close(case, case.run(), oracle)


@pytest.mark.parametrize("window", [1, 7, 16, 33, 64, 1000])
def test_window_hides_what_is_older(isa, dtype, window, make_case, oracle):
    case = make_case(**MIXED, dtype=dtype, window=window)
    assert_close(case, case.run(), oracle)


def test_pages_below_the_window_may_be_gone(isa, dtype, make_case, oracle):
    case = make_case(query_lens=[1, 20], context_lens=[200, 300], dtype=dtype, window=33)
    tables = case.meta.page_tables.clone()
    tables[0, : (200 - 33) // 16], tables[1, : (300 - 20 + 1 - 33) // 16] = 0, 0
    gone = dataclasses.replace(case, meta=dataclasses.replace(case.meta, page_tables=tables))
    assert_close(gone, gone.run(), oracle)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(isa, dtype, softcap, make_case, oracle):
    case = make_case(**MIXED, dtype=dtype, softcap=softcap, window=40)
    assert_close(case, case.run(), oracle)


def test_long_contexts(isa, dtype, make_case, oracle):
    case = make_case(query_lens=[1, 3, 1], context_lens=[1300, 1030, 513], dtype=dtype, kv_heads=1)
    assert_close(case, case.run(), oracle)


def growing_case(make_case, dtype, growth):
    """Scores that grow from the first key to the last, by 2.9 · growth bits a key."""
    case = make_case(query_lens=[1, 40], context_lens=[700, 300], dtype=dtype, kv_heads=1)
    direction = torch.sign(torch.randn(64, generator=torch.Generator().manual_seed(5)))
    for s, keys in enumerate(case.keys):
        position = torch.arange(len(keys))
        trend = growth * (position - len(keys) // 2)[:, None, None] / 2.0
        keys.copy_((keys.float() * 0.5 + trend * direction).to(dtype))
        put_keys(case.k_pool, case.meta.page_tables[s].long()[position // 16], position % 16, keys)
    case.q.copy_((case.q.float() * 0.5 + direction * 0.5).to(dtype))
    return case


@pytest.mark.parametrize("growth", [-0.04, 0.005, 0.04])
def test_scores_that_grow_along_the_context(isa, dtype, growth, make_case, oracle):
    """The largest score so far moves from block to block, by less and by more than what leaves the sums alone."""
    case = growing_case(make_case, dtype, growth)
    assert_close(case, case.run(), oracle)


def test_scores_far_above_all_before(isa, dtype, make_case, oracle):
    case = growing_case(make_case, dtype, 1.0)
    want, _ = oracle(case)
    assert torch.allclose(case.run().double(), want, atol=0.02)


def test_large_scores_stay_finite(isa, dtype, make_case, oracle):
    case = make_case(**MIXED, dtype=dtype)
    case = dataclasses.replace(case, q=case.q * 100)
    want, _ = oracle(case)
    # Scores near 500 leave one key with all the weight; fp32 knows a score of that size to 2^-15.
    assert torch.allclose(case.run().double(), want, atol=0.02)


def test_a_query_before_the_first_key_sees_nothing(isa, dtype, make_case):
    case = make_case(query_lens=[5], context_lens=[3], dtype=dtype)
    out = case.run()
    assert (out[:2] == 0).all()
    assert (out[2:] != 0).any(-1).all()


@pytest.mark.parametrize("counts", [([], []), ([1, 1], [0, 0]), ([0, 1, 0], [40, 7, 0])])
def test_padding_gives_zeros(isa, dtype, counts, make_case, oracle):
    query_lens, context_lens = counts
    case = make_case(query_lens=query_lens, context_lens=context_lens, dtype=dtype, unowned=3)
    out = case.run()
    assert (out[-3:] == 0).all()
    assert_close(case, out, oracle)


@pytest.mark.parametrize(("context", "position"), [(700, 3), (700, 600), (513, 512)])
def test_a_broken_key_breaks_its_own_sequence_only(isa, context, position, make_case, break_key):
    case = make_case(query_lens=[1, 1], context_lens=[context, context], dtype=torch.bfloat16)
    clean = case.run()
    break_key(case.k_pool, case.meta.page_tables[1, position // 16], position % 16)
    broken = case.run()
    assert torch.equal(broken[0], clean[0])
    assert broken[1].isnan().all(), "a NaN in the model must be seen, not averaged away"


def test_views_of_a_fused_projection(isa, dtype, make_case):
    case = make_case(**MIXED, dtype=dtype)
    tokens, heads, dim = case.q.shape
    fused = torch.full((tokens, heads + 4, dim), float("nan"), dtype=dtype)
    fused[:, :heads] = case.q
    pools = torch.stack((case.k_pool, case.v_pool), dim=1)  # K and V of a page side by side
    view = dataclasses.replace(case, q=fused[:, :heads], k_pool=pools[:, 0], v_pool=pools[:, 1])
    assert torch.equal(view.run(), case.run())


# ---------------------------------------------------------------- the same bits, however it is computed


def test_bits_do_not_depend_on_batch_mates(c_isa, dtype, make_case):
    lens = {"query_lens": [1, 30, 1, 1, 1], "context_lens": [700, 90, 1200, 5, 333]}
    together = make_case(**lens, dtype=dtype).run()
    case = make_case(**lens, dtype=dtype)
    starts = case.meta.query_starts.tolist()
    for s, length in enumerate(lens["query_lens"]):
        meta = dataclasses.replace(
            case.meta,
            query_starts=torch.tensor([0, length], dtype=torch.int32),
            context_lens=case.meta.context_lens[s : s + 1],
            page_tables=case.meta.page_tables[s : s + 1],
        )
        alone = dataclasses.replace(case, q=case.q[starts[s] : starts[s + 1]], meta=meta).run()
        assert torch.equal(alone, together[starts[s] : starts[s + 1]])


@pytest.mark.parametrize(("query_lens", "context_lens"), [([1], [2000]), ([20], [1500]), ([1, 90, 1], [700, 90, 5])])
def test_bits_do_not_depend_on_threads(c_isa, dtype, query_lens, context_lens, make_case):
    case = make_case(query_lens=query_lens, context_lens=context_lens, dtype=dtype, window=1300)
    one = on_threads(1, case.run)
    for threads in (2, 3, 8):  # few tiles, several segments: split over threads
        assert torch.equal(on_threads(threads, case.run), one)


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 64, 200])
def test_bits_do_not_depend_on_chunks(c_isa, dtype, chunk, make_case):
    whole = make_case(query_lens=[600], context_lens=[600], dtype=dtype, kv_heads=1, window=550)
    want = whole.run()
    for end in (chunk, 300, 513, 600):
        first = max(0, end - chunk)
        meta = dataclasses.replace(
            whole.meta,
            query_starts=torch.tensor([0, end - first], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
        )
        part = dataclasses.replace(whole, q=whole.q[first:end], meta=meta).run()
        assert torch.equal(part, want[first:end])


def test_bits_do_not_depend_on_the_page_size(c_isa, dtype, make_case):
    runs = [make_case(**MIXED, dtype=dtype, page_size=page_size).run() for page_size in (16, 32, 64, 24)]
    assert all(torch.equal(run, runs[0]) for run in runs)


# ---------------------------------------------------------------- any shape


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch_matches_the_oracle(isa, make_case, oracle, data):
    sequences = data.draw(st.integers(1, 4))
    contexts = data.draw(st.lists(st.integers(0, 150), min_size=sequences, max_size=sequences))
    case = make_case(
        query_lens=[data.draw(st.integers(0, max(1, min(context, 20)))) for context in contexts],
        context_lens=contexts,
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        head_dim=data.draw(st.sampled_from([16, 64, 80, 96, 112])),
        kv_heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.sampled_from([1, 2, 3, 5, 7])),
        page_size=data.draw(st.sampled_from([8, 16, 20, 32])),
        window=data.draw(st.none() | st.integers(1, 160)),
        softcap=data.draw(st.none() | st.just(20.0)),
        unowned=data.draw(st.integers(0, 2)),
        seed=data.draw(st.integers(0, 100)),
    )
    assert_close(case, case.run(), oracle)


def test_more_heads_than_a_tile_has_rows_take_the_reference(isa, make_case, oracle):
    """Pages stay as this instruction set keeps them, whoever reads them."""
    lens = {"query_lens": [1, 3, 1], "context_lens": [70, 40, 33]}
    case = make_case(**lens, dtype=torch.bfloat16, head_dim=256, kv_heads=2, group=33)
    assert_close(case, case.run(), oracle)


def test_half_precision_and_odd_heads_take_the_reference(make_case, oracle):
    half = make_case(**MIXED, dtype=torch.float16)
    want, _ = oracle(half)
    assert torch.allclose(half.run().double(), want, atol=2e-3)
    odd = make_case(**MIXED, dtype=torch.float32, head_dim=20)
    assert_close(odd, odd.run(), oracle)


# ---------------------------------------------------------------- what it refuses


def changed_meta(case, **fields):
    return dataclasses.replace(case, meta=dataclasses.replace(case.meta, **fields))


def test_refuses_metadata_that_would_read_outside_the_pool(c_isa, make_case):
    case = make_case(query_lens=[1, 3], context_lens=[40, 20], dtype=torch.float32)
    for bad in (-1, case.k_pool.shape[0]):
        tables = case.meta.page_tables.clone()
        tables[0, 1] = bad
        with pytest.raises(ValueError, match="page id outside the pool"):
            changed_meta(case, page_tables=tables).run()
    for contexts in ([40, -1], [40, 100_000]):
        with pytest.raises(ValueError, match="context length"):
            changed_meta(case, context_lens=torch.tensor(contexts, dtype=torch.int32)).run()
    for starts in ([0, 3, 2], [0, 1, 5], [-1, 1, 4]):
        with pytest.raises(ValueError, match="query_starts"):
            changed_meta(case, query_starts=torch.tensor(starts, dtype=torch.int32)).run()


def test_refuses_layouts_it_cannot_take(isa, make_case):
    case = make_case(query_lens=[1, 3], context_lens=[40, 20], dtype=torch.float32)
    with pytest.raises(ValueError, match="int32"):
        changed_meta(case, context_lens=case.meta.context_lens.long()).run()
    with pytest.raises(ValueError, match="one dtype"):
        dataclasses.replace(case, q=case.q.bfloat16()).run()
    with pytest.raises(ValueError, match="multiple of Hk"):
        dataclasses.replace(case, q=case.q[:, :5]).run()
    with pytest.raises(ValueError, match="contiguous"):
        dataclasses.replace(case, k_pool=case.k_pool.transpose(1, 2).contiguous().transpose(1, 2)).run()
    with pytest.raises(ValueError, match="window"):
        dataclasses.replace(case, window=0).run()
    for wrong in ({"scale": 0.0}, {"scale": float("nan")}, {"softcap": 0.0}):
        with pytest.raises(ValueError, match="must be positive"):
            dataclasses.replace(case, **wrong).run()
    with pytest.raises(ValueError, match="query_starts"):
        changed_meta(case, query_starts=case.meta.query_starts[:2]).run()
