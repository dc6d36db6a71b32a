import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from nightmill.config import Settings
from nightmill.errors import ModelError
from nightmill.records import ModelSpec
from nightmill_worker.feed.tokenizer import BYTE_OF_CHARACTER, Tokenizer
from nightmill_worker.model.source import ResolvedModel, resolve_model

_HIDDEN, _FFN, _HEADS, _KV_HEADS = 32, 64, 4, 2


def _write_gguf(path: Path, *, pre: str | None = "smollm", tensors: bool = True) -> Path:
    """A llama of one layer over the 256 bytes and three control tokens."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    tokens = [*BYTE_OF_CHARACTER, "12", "<s>", "<|im_end|>", "<pad>"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(259)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    if tensors:
        _add_tensors(writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer: GGUFWriter, vocab: int) -> None:
    random = np.random.default_rng(0)
    kv = _HIDDEN * _KV_HEADS // _HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocab, _HIDDEN),
        "output_norm": (_HIDDEN,),
        "blk.0.attn_norm": (_HIDDEN,),
        "blk.0.ffn_norm": (_HIDDEN,),
        "blk.0.attn_q": (_HIDDEN, _HIDDEN),
        "blk.0.attn_k": (kv, _HIDDEN),
        "blk.0.attn_v": (kv, _HIDDEN),
        "blk.0.attn_output": (_HIDDEN, _HIDDEN),
        "blk.0.ffn_gate": (_FFN, _HIDDEN),
        "blk.0.ffn_up": (_FFN, _HIDDEN),
        "blk.0.ffn_down": (_HIDDEN, _FFN),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))


def _resolve(path: Path, settings: Settings, told: list[str] | None = None) -> ResolvedModel:
    return resolve_model(ModelSpec(model=str(path)), settings=settings, progress=None if told is None else told.append)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    folder = tmp_path_factory.mktemp("gguf")
    settings = Settings.from_env({"HOME": str(folder), "NIGHTMILL_CACHE": str(folder / "cache")})
    return _resolve(_write_gguf(folder / "tiny.gguf"), settings)


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_the_weights_are_bfloat16(converted: ResolvedModel) -> None:
    header = (converted.directory / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    tensors = json.loads(header[8 : 8 + length])
    tensors.pop("__metadata__")
    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    assert tensors["model.layers.0.self_attn.k_proj.weight"]["shape"] == [16, 32]
    assert _json(converted.directory / "config.json")["dtype"] == "bfloat16"


def test_the_configuration_is_clean(converted: ResolvedModel) -> None:
    config = _json(converted.directory / "config.json")
    assert config["eos_token_id"] == 258
    assert config["bos_token_id"] == 257
    assert not {"quantization_config", "_name_or_path", "_model_name_or_path"} & set(config)
    assert _json(converted.directory / "generation_config.json")["eos_token_id"] == 258
    assert _json(converted.directory / "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
    }


def test_the_tokenizer_is_mended_and_transformers_reads_the_same(converted: ResolvedModel) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(converted.directory), AutoTokenizer.from_pretrained(converted.directory)
    assert ours.encode("12")[0] == 257
    assert len(ours.encode("12")) == 3  # the merge of 1 and 2 must not happen: digits are split first
    assert ours.encode("12") == theirs("12").input_ids
    messages = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False) == "<s>hi"


def test_the_key_is_the_content_not_the_name(converted: ResolvedModel, tmp_path: Path) -> None:
    cache = converted.directory.parent.parent
    settings = Settings.from_env({"HOME": str(tmp_path), "NIGHTMILL_CACHE": str(cache)})
    told: list[str] = []
    again = _resolve(_write_gguf(tmp_path / "other-name.gguf"), settings, told)
    assert again.directory == converted.directory
    assert again.name == "other-name"
    assert not any("converting" in line for line in told)


def test_not_a_gguf_file(tmp_path: Path, settings: Settings) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="does not begin with GGUF"):
        _resolve(path, settings)


def test_a_file_cut_short(tmp_path: Path, settings: Settings) -> None:
    path = _write_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ModelError, match=r"model\.gguf is damaged or cut short"):
        _resolve(path, settings)
    assert not list((settings.cache / "models").iterdir())


def test_an_unknown_pre_tokenizer_is_refused_in_its_own_words(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(ModelError, match=r"'brand-new'[^\n]*wrong tokens\n.*smollm"):
        _resolve(_write_gguf(tmp_path / "model.gguf", pre="brand-new"), settings)


def test_a_file_without_weights_is_refused_and_its_old_tokenizer_told(tmp_path: Path, settings: Settings) -> None:
    told: list[str] = []
    with pytest.raises(ModelError, match=r"lacks .* of the model's tensors"):
        _resolve(_write_gguf(tmp_path / "vocab.gguf", pre=None, tensors=False), settings, told)
    assert any("warning" in line and "does not name its pre-tokenizer" in line for line in told)
