"""What the engine may rely on in a Runner: the fake that most tests run on and the model's runner pass the same suite.

A runner is seen through its answers alone: `seen` is a row's token and log probabilities, which tell one context from
another. Every plan is audited first, so that the suite sends only what the engine may send.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from tests.contract.runner_subjects import (
    FAIL_TOKEN,
    NUM_HOST_PAGES,
    NUM_PAGES,
    PAGE_SIZE,
    SUBJECTS,
    VOCAB_SIZE,
)
from tests.parity.paged_driver import DrivenSequence, PagedDriver
from tests.unit.model.reference_sampler import Row, batch_of

from nightmill_worker.engine.audit import audit_plan
from nightmill_worker.engine.groups import find_groups
from nightmill_worker.engine.request import TokenLogprobs
from nightmill_worker.engine.step import NULL_PAGE, PrefixGroups, Runner, StepOutput, StepPlan, Swaps

GREEDY = Row(temperature=0.0, num_logprobs=5)
PROMPT = [5, 17, 3, 44, 9, 23, 61, 2, 8, 30, 77]  # two pages of four and a part
OTHER = [90, 12, 12, 7, 55, 1]
KINDS = [
    Row(num_logprobs=2),
    Row(temperature=0.5, seed=9),
    Row(temperature=1.5, seed=2**64 - 1, top_k=7),
    Row(seed=4, top_p=0.5, num_logprobs=0),
    Row(seed=5, min_p=0.2),
    Row(temperature=0.0, presence=1.5, num_logprobs=3),
    Row(seed=6, frequency=0.7, repetition=1.4),
    Row(temperature=0.0, banned=(1, 2, 3)),
    Row(temperature=0.0, num_logprobs=20),
]


@pytest.fixture(params=SUBJECTS)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Runner:
    return SUBJECTS[request.param](tmp_path)


@pytest.fixture
def driver(runner: Runner) -> PagedDriver:
    return PagedDriver(runner)


def run(runner: Runner, plan: StepPlan) -> StepOutput:
    audit_plan(plan, runner.pool, runner.vocab_size)
    return runner.run(plan)


def drawing(plan: StepPlan, rows: Sequence[Row], sequences: Sequence[DrivenSequence] = ()) -> StepPlan:
    """The plan, its rows drawn as `rows` say; `sequences` give the histories that penalties look at."""
    known = (
        [
            replace(row, history=tuple(s.tokens), prompt_length=s.num_prompt_tokens) if _counts(row) else row
            for row, s in zip(rows, sequences, strict=True)
        ]
        if sequences
        else list(rows)
    )
    batch = plan.sample
    return replace(
        plan,
        sample=replace(
            batch_of(known), sequence=batch.sequence, token_index=batch.token_index, position=batch.position
        ),
    )


def _counts(row: Row) -> bool:
    return bool(row.presence or row.frequency or row.repetition != 1.0)


def computed(driver: PagedDriver, tokens: Sequence[int], chunk: int = 1 << 30) -> DrivenSequence:
    """A sequence with all but its last token computed."""
    sequence = driver.add(tokens)
    while sequence.num_computed < len(tokens) - 1:
        count = min(chunk, len(tokens) - 1 - sequence.num_computed)
        assert len(run(driver.runner, driver.plan([(sequence, count)])).tokens) == 0
    return sequence


def decode(driver: PagedDriver, *sequences: DrivenSequence, row: Row = GREEDY) -> list[TokenLogprobs]:
    """One token for each sequence, computed now; what is seen of each."""
    plan = drawing(driver.plan([(s, 1) for s in sequences]), [row] * len(sequences))
    return seen(run(driver.runner, plan))


def seen(output: StepOutput) -> list[TokenLogprobs]:
    assert not output.failed
    return [output.logprobs[i] for i in range(len(output.tokens))]


def assert_same(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    """Equal but for rounding: batches of other shapes may be summed in another order."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)


def alone(runner: Runner, tokens: Sequence[int], seed: int = 7) -> TokenLogprobs:
    """What a whole prompt in pages of its own gives."""
    driver = PagedDriver(runner, seed=seed)
    return seen(run(runner, drawing(driver.plan([(driver.add(tokens), len(tokens))]), [GREEDY])))[0]


# ---------------------------------------------------------------- shape


def test_says_what_it_holds(runner: Runner) -> None:
    assert (runner.pool.num_pages, runner.pool.page_size) == (NUM_PAGES, PAGE_SIZE)
    assert runner.pool.bytes_per_token > 0
    assert runner.vocab_size == VOCAB_SIZE
    assert isinstance(runner, Swaps)
    assert runner.host.num_pages == NUM_HOST_PAGES
    assert runner.host.bytes_per_s > 0


def test_a_token_for_each_row_that_draws_in_its_order(driver: PagedDriver) -> None:
    first, second, third = driver.add(PROMPT), driver.add(OTHER), driver.add([4])
    output = run(driver.runner, driver.plan([(first, len(PROMPT)), (second, 2), (third, 1)]))
    assert output.tokens.dtype == np.int32
    assert output.tokens.tolist() == [alone(driver.runner, tokens).token_id for tokens in (PROMPT, [4])]
    assert output.logprobs == output.failed == {}
    assert 0 <= output.tokens.min() <= output.tokens.max() < VOCAB_SIZE


def test_rows_may_draw_in_any_order(driver: PagedDriver) -> None:
    prompts = [PROMPT, OTHER, [4, 9]]
    plan = drawing(driver.plan([(computed(driver, tokens), 1) for tokens in prompts]), [GREEDY] * 3)
    names = (field.name for field in fields(plan.sample))
    turned = {name: v[::-1].copy() for name in names if isinstance(v := getattr(plan.sample, name), np.ndarray)}
    output = run(driver.runner, replace(plan, sample=replace(plan.sample, **turned)))
    assert_same(seen(output), [alone(driver.runner, tokens) for tokens in prompts[::-1]])


def test_a_step_that_draws_nothing(driver: PagedDriver) -> None:
    sequence = driver.add(PROMPT)
    output = run(driver.runner, driver.plan([(sequence, 3)]))
    assert output.tokens.shape == (0,)
    assert output.tokens.dtype == np.int32


# ---------------------------------------------------------------- what an answer depends on


@pytest.mark.parametrize("chunk", [1, 2, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 100])
def test_chunks_do_not_matter(driver: PagedDriver, chunk: int) -> None:
    sequence = computed(driver, PROMPT, chunk)
    assert_same(decode(driver, sequence), [alone(driver.runner, PROMPT)])


def test_pages_may_lie_anywhere(runner: Runner) -> None:
    assert_same([alone(runner, PROMPT, seed) for seed in range(5)], [alone(runner, PROMPT)] * 5)


def test_every_token_and_its_place_count(runner: Runner) -> None:
    expected = alone(runner, PROMPT)
    for at in range(len(PROMPT)):
        changed = [*PROMPT[:at], 70, *PROMPT[at + 1 :]]
        assert alone(runner, changed).top != expected.top
    assert alone(runner, [*PROMPT[4:8], *PROMPT[:4], *PROMPT[8:]]).top != expected.top  # pages that changed places


def test_batch_mates_do_not_matter(driver: PagedDriver) -> None:
    """Decodes, a chunk, a last chunk, in another order."""
    mates = [computed(driver, OTHER), driver.add(PROMPT[::-1]), driver.add(OTHER[:3]), computed(driver, PROMPT)]
    counts = [1, 4, 3, 1]
    plan = driver.plan(list(zip(mates, counts, strict=True)))
    found = seen(run(driver.runner, drawing(plan, [GREEDY] * 3)))
    assert_same(found, [alone(driver.runner, tokens) for tokens in (OTHER, OTHER[:3], PROMPT)])


def test_generation_is_the_same_in_any_batch(driver: PagedDriver) -> None:
    prompts = [PROMPT, OTHER[:4], [4], PROMPT[:8], OTHER * 3]  # none of their answers holds FAIL_TOKEN
    together = driver.generate(prompts, max_tokens=5, chunk=3)
    assert together == [driver.generate([prompt], max_tokens=5)[0] for prompt in prompts]


def test_it_reads_what_the_page_table_says(driver: PagedDriver) -> None:
    """A page that belongs to another sequence is noticed, a page with the same content is not."""
    sequence, twin, stranger = computed(driver, PROMPT), computed(driver, PROMPT), computed(driver, [1, *PROMPT[1:]])
    own = list(sequence.pages)
    expected = alone(driver.runner, PROMPT)
    for pages, is_same in (([twin.pages[0], *own[1:]], True), ([stranger.pages[0], *own[1:]], False)):
        sequence.pages, sequence.num_computed = pages, len(PROMPT) - 1
        (found,) = decode(driver, sequence)
        assert (dict(found.top) == pytest.approx(dict(expected.top), abs=1e-4)) == is_same


def test_full_pages_of_another_sequence_serve_as_a_prefix(driver: PagedDriver) -> None:
    owner = computed(driver, PROMPT)
    longer = [*PROMPT[:8], 33, 34]
    sharer = driver.add(longer)
    sharer.pages, sharer.num_computed = owner.pages[:2], 8
    plan = driver.plan([(sharer, 2), (owner, 1)])
    found = seen(run(driver.runner, drawing(plan, [GREEDY] * 2)))
    assert_same(found, [alone(driver.runner, tokens) for tokens in (longer, PROMPT)])


def test_a_page_may_be_written_by_somebody_else_later(driver: PagedDriver) -> None:
    first = computed(driver, PROMPT)
    driver.release(first)
    second = computed(driver, [*OTHER, *OTHER])
    assert_same(decode(driver, second), [alone(driver.runner, [*OTHER, *OTHER], seed=0)])


def test_the_same_plan_gives_the_same_bits(driver: PagedDriver) -> None:
    mates = [computed(driver, OTHER), computed(driver, PROMPT), computed(driver, [3, 2, 1])]
    plan = drawing(driver.plan([(s, 1) for s in mates]), KINDS[:3])
    first, again = run(driver.runner, plan), run(driver.runner, replace(plan, step=plan.step + 10))
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.logprobs == again.logprobs


# ---------------------------------------------------------------- padding and the null page


def padded(plan: StepPlan, sequence: DrivenSequence) -> StepPlan:
    """The plan and a row as the static policy pads with: a token computed before, its K and V to the null page."""
    position = sequence.num_computed - 1
    table = np.full((1, max(plan.page_tables.shape[1], len(sequence.pages))), NULL_PAGE, np.int32)
    table[0, : len(sequence.pages)] = sequence.pages
    wide = np.full((plan.num_sequences, table.shape[1]), NULL_PAGE, np.int32)
    wide[:, : plan.page_tables.shape[1]] = plan.page_tables
    return replace(
        plan,
        token_ids=np.append(plan.token_ids, np.int32(sequence.tokens[position])),
        positions=np.append(plan.positions, np.int32(position)),
        slots=np.append(plan.slots, np.int64(NULL_PAGE)),
        query_starts=np.append(plan.query_starts, np.int32(plan.num_tokens + 1)),
        context_lens=np.append(plan.context_lens, np.int32(position + 1)),
        page_tables=np.vstack([wide, table]),
    )


def test_padding_changes_nothing(driver: PagedDriver) -> None:
    ended, running = computed(driver, OTHER), computed(driver, PROMPT)
    plan = drawing(padded(padded(driver.plan([(running, 1)]), ended), ended), [GREEDY])
    assert_same(seen(run(driver.runner, plan)), [alone(driver.runner, PROMPT)])
    assert_same(decode(driver, ended), [alone(driver.runner, OTHER)])  # it did not write where it stands either


def test_columns_past_the_context_do_not_matter(driver: PagedDriver) -> None:
    plan = drawing(driver.plan([(driver.add(PROMPT), len(PROMPT))]), [GREEDY])
    wide = np.pad(plan.page_tables, ((0, 0), (0, 7)), constant_values=NULL_PAGE)
    assert_same(seen(run(driver.runner, replace(plan, page_tables=wide))), [alone(driver.runner, PROMPT)])


def test_the_null_page_is_never_read(driver: PagedDriver) -> None:
    sequence = computed(driver, OTHER)
    for token in (50, 51):  # whatever padding leaves there
        noise = padded(driver.plan([(driver.add([token]), 1)]), sequence)
        run(driver.runner, noise)
    assert_same([alone(driver.runner, PROMPT)], [alone(PagedDriver(driver.runner, seed=3).runner, PROMPT)])
    assert_same(decode(driver, sequence), [alone(driver.runner, OTHER)])


# ---------------------------------------------------------------- whose arrays they are


def test_arrays_of_a_plan_are_the_engines(driver: PagedDriver) -> None:
    """Read-only views are taken; after the call they may be filled with anything, and what was returned stays."""
    sequence = computed(driver, PROMPT)
    plan = drawing(driver.plan([(sequence, 1)]), [replace(GREEDY, seed=3)])
    arrays = [getattr(part, field.name) for part in (plan, plan.sample) for field in fields(part)]
    arrays = [array for array in arrays if isinstance(array, np.ndarray)]
    before = [array.copy() for array in arrays]
    for array in arrays:
        array.setflags(write=False)
    output = run(driver.runner, plan)
    assert all((array == copy).all() for array, copy in zip(arrays, before, strict=True)), "a runner wrote to the plan"
    expected = seen(output)
    for array in arrays:
        array.setflags(write=True)
        array.fill(1)
    other = computed(driver, OTHER)
    decode(driver, other)
    assert seen(output) == expected
    sequence.num_computed -= 1
    assert_same(decode(driver, sequence), expected)


# ---------------------------------------------------------------- sampling


def drawn(driver: PagedDriver, rows: Sequence[Row], prompts: Sequence[Sequence[int]]) -> StepOutput:
    sequences = [computed(driver, tokens) for tokens in prompts]
    output = run(driver.runner, drawing(driver.plan([(s, 1) for s in sequences]), rows, sequences))
    for sequence in sequences:
        driver.release(sequence)
    return output


def test_a_mixed_batch_equals_its_rows_alone(driver: PagedDriver) -> None:
    prompts = [[*PROMPT, *OTHER[: i % 4]] for i in range(len(KINDS))]
    together = drawn(driver, KINDS, prompts)
    assert not together.failed
    assert set(together.logprobs) == {i for i, row in enumerate(KINDS) if row.num_logprobs >= 0}
    for i, (row, prompt) in enumerate(zip(KINDS, prompts, strict=True)):
        solo = drawn(driver, [row], [prompt])
        assert solo.tokens[0] == together.tokens[i], row
        if i in together.logprobs:
            assert_same([together.logprobs[i]], [solo.logprobs[0]])


def test_greedy_does_not_depend_on_the_seed(driver: PagedDriver) -> None:
    rows = [Row(temperature=0.0, seed=seed) for seed in range(8)]
    assert len(set(drawn(driver, rows, [PROMPT] * 8).tokens.tolist())) == 1


def test_a_draw_depends_on_seed_and_position_alone(driver: PagedDriver) -> None:
    rows = [Row(temperature=5.0, seed=seed) for seed in (1, 2, 3, 1, 2, 3)]
    tokens = drawn(driver, rows, [PROMPT] * 6).tokens.tolist()
    assert tokens[:3] == tokens[3:]
    many = drawn(driver, [Row(temperature=50.0, seed=seed) for seed in range(12)], [OTHER[:3]] * 12).tokens.tolist()
    assert len(set(many)) > 4
    again = drawn(driver, [Row(temperature=50.0, seed=seed) for seed in range(12)], [OTHER[:2]] * 12).tokens.tolist()
    assert again != many


@pytest.mark.parametrize("row", [Row(top_k=VOCAB_SIZE), Row(top_k=2**31 - 1)])
def test_a_top_k_of_all_tokens_is_none(driver: PagedDriver, row: Row) -> None:
    rows = [replace(row, seed=seed) for seed in range(6)]
    plain = [Row(seed=seed) for seed in range(6)]
    assert drawn(driver, rows, [PROMPT] * 6).tokens.tolist() == drawn(driver, plain, [PROMPT] * 6).tokens.tolist()


def test_a_top_k_of_one_is_greedy(driver: PagedDriver) -> None:
    tokens = drawn(driver, [Row(top_k=1, seed=seed) for seed in range(6)], [PROMPT] * 6).tokens.tolist()
    assert set(tokens) == {alone(driver.runner, PROMPT).token_id}


@pytest.mark.parametrize("row", [GREEDY, Row(temperature=2.0, seed=8)])
def test_banned_ids_are_not_drawn(driver: PagedDriver, row: Row) -> None:
    banned: list[int] = []
    for _ in range(6):
        output = drawn(driver, [replace(row, banned=tuple(banned)), row], [PROMPT] * 2)
        token = int(output.tokens[0])
        assert token not in banned
        banned.append(token)
        assert output.tokens[1] == banned[0]  # bans are of their row alone


def test_penalties_look_at_the_history(driver: PagedDriver) -> None:
    """A row's penalties change what it draws from, and only rows that have some read a history."""
    tokens = [*PROMPT, 8, 8, 8, 30, 30]
    plain, penalised = GREEDY, replace(GREEDY, presence=2.0, frequency=2.0, repetition=3.0)
    output = drawn(driver, [plain, penalised, plain], [tokens] * 3)
    assert_same([output.logprobs[2]], [output.logprobs[0]])
    assert output.logprobs[1].top != output.logprobs[0].top


# ---------------------------------------------------------------- logprobs


def test_logprobs_are_those_that_were_asked_for(driver: PagedDriver) -> None:
    counts = [-1, 0, 1, 20, 5]
    rows = [Row(temperature=i % 2, seed=i, num_logprobs=n) for i, n in enumerate(counts)]
    output = drawn(driver, rows, [PROMPT] * 5)
    assert sorted(output.logprobs) == [1, 2, 3, 4]
    for i, found in output.logprobs.items():
        ids, values = [token for token, _ in found.top], [value for _, value in found.top]
        assert found.token_id == output.tokens[i]
        assert len(ids) == len(set(ids)) == counts[i]
        assert all(0 <= token < VOCAB_SIZE for token in ids)
        assert values == sorted(values, reverse=True)
        assert found.logprob <= 0
        assert all(value <= 0 for value in values)
        assert dict(found.top).get(found.token_id, found.logprob) == pytest.approx(found.logprob)
        if rows[i].temperature == 0 and counts[i]:
            assert ids[0] == found.token_id
    assert all(type(value) is float and type(token) is int for f in output.logprobs.values() for token, value in f.top)


# ---------------------------------------------------------------- failures


def test_a_row_fails_alone(driver: PagedDriver) -> None:
    prompts = [PROMPT, [*OTHER, FAIL_TOKEN, 5], OTHER]
    output = drawn(driver, [GREEDY] * 3, prompts)
    assert list(output.failed) == [1]
    assert output.failed[1]
    assert len(output.tokens) == 3
    assert 0 <= output.tokens[1] < VOCAB_SIZE  # nobody looks at it, but it can be stored
    found = [output.logprobs[0], output.logprobs[2]]
    assert_same(found, [alone(driver.runner, tokens) for tokens in (PROMPT, OTHER)])
    # Its pages are given to others, who write them before they read them.
    assert_same(decode(driver, computed(driver, PROMPT * 2)), [alone(driver.runner, PROMPT * 2, seed=1)])


def test_a_row_whose_every_token_is_banned_fails(driver: PagedDriver) -> None:
    rows = [replace(GREEDY, banned=tuple(range(VOCAB_SIZE))), GREEDY]
    output = drawn(driver, rows, [PROMPT] * 2)
    assert list(output.failed) == [0]
    assert output.tokens[1] == alone(driver.runner, PROMPT).token_id


# ---------------------------------------------------------------- groups


def test_groups_are_a_hint(driver: PagedDriver) -> None:
    """Rows whose first pages are the same ids, told so or not, and one row without a group."""
    stem = (PROMPT * 13)[:136]
    owner = computed(driver, [*stem, 1])
    rows = [owner]
    for i in range(5):
        sharer = driver.add([*stem, 2 + i, *OTHER[:i]])
        sharer.pages, sharer.num_computed = owner.pages[:34], 136
        if i:
            run(driver.runner, driver.plan([(sharer, i)]))
        rows.append(sharer)
    rows.append(computed(driver, OTHER))
    plan = drawing(driver.plan([(s, 1) for s in rows]), [GREEDY] * 7)
    expected = seen(run(driver.runner, plan))
    counts = np.ones(7, np.int64)
    groups = find_groups(plan.page_tables, plan.context_lens, counts, PAGE_SIZE)
    assert groups is not None
    pairs = PrefixGroups(
        starts=np.array([0, 2, 4], np.int32),
        sequences=np.array([5, 0, 3, 2], np.int32),
        num_pages=np.array([34, 7], np.int32),
    )
    for told in (groups, pairs):
        assert_same(seen(run(driver.runner, replace(plan, groups=told))), expected)
    assert_same(expected[:1] + expected[-1:], [alone_at(driver, owner), alone(driver.runner, OTHER)])


def alone_at(driver: PagedDriver, sequence: DrivenSequence) -> TokenLogprobs:
    """The sequence's last draw again, by itself."""
    sequence.num_computed -= 1
    return decode(driver, sequence)[0]


# ---------------------------------------------------------------- swap


def test_swapped_pages_come_back_bit_for_bit(driver: PagedDriver) -> None:
    """To other pages, from host pages in any order, after others have used theirs; the last page is partly filled."""
    runner = driver.runner
    assert isinstance(runner, Swaps)
    sequence = computed(driver, PROMPT)
    (expected,) = decode(driver, sequence)
    sequence.num_computed -= 1
    own, host = np.array(sequence.pages, np.int32), np.array([9, 2, NUM_HOST_PAGES - 1], np.int32)
    runner.swap_out(own, host)
    driver.release(sequence)
    filler = [computed(driver, [*OTHER, i]) for i in range(12)]  # takes the pages, in some order
    assert {page for s in filler for page in s.pages} >= set(own.tolist())
    for _ in range(2):  # what is on the host stays there
        fresh = computed(driver, PROMPT[:1] * len(PROMPT))
        runner.swap_in(host[::-1].copy(), np.array(fresh.pages[::-1], np.int32))
        restored = driver.add(PROMPT)
        restored.pages, restored.num_computed = fresh.pages, len(PROMPT) - 1
        assert decode(driver, restored) == [expected]
    assert_same(decode(driver, filler[0]), [alone(runner, [*OTHER, 0], seed=2)])


def test_a_swap_copies_what_was_written_before_it(driver: PagedDriver) -> None:
    """In the order of the calls: a page may be written again as soon as swap_out has returned."""
    runner = driver.runner
    assert isinstance(runner, Swaps)
    first, second = computed(driver, PROMPT), driver.add([1, *PROMPT[1:]])
    (expected,) = decode(driver, first)
    host = np.arange(3, dtype=np.int32)
    runner.swap_out(np.array(first.pages, np.int32), host)
    second.pages = first.pages
    run(runner, driver.plan([(second, len(PROMPT))]))
    runner.swap_in(host, np.array(first.pages, np.int32))
    first.num_computed -= 1
    assert decode(driver, first) == [expected]


def test_host_pages_are_apart(driver: PagedDriver) -> None:
    runner = driver.runner
    assert isinstance(runner, Swaps)
    sequences = [computed(driver, [i, *PROMPT]) for i in range(5)]
    expected = []
    for i, sequence in enumerate(sequences):
        expected += decode(driver, sequence)
        sequence.num_computed -= 1
        runner.swap_out(np.array(sequence.pages, np.int32), np.arange(3 * i, 3 * i + 3, dtype=np.int32))
    for i, sequence in reversed(list(enumerate(sequences))):
        other = sequences[(i + 1) % 5].pages
        runner.swap_in(np.arange(3 * i, 3 * i + 3, dtype=np.int32), np.array(other, np.int32))
        guest = driver.add(sequence.tokens)
        guest.pages, guest.num_computed = other, len(guest.tokens) - 1
        assert decode(driver, guest) == [expected[i]]


def test_a_swap_of_nothing(runner: Runner) -> None:
    assert isinstance(runner, Swaps)
    nothing = np.empty(0, np.int32)
    runner.swap_out(nothing, nothing)
    runner.swap_in(nothing, nothing)


# ---------------------------------------------------------------- close


def test_a_closed_runner_says_so(driver: PagedDriver) -> None:
    runner = driver.runner
    assert isinstance(runner, Swaps)
    sequence = computed(driver, PROMPT)
    plan = driver.plan([(sequence, 1)])
    runner.close()
    runner.close()
    one = np.ones(1, np.int32)
    for call in (lambda: runner.run(plan), lambda: runner.swap_out(one, one), lambda: runner.swap_in(one, one)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert runner.vocab_size == VOCAB_SIZE  # what it held can still be asked
