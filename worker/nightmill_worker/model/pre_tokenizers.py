"""How a byte-level BPE vocabulary cuts text before merging, by the name a GGUF file gives it.

A GGUF file stores no regular expression, only a name (`tokenizer.ggml.pre`); whoever reads the file must know what
the name stands for. transformers knows some of the names and treats the others as GPT-2's, which gives other tokens
without any sign of it. The table follows llama.cpp's `llama-vocab.cpp` (which names there are, what they share,
whether merges are skipped for words of the vocabulary, whether BOS is added) and, where that file approximates the
model's own `tokenizer.json` for its regex engine, the model's own expression.

Each expression in a cut is applied to the pieces the one before it left; what no expression matches stays a piece.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s+(?!\S)|\s+"
_LINES = r"|\s*[\r\n]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _SPACES


def _words(
    digits: str, *, contractions: str = _CONTRACTIONS + "|", symbols: str = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
) -> str:
    """The family that began with cl100k: contractions, words with one leading symbol, digits, symbols, line ends."""
    return contractions + r"[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + symbols + _LINES + _SPACES


def _cased(digits: str, contractions: str = "") -> str:
    """The family that began with o200k: a word is cut where lower case turns into upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    suffix = contractions + "?" if contractions else ""
    words = f"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}|"
    return words + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES + _SPACES


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_GPT4O = _cased(r"\p{N}{1,3}", _CONTRACTIONS)
_KANA_AND_HAN = "[一-龥぀-ゟ゠-ヿ]+"
_CJK = "[一-龥ࠀ-一가-퟿]+"
_ASCII_SYMBOL_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3 = _ASCII_SYMBOL_WORD + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _LINES + _SPACES
# DeepSeek LLM lists cased letters one range after the other instead of naming a Unicode property.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⲳⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """What a name stands for."""

    cuts: tuple[str, ...]  # Oniguruma expressions, in order
    ignore_merges: bool = False  # a piece that is itself a token is taken whole
    adds_bos: bool = False  # when the file does not say

    def build(self) -> Any:
        """A `tokenizers` pre-tokenizer: the cuts, then bytes as printable characters."""
        splits = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in self.cuts]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer(cuts=(_LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer(cuts=(_LLAMA3,))),
    ("glm4 glm5", PreTokenizer(cuts=(_LLAMA3,), ignore_merges=True)),
    (
        "minicpm5",
        PreTokenizer(cuts=(r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer(cuts=(_QWEN2,)),
    ),
    ("ufakzeka", PreTokenizer(cuts=(_words(r"\p{N}", contractions=""),))),
    ("laguna", PreTokenizer(cuts=(r"[^\n]+|[\n]+", _QWEN2))),
    (
        "qwen35",
        PreTokenizer(
            cuts=(
                _CONTRACTIONS
                + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
                + _LINES
                + _SPACES,
            )
        ),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            cuts=(
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]" + _SPACES,
            )
        ),
    ),
    ("seed-coder", PreTokenizer(cuts=(_words(r"\p{N}", symbols=r"| ?[^\s\p{L}\p{N}\r\n]+"),))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(cuts=(_GPT4O,))),
    ("tiny_aya cohere2moe", PreTokenizer(cuts=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    ("tekken", PreTokenizer(cuts=(_cased(r"\p{N}"),), ignore_merges=True, adds_bos=True)),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer(cuts=(r"\p{N}", _GPT2)),
    ),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4 modern-bert "
        "jina-es jina-de jina-v2-es jina-v2-de",
        PreTokenizer(cuts=(_GPT2,)),
    ),
    ("falcon", PreTokenizer(cuts=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("default", PreTokenizer(cuts=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("deepseek-coder", PreTokenizer(cuts=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))),
    (
        "deepseek-llm",
        PreTokenizer(
            cuts=(
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _CJK,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(cuts=(r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer(cuts=(_BLOOM,))),
    ("viking", PreTokenizer(cuts=(_BLOOM, r"\p{N}"))),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: kind for names, kind in _GROUPS for name in names.split()}
"""By `tokenizer.ggml.pre`; `default` is what a file without the key was made with."""
