"""On a CPU a token's logits have the same bits in any company: alone, in a batch, in chunks of any size."""

import json
import random
from pathlib import Path

import pytest
import torch
from tests.parity.paged_driver import DrivenSequence, PagedDriver
from tests.unit.model.test_model_config import SMOLLM2
from torch import Tensor

from nightmill.records import EngineOptions, ModelSpec
from nightmill_kernels.backend import use_isa
from nightmill_kernels.cpu.isa import available_isas
from nightmill_kernels.linear import is_ours
from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig

TINY = SMOLLM2 | {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 211,
    "max_position_embeddings": 256,
}
LENGTHS = [1, 2, 3, 17, 18, 33, 64, 70, 90, 150]


def logits_of(
    runner: ModelRunner, tokens: list[list[int]], widths: random.Random | None, together: bool
) -> list[Tensor]:
    """[length, vocab] of each sequence, given in pieces of random size, or whole; in one batch or one at a time."""
    driver = PagedDriver(runner)
    sequences = [driver.add(t) for t in tokens]
    found: dict[int, list[Tensor]] = {id(s): [] for s in sequences}
    groups = [sequences] if together else [[s] for s in sequences]
    for group in groups:
        while work := [(s, piece(s, widths)) for s in group if s.num_computed < len(s.tokens)]:
            parts = runner.compute_logits(driver.plan(work, every_token=True)).split([count for _, count in work])
            for (sequence, _), part in zip(work, parts, strict=True):
                found[id(sequence)].append(part.clone())
    for sequence in sequences:
        driver.release(sequence)
    return [torch.cat(found[id(s)]) for s in sequences]


def piece(sequence: DrivenSequence, widths: random.Random | None) -> int:
    left = len(sequence.tokens) - sequence.num_computed
    return left if widths is None else min(left, widths.choice([1, 1, 2, 7, 16, 40]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("isa", available_isas())
def test_logits_have_the_same_bits_in_any_company(isa: str, dtype: str, tmp_path: Path) -> None:
    if not is_ours(isa, getattr(torch, dtype)):
        pytest.skip("torch's product, which chooses its order of summing by the number of rows")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    spec = ModelSpec(model="tiny", dtype=dtype, load_format="dummy")
    options = EngineOptions(page_size=16, pool_bytes=1 << 22, device="cpu")
    generator = random.Random(0)
    tokens = [[generator.randrange(211) for _ in range(length)] for length in LENGTHS]
    with use_isa(isa):
        runner = ModelRunnerConfig(model_dir=tmp_path, spec=spec, options=options).build()
        assert isinstance(runner, ModelRunner)
        expected = logits_of(runner, tokens, None, together=False)
        for widths, together in ((None, True), (random.Random(1), True), (random.Random(2), False)):
            for length, one, other in zip(
                LENGTHS, expected, logits_of(runner, tokens, widths, together=together), strict=True
            ):
                assert torch.equal(one, other), f"{length} tokens, chunked: {widths is not None}, {together=}"
