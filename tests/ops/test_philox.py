"""Philox-4x32-10 against its authors' vectors, a plain Python twin, and the distribution it must give."""

import random

import pytest
import torch
from tests.unit.model.reference_sampler import gumbel, philox_4x32_10

from nightmill_kernels.reference.philox import MAX_GUMBEL, MIN_GUMBEL, gumbel_at, gumbel_row, philox

# kat_vectors of the Random123 distribution: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    c, k = ([torch.tensor([w]) for w in words(text)] for text in (counter, key))
    assert [int(w) for w in philox((c[0], c[1], c[2], c[3]), (k[0], k[1]))] == words(result)
    assert list(philox_4x32_10(words(counter), words(key))) == words(result)


def test_equals_plain_python_on_random_blocks() -> None:
    generator = random.Random(3)
    blocks = [[generator.getrandbits(32) for _ in range(6)] for _ in range(200)]
    c0, c1, c2, c3, k0, k1 = torch.tensor(blocks).unbind(dim=1)
    found = torch.stack(philox((c0, c1, c2, c3), (k0, k1)), dim=1).tolist()
    assert found == [list(philox_4x32_10(block[:4], block[4:])) for block in blocks]


def signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1, 0x9E3779B97F4A7C15])
@pytest.mark.parametrize("position", [0, 7, (1 << 32) + 3])
def test_noise_is_a_function_of_seed_position_and_token(seed: int, position: int) -> None:
    row = gumbel_row(torch.tensor([signed(seed)]), torch.tensor([position]), 11)[0]
    assert row.tolist() == pytest.approx([gumbel(seed, position, token) for token in range(11)], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 130, 4099])
def test_single_tokens_have_the_rows_noise_bit_for_bit(vocab_size: int) -> None:
    seeds, positions = torch.tensor([5, -9, 77]), torch.tensor([0, 4, 9])
    rows = gumbel_row(seeds, positions, vocab_size)
    for start in range(min(vocab_size, 40)):  # another start puts each token in another vector lane
        token = torch.arange(start, vocab_size)
        for r in range(3):
            alone = gumbel_at(seeds[r].expand(len(token)), positions[r].expand(len(token)), token)
            assert torch.equal(alone, rows[r, start:])


def test_moments_and_bounds_of_the_noise() -> None:
    noise = gumbel_row(torch.arange(64), torch.zeros(64, dtype=torch.int64), 4096).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.02)
    assert noise.min() > MIN_GUMBEL
    assert noise.max() < MAX_GUMBEL
