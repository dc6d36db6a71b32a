"""A GGUF file's tokenizer, built from what the file says."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from nightmill.errors import ModelError
from nightmill_worker.model.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_SPACE_MARK = "\u2581"
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<turn|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufMetadata:
    """What a GGUF file says of its model and tokenizer."""

    name: str  # of the file, for messages
    fields: dict[str, Any]  # keys as in the file; arrays as lists

    @staticmethod
    def read(path: Path) -> "GgufMetadata":
        """Read the header.

        Raises:
            ModelError: the header is damaged, or the file has no tokenizer.
        """
        from gguf import GGUFReader

        try:
            reader = GGUFReader(path)
            fields = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise ModelError(f"{path.name} is damaged or cut short: {error}", hint="download it again") from error
        metadata = GgufMetadata(name=path.name, fields=fields)
        if not metadata.tokenizer("tokens"):
            raise ModelError(f"{path.name} has no tokenizer in it", hint="give the model's directory instead")
        return metadata

    def tokenizer(self, key: str, default: Any = None) -> Any:
        """The value of `tokenizer.ggml.<key>`."""
        return self.fields.get(f"tokenizer.ggml.{key}", default)

    @property
    def is_byte_level(self) -> bool:
        """Byte-level BPE: the kind that has a pre-tokenizer name."""
        return bool(self.tokenizer("model") == "gpt2")

    @property
    def chat_template(self) -> str | None:
        """The default chat template."""
        return self.fields.get("tokenizer.chat_template")

    @property
    def context_length(self) -> int | None:
        """Positions the model was made for."""
        architecture = self.fields.get("general.architecture")
        return self.fields.get(f"{architecture}.context_length")

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        """What `tokenizer.ggml.pre` stands for; a file without it was made before there was more than one.

        Raises:
            ModelError: a name we do not know. Guessing would give wrong tokens without any sign of it.
        """
        name = self.tokenizer("pre", "default")
        if name not in PRE_TOKENIZERS:
            raise ModelError(
                f"{self.name} uses the pre-tokenizer {name!r}, which is not known here: its text would be cut into "
                "the wrong tokens",
                hint=f"give --model the directory with the model's tokenizer.json. Known: {', '.join(PRE_TOKENIZERS)}",
            )
        return PRE_TOKENIZERS[name]

    @property
    def adds_bos(self) -> bool:
        """Whether plain text gets a BOS token in front."""
        if self.token_id("bos") is None:
            return False
        stated = self.tokenizer("add_bos_token")
        if stated is not None:
            return bool(stated)
        return self.pre_tokenizer.adds_bos if self.is_byte_level else self.tokenizer("model") == "llama"

    def token_id(self, role: str) -> int | None:
        """Id of the `bos`, `eos`, `eot`, `eom`, `unknown` or `padding` token."""
        token_id = self.tokenizer(f"{role}_token_id")
        return token_id if token_id is not None and 0 <= token_id < len(self.tokenizer("tokens")) else None

    def token(self, role: str) -> str | None:
        """Text of the token with that role."""
        token_id = self.token_id(role)
        return None if token_id is None else self.tokenizer("tokens")[token_id]

    def end_token_ids(self) -> tuple[int, ...]:
        """EOS first, then the other tokens that end an answer.

        Files name EOS and sometimes the end of a turn; where they do not, an end-of-turn control token that the chat
        template writes is one (a chat model whose EOS is `<eos>` would otherwise never stop).
        """
        named = [self.token_id(role) for role in ("eos", "eot", "eom")]
        tokens, template = self.tokenizer("tokens"), self.chat_template or ""
        types = self.tokenizer("token_type") or [_CONTROL] * len(tokens)
        written = {text for text in _END_OF_TURN if text in template}
        by_text = [i for i, text in enumerate(tokens) if text in written and types[i] in (_CONTROL, _USER_DEFINED)]
        return tuple(dict.fromkeys(i for i in [*named, *by_text] if i is not None))


def build_byte_level_tokenizer(metadata: GgufMetadata) -> Any:
    """A `tokenizers.Tokenizer` for a byte-level BPE file."""
    tokens = metadata.tokenizer("tokens")
    pre_tokenizer = metadata.pre_tokenizer
    model = models.BPE(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in metadata.tokenizer("merges", ())],
        ignore_merges=pre_tokenizer.ignore_merges,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer.build()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata.tokenizer("token_type") or (), strict=False):
        # Both kinds are matched whole in text; only control tokens vanish from decoded text.
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    return tokenizer


def mend_sentencepiece(tokenizer: Any, metadata: GgufMetadata) -> Any:
    """Return the tokenizer with what the file (and for Phi-3, the model) wants otherwise than its class does.

    With `add_space_prefix`, as in Llama 2, every piece of text between special tokens gets a space mark in front,
    also one that begins with a space; transformers' conversion leaves that one alone, and the ids differ.
    """
    spaces = normalizers.Replace(" ", _SPACE_MARK)
    if metadata.tokenizer("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), spaces])
        strip = [decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.normalizer = spaces
        strip = []
    tokenizer.pre_tokenizer = None
    back = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(back)
    if metadata.fields.get("general.architecture") == "phi3":
        return _eating_space_behind(tokenizer)
    return tokenizer


def _eating_space_behind(tokenizer: Any) -> Any:
    """Phi-3's added tokens take the white space behind them: its chat template writes a line end there."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    return Tokenizer.from_str(json.dumps(content))


def set_template(tokenizer: Any, metadata: GgufMetadata) -> None:
    """Make `add_special_tokens` add what the file says: BOS or nothing."""
    bos = metadata.token("bos")
    if metadata.adds_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[f"{bos}:0", "$A:0"],
            pair=[f"{bos}:0", "$A:0", f"{bos}:1", "$B:1"],
            special_tokens=[(bos, metadata.token_id("bos"))],
        )
    else:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def tokenizer_config(metadata: GgufMetadata) -> dict[str, Any]:
    """`tokenizer_config.json`, so that transformers loads the same tokenizer as we do."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": metadata.adds_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.context_length,
        "bos_token": metadata.token("bos"),
        "eos_token": metadata.token("eos"),
        "unk_token": metadata.token("unknown"),
        "pad_token": metadata.token("padding"),
    }
    return {key: value for key, value in config.items() if value is not None}
