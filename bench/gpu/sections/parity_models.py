"""Small random models of three families, with the head sizes real ones have, made by transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB = 1024
_ENDS, _LAYERS = 1.7, 0.5  # of 1 / √width: standard deviations of what stands at the ends, and of the layers
WINDOW = 48  # of Gemma's local layers: shorter than the prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One model in one dtype."""

    family: str
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.family} D{self.head_dim} {self.dtype}"


SUBJECTS = tuple(
    Subject(family=family, head_dim=head_dim, dtype=dtype)
    for dtype, head_dim in (("bfloat16", 128), ("float32", 64))
    for family in ("qwen3", "llama", "gemma3")
)
"""Each combination compiles its own kernels, which takes seconds: not all of them."""
TINY = (
    Subject(family="qwen3", head_dim=16, dtype="float32"),
    Subject(family="gemma3", head_dim=16, dtype="bfloat16"),
)


def load(directory: Path, dtype: torch.dtype, device: str) -> Any:
    """transformers' model; casting one would also round what it keeps in fp32 in every dtype."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.to(device).eval()


def save(subject: Subject, directory: Path) -> None:
    """Make a model whose every part shows in its logits, and that rounding to bf16 does not drive elsewhere.

    Layers with larger weights amplify what is rounded: transformers' own bf16 then draws other tokens than its fp32
    far from any tie (70 of 1,800 at three times these), and comparing with anything would show nothing.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(11)
    dtype = getattr(torch, subject.dtype)
    config = _config(transformers, subject)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    std = config.hidden_size**-0.5
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                # Gemma multiplies by 1 + weight.
                parameter.uniform_(-0.5, 0.5) if subject.family == "gemma3" else parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=std * (_ENDS if "embed" in key or "lm_head" in key else _LAYERS))
    model.tie_weights()
    model.save_pretrained(directory)


def _config(transformers: Any, subject: Subject) -> Any:
    heads = {"llama": 8, "qwen3": 4, "gemma3": 4}[subject.family]
    small = {
        "hidden_size": 256 if subject.head_dim > 16 else 64,
        "intermediate_size": 512 if subject.head_dim > 16 else 96,
        "num_hidden_layers": 4 if subject.family != "gemma3" else 6,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": subject.head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 2,
        "tie_word_embeddings": subject.family != "llama",
    }
    if subject.family == "gemma3":
        # The global layers turn more slowly, as Gemma 3's do.
        ropes = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        }
        small |= {"sliding_window": WINDOW, "sliding_window_pattern": 3, "rope_parameters": ropes}
        small["query_pre_attn_scalar"] = subject.head_dim
        return transformers.Gemma3TextConfig(**small)
    return getattr(transformers, {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}[subject.family])(**small)
