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
_KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_SYMBOL_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3 = _ASCII_SYMBOL_WORD + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _LINES + _SPACES
# DeepSeek LLM lists cased letters one range after the other instead of naming a Unicode property.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _KANA_AND_HAN
)
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES + _SPACES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]" + _SPACES
_EXAONE_MOE = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
    + _SPACES
)


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
    ("qwen35", PreTokenizer(cuts=(_QWEN35,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer(cuts=(_BAILING,))),
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
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _CJK,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(cuts=(r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer(cuts=(_BLOOM,))),
    ("youtu", PreTokenizer(cuts=(_YOUTU_SCRIPTS, _cased(r"\p{N}", _CONTRACTIONS)), ignore_merges=True)),
    ("exaone-moe", PreTokenizer(cuts=(_EXAONE_MOE,))),
    ("superbpe", PreTokenizer(cuts=(r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("viking", PreTokenizer(cuts=(_BLOOM, r"\p{N}"))),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: kind for names, kind in _GROUPS for name in names.split()}
"""By `tokenizer.ggml.pre`; `default` is what a file without the key was made with."""
