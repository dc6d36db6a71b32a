"""The flags of `nightmill run`, by what they are about. Where vLLM has a flag of the same meaning, its name is ours."""

import re
from typing import Any

import click

from nightmill_worker.cli.sections import section

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_DURATION_S = 100 * 365 * 86400
_MAX_BYTES = 2**63
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Duration(click.ParamType[float]):
    """`90s`, `30m`, `12h`, `2d`; seconds as a float."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value).strip())
        seconds = float(match[1]) * _SECONDS[match[2] or "s"] if match else 0.0
        if not 0 < seconds <= _MAX_DURATION_S:
            self.fail(f"{_shown(value)} is not a duration like 90s, 30m, 12h or 2d", param, ctx)
        return seconds


class ByteSize(click.ParamType[int]):
    """`512M`, `4G`, `4GiB` or a number of bytes."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
        size = float(match[1]) * _BYTES[match[2]] if match else 0.0
        if not 0 < size < _MAX_BYTES:
            self.fail(f"{_shown(value)} is not a size like 512M or 4G", param, ctx)
        return int(size)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


class SwapSpace(ByteSize):
    """As ByteSize, but a bare number is GiB, as in vLLM, and 0 is none."""

    name = "swap space"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse."""
        text = str(value).strip()
        if re.fullmatch(r"0+(?:\.0+)?", text):
            return 0
        return super().convert(f"{text}G" if re.fullmatch(r"[\d.]+", text) else text, param, ctx)


_positive = click.IntRange(1)

input_options = section(
    "Input and output",
    click.option("-o", "--output", required=True, metavar="DIR", help="For the parts: new, empty, or this job's."),
    click.option("--prompt-column", metavar="NAME", help="Column with the prompts.  [default: prompt]"),
    click.option("--messages-column", metavar="NAME", help="Column with chat messages.  [default: messages]"),
    click.option("--system-prompt", metavar="TEXT|@FILE", help="Put before every row that has no system message."),
    click.option("--chat/--no-chat", default=None, help="Use the chat template.  [default: when the model has one]"),
    click.option("--allow-duplicate-ids", is_flag=True, help="Accept a custom_id that stands in several rows."),
    click.option("--check-ids/--no-check-ids", default=True, help="Look for duplicate ids first.", show_default=True),
    click.option("--output-column", default="completion", show_default=True, metavar="NAME", help="For the text."),
    click.option("--output-prefix", default="", metavar="TEXT", help="Before the name of every column we add."),
)

model_options = section(
    "Model",
    click.option(
        "--model",
        required=True,
        metavar="MODEL",
        help="A directory, a .gguf file, a hub id (org/name), s3://…, or demo: a small model for trying things out.",
    ),
    click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub model."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
        default="auto",
        show_default=True,
        help="Of weights and KV.",
    ),
    click.option(
        "--load-format",
        type=click.Choice(["auto", "dummy"]),
        default="auto",
        show_default=True,
        help="dummy: random weights from the config alone, for measurements.",
    ),
    click.option("--max-model-len", type=_positive, metavar="N", help="Prompt and completion tokens of a row at most."),
)

sampling_options = section(
    "Sampling: defaults, a row's sampling_params go before them",
    click.option("--max-tokens", type=_positive, default=256, show_default=True, help="Generated tokens of a row."),
    click.option("--min-tokens", type=click.IntRange(0), default=0, show_default=True, help="No stop before these."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0: the most likely token."),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True, help="0: all."),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("--stop", multiple=True, metavar="TEXT", help="End a completion before this text; may be repeated."),
    click.option("--stop-token-ids", type=int, multiple=True, metavar="ID", help="May be repeated."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
    click.option(
        "--logprobs", type=click.IntRange(0, 20), metavar="K", help="Log probabilities of K tokens a position."
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on to --max-tokens."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of every random draw, with the row's place."),
    click.option("--strict", is_flag=True, help="max_tokens beyond the context is a row error, not a shorter answer."),
)

job_options = section(
    "Job",
    click.option("--shard-rows", type=_positive, default=2000, show_default=True, help="Rows of an output part."),
    click.option("--max-failed-rows", type=click.IntRange(0), metavar="N", help="Stop when more rows than this fail."),
    click.option("--expires-in", type=Duration(), help="Stop after this long: 90s, 30m, 12h, 2d."),
    click.option("--idempotency-key", metavar="TEXT", help="A second job with this key is the first one."),
)

engine_options = section(
    "Engine: speed and memory, never the answers",
    click.option("--max-num-seqs", type=_positive, default=64, show_default=True, help="Rows in the batch at most."),
    click.option("--max-num-batched-tokens", type=_positive, help="Tokens in one step.  [default: 512]"),
    click.option("--page-size", "--block-size", type=click.IntRange(1), help="Tokens of a KV page.  [default: 16]"),
    click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        show_default=True,
        help="Compute a prefix that rows have in common once.",
    ),
    click.option(
        "--enable-shared-attention/--no-enable-shared-attention",
        default=True,
        show_default=True,
        help="Read the pages of such a prefix once for all rows in the batch.",
    ),
    click.option("--kv-cache-memory-bytes", type=ByteSize(), metavar="SIZE", help="KV page pool: 512M, 4G."),
    click.option(
        "--swap-space",
        type=SwapSpace(),
        metavar="SIZE",
        help="For KV of rows that had to give way: 512M, or GiB; 0: compute it again.  [default: a fourth of the pool]",
    ),
    click.option("--num-threads", type=_positive, help="CPU threads of the engine.  [default: all cores]"),
    click.option("--in-process", is_flag=True, hidden=True),
)
