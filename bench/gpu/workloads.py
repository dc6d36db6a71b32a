"""The GPU workloads: token ids drawn at random, lengths exact (EOS is ignored)."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.request import Request

W4_ROWS = 256
W4_TOKENS_IN = 142_827
W4_TOKENS_OUT = 133_966
STEADY_ROWS = 3000
_W4_SEED = 0
_W4_LARGEST_ID = 10_000
_W4_LENGTHS = (100, 1024)


@dataclass(frozen=True, slots=True)
class Row:
    """A request before it has an id."""

    prompt: tuple[int, ...]
    max_tokens: int


def w4_rows() -> list[Row]:
    """The nano bench, as published runs have it: each length is drawn before its tokens, all answers' lengths last."""
    rng = Random(_W4_SEED)

    def ids() -> tuple[int, ...]:
        length = rng.randint(*_W4_LENGTHS)
        return tuple(rng.randint(0, _W4_LARGEST_ID) for _ in range(length))

    prompts = [ids() for _ in range(W4_ROWS)]
    return [Row(prompt, rng.randint(*_W4_LENGTHS)) for prompt in prompts]


def steady_rows(count: int, *, tokens_in: int = 1000, tokens_out: int = 1000, vocab_size: int = 10_000) -> list[Row]:
    """Rows of one length."""
    rng = Random(5)
    return [Row(tuple(rng.choices(range(vocab_size), k=tokens_in)), tokens_out) for _ in range(count)]


def shared_rows(count: int, *, shared: int, own: int, tokens_out: int, vocab_size: int = 10_000) -> list[Row]:
    """Rows that begin alike."""
    rng = Random(6)
    prefix = tuple(rng.choices(range(vocab_size), k=shared))
    return [Row(prefix + tuple(rng.choices(range(vocab_size), k=own)), tokens_out) for _ in range(count)]


def staggered(rows: Sequence[Row], longest: int) -> list[Row]:
    """The same prompts with short answers that end one after the other: every batch size occurs. For warming up."""
    count = len(rows)
    return [Row(row.prompt, 2 + (i * longest) // count) for i, row in enumerate(rows)]


def requests_of(rows: Sequence[Row], *, temperature: float, first_id: int = 0) -> list[Request]:
    """As the engine takes them."""
    return [
        Request(
            request_id=first_id + i,
            job_id="gpu",
            tier=Tier.NORMAL,
            prompt=row.prompt,
            sampling=SamplingParams(max_tokens=row.max_tokens, temperature=temperature, ignore_eos=True),
            seed=i,
        )
        for i, row in enumerate(rows)
    ]
