import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from nightmill.errors import ModelError
from nightmill_worker.feed.tokenizer import BYTE_OF_CHARACTER, Tokenizer

MakeTokenizer = Callable[..., Path]

TEXTS = [
    "12345 is 3.14, 10^5",
    "In 2024, 17 of 1,234,567 items",
    "été — naïve “quotes” …",
    "你好，世界 日本語 한국어 नमस्ते",
    "emoji 🚀👩‍👩‍👧 and\ttabs\n\n  spaces  ",
    "a , b . c ! don 't it 's",
    "<|im_start|>user\nhi 42<|im_end|>\n",
    "",
]


@pytest.fixture
def make(tmp_path: Path) -> MakeTokenizer:
    """A directory with a tokenizer of single bytes and the tokens <s> </s> <x>, and the given other files."""

    def build(*, post_processor: Any = None, **files: Any) -> Path:
        backend = Backend(models.BPE(vocab={character: i for i, character in enumerate(BYTE_OF_CHARACTER)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>", "<x>")])
        if post_processor is not None:
            backend.post_processor = post_processor
        backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return build


def _adds_bos() -> Any:
    return processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 256)])


@pytest.mark.demo_model
def test_known_ids(demo_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(demo_model_dir)
    assert tokenizer.encode("12345") == [33, 34, 35, 36, 37]
    assert tokenizer.encode("hello 12345") == [28120, 216, 33, 34, 35, 36, 37]
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49_152


@pytest.mark.demo_model
def test_ids_and_texts_are_transformers(demo_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(demo_model_dir), AutoTokenizer.from_pretrained(demo_model_dir)
    ids = ours.encode_batch(TEXTS)
    assert ids == theirs(TEXTS).input_ids
    assert [ours.decode(row) for row in ids] == [theirs.decode(row, skip_special_tokens=True) for row in ids]
    assert ours.decode(ids[5]) == TEXTS[5]  # no space is taken out before punctuation


@pytest.mark.demo_model
def test_the_process_stays_free_of_torch_and_transformers(demo_model_dir: Path) -> None:
    program = f"""
import sys
from nightmill.records import ModelSpec
from nightmill_worker.feed.chat import PromptRenderer
from nightmill_worker.feed.detokenize import completion_text
from nightmill_worker.feed.prefix import PrefixEncoder
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.source import resolve_model
directory = resolve_model(ModelSpec(model={str(demo_model_dir)!r})).directory
tokenizer = Tokenizer.load(directory)
text = PromptRenderer(tokenizer, system_prompt="Be brief.").render("hi", None).text
tokenizer.decode(PrefixEncoder(tokenizer).encode_batch([text])[0])
print(sorted({{"torch", "transformers", "numpy", "huggingface_hub", "boto3"}} & set(sys.modules)))
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_eos_is_the_union_of_every_place(make: MakeTokenizer) -> None:
    directory = make(
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [9, 7]},
        tokenizer_config={"eos_token": {"content": "</s>"}},
    )
    assert Tokenizer.load(directory).eos_token_ids == (7, 9, 257)


def test_eos_of_a_nested_text_config(make: MakeTokenizer) -> None:
    assert Tokenizer.load(make(config={"text_config": {"eos_token_id": 3}})).eos_token_ids == (3,)


def test_special_tokens_map_is_read_but_goes_behind(make: MakeTokenizer) -> None:
    directory = make(
        special_tokens_map={"bos_token": "<s>", "eos_token": "<x>"}, tokenizer_config={"eos_token": "</s>"}
    )
    assert Tokenizer.load(directory).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_bos_is_added_once(make: MakeTokenizer) -> None:
    tokenizer = Tokenizer.load(make(post_processor=_adds_bos(), tokenizer_config={"bos_token": "<s>"}))
    assert tokenizer.encode("A") == [256, 32]
    assert tokenizer.encode("<s>A") == [256, 32]
    assert tokenizer.encode("A", add_special_tokens=False) == [32]
    assert tokenizer.encode("<s>A", add_special_tokens=False) == [256, 32]
    assert tokenizer.encode("<s><s>A", add_special_tokens=False) == [256, 256, 32]


@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.parametrize("post_processor", [True, False])
def test_tokenizer_json_decides_on_bos_as_in_transformers(
    make: MakeTokenizer, add_bos_token: bool, post_processor: bool
) -> None:
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_bos_token": add_bos_token}
    directory = make(post_processor=_adds_bos() if post_processor else None, tokenizer_config=config)
    ids = Tokenizer.load(directory).encode("A")
    assert ids == ([256, 32] if post_processor else [32])
    assert AutoTokenizer.from_pretrained(directory)("A").input_ids == ids


def test_truncation_and_padding_of_the_file_are_switched_off(make: MakeTokenizer) -> None:
    directory = make()
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    assert Tokenizer.load(directory).encode_batch(["ABC", "A"]) == [[32, 33, 34], [32]]


def test_tokens_that_only_the_configuration_knows(make: MakeTokenizer) -> None:
    added = {"259": {"content": "<y>", "special": True}, "260": {"content": "<tool>", "special": False}}
    tokenizer = Tokenizer.load(make(tokenizer_config={"added_tokens_decoder": added, "pad_token": "<pad>"}))
    assert tokenizer.encode("<y><tool><pad>") == [259, 260, 261]
    assert tokenizer.decode([259, 260, 261]) == "<tool>"
    assert tokenizer.vocab_size == 262


def test_pending_bytes_of_a_byte_level_tokenizer(make: MakeTokenizer) -> None:
    tokenizer = Tokenizer.load(make())
    for text in ("é", "€", "🚀", "a🚀"):
        ids = tokenizer.encode(text)
        assert tokenizer.pending_bytes(ids) == 0
        width = len(text[-1].encode())
        assert [tokenizer.pending_bytes(ids[:-cut]) for cut in range(1, width)] == list(range(width - 1, 0, -1))
    assert tokenizer.pending_bytes(tokenizer.encode("\N{REPLACEMENT CHARACTER}")) == 0
    assert tokenizer.pending_bytes(tokenizer.encode("🚀")[1:]) == 0  # no lead: broken, but nothing is to come
    assert tokenizer.pending_bytes([]) == 0


def test_pending_bytes_of_a_byte_fallback_tokenizer(tmp_path: Path) -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.pending_bytes([256, 0xF0, 0x9F]) == 2
    assert tokenizer.pending_bytes([0xF0, 0x9F, 0x9A, 0x80]) == 0
    assert tokenizer.pending_bytes([0xF0, 256]) == 0


def test_a_missing_or_broken_file_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_no_template(make: MakeTokenizer) -> None:
    tokenizer = Tokenizer.load(make())
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="--no-chat"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
