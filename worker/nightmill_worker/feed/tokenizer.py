"""Text to token ids and back, without torch."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from nightmill.errors import ModelError
from nightmill_worker.feed.template import ChatTemplate, load_chat_template

_LONGEST_CHARACTER = 4  # bytes in UTF-8
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: themselves where printable, else from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
"""What each character of a byte-level vocabulary stands for."""


class Tokenizer:
    """A model directory's tokenizer: the `tokenizers` library under the rules of transformers.

    Loads what `AutoTokenizer` would, but keeps torch and transformers out of the process.
    """

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
        template: ChatTemplate | None,
    ) -> None:
        self._backend = backend
        self._template = template
        self.special_tokens = dict(special_tokens)  # by role: bos_token, eos_token, …
        self.eos_token_ids = eos_token_ids
        bos = self.special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)
        self.is_byte_level = b"ByteLevel" in backend.decoder.__getstate__() if backend.decoder else False

    @classmethod
    def load(cls, directory: Path | str, *, now: datetime | None = None) -> "Tokenizer":
        """Read `tokenizer.json`, `tokenizer_config.json`, the chat template and the EOS ids.

        As in transformers, tokenizer.json alone decides which special tokens plain text gets: `add_bos_token` in
        the configuration does not count.

        `now` is the date that chat templates see (see `ChatTemplate`).

        Raises:
            ModelError: a file is missing or damaged.
        """
        directory = Path(directory)
        config = _read_json(directory / "tokenizer_config.json")
        named = _special_tokens(directory, config)
        backend = _load_backend(directory)
        _add_missing_tokens(backend, config, named)
        backend.no_truncation()
        backend.no_padding()
        template = load_chat_template(directory, config, named, now=now)
        return cls(backend, special_tokens=named, eos_token_ids=_eos_ids(directory, backend, named), template=template)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's logits may be padded to more."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """True when `render_chat` can be used."""
        return self._template is not None

    @property
    def template_source(self) -> str:
        """The chat template itself; empty without one."""
        return "" if self._template is None else self._template.source

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        return self._backend

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, encoded in parallel (`TOKENIZERS_PARALLELISM`, `RAYON_NUM_THREADS`).

        Text from `render_chat` already has its special tokens: pass False for it. Where a plain text begins with the
        BOS token that `add_special_tokens` would put there, it is not doubled.
        """
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        rows: list[list[int]] = [encoding.ids for encoding in encodings]
        if add_special_tokens and self.bos_token_id is not None:
            doubled = [self.bos_token_id, self.bos_token_id]
            rows = [row[1:] if row[:2] == doubled else row for row in rows]
        return rows

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text], add_special_tokens)[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids without special tokens; spaces stay as the tokens have them."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def pending_bytes(self, token_ids: Sequence[int]) -> int:
        """How many bytes of an unfinished UTF-8 character the ids end with (0 when they end with a whole one)."""
        tail = b"".join(self._token_bytes(token_id) for token_id in token_ids[-_LONGEST_CHARACTER:])
        for length in range(1, min(len(tail), _LONGEST_CHARACTER - 1) + 1):
            byte = tail[-length]
            if byte & 0b1100_0000 == 0b1000_0000:  # a continuation: the lead is further left
                continue
            needed = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
            return length if needed > length else 0
        return 0

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        if self.is_byte_level and all(character in BYTE_OF_CHARACTER for character in token):
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        if len(token) == len("<0x00>") and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.encode()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The prompt for an answer to `messages`, by the model's own chat template.

        Raises:
            RowError: `template_error`, when the template refuses the messages.
            ModelError: the model has no chat template.
        """
        if self._template is None:
            raise ModelError("the model has no chat template", hint="use --no-chat")
        return self._template.render(messages, tools=tools)


def _load_backend(directory: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json",
            hint="make one with transformers: AutoTokenizer.from_pretrained(directory).save_pretrained(directory)",
        )
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; tokenizer_config.json goes before the older special_tokens_map.json."""
    found: dict[str, str] = {}
    for source in (_read_json(directory / "special_tokens_map.json"), config):
        for role in _ROLES:
            value = source.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[role] = text
    return found


def _add_missing_tokens(backend: Any, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add tokens that only the configuration knows, as transformers does."""
    from tokenizers import AddedToken

    for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            backend.add_tokens([AddedToken(entry["content"], **flags)])
    for text in named.values():
        if backend.token_to_id(text) is None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _eos_ids(directory: Path, backend: Any, named: Mapping[str, str]) -> tuple[int, ...]:
    """Union of config.json, generation_config.json and the tokenizer, sorted."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        config = _read_json(directory / name)
        for holder in (config, config.get("text_config") or {}):
            value = holder.get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    token_id = backend.token_to_id(named.get("eos_token", ""))
    return tuple(sorted(found if token_id is None else found | {token_id}))
