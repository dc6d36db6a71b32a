"""Random weights from a config alone (`--load-format dummy`): a model's speed without its files."""

import zlib

import torch

from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.weights import ModelWeights, allocate_weights, named_destinations

# Uniform in ±0.035 has the standard deviation (0.02) that most families are initialised with.
_BOUND = 0.035


def dummy_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu", *, seed: int = 0
) -> ModelWeights:
    """Seeded random weights: each tensor depends on the seed and its name, not on the order of filling."""
    weights = allocate_weights(config, dtype, device)
    generator = torch.Generator(device)
    for name, place in named_destinations(config, weights).items():
        if "norm" in name:
            place.fill_(1.0 - config.norm_weight_offset)
            continue
        # One 32-bit number of both: the generator ignores a seed's upper half.
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        place.uniform_(-_BOUND, _BOUND, generator=generator)
    return weights
