"""The flags of `nightmill run` that are about the engine. Those of the job: nightmill.cli.job_options."""

import re
from typing import Any

import click

from nightmill.cli.param_types import ByteSize
from nightmill.cli.sections import section
from nightmill.errors import ConfigError
from nightmill.records import DEFAULT_LOOK_AHEAD, EngineOptions
from nightmill.tier_weights import DEFAULT_WEIGHTS, TierWeights


class SwapSpace(ByteSize):
    """As ByteSize, but a bare number is GiB, as in vLLM, and 0 is none."""

    name = "swap space"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse."""
        text = str(value).strip()
        if re.fullmatch(r"0+(?:\.0+)?", text):
            return 0
        return super().convert(f"{text}G" if re.fullmatch(r"[\d.]+", text) else text, param, ctx)


class TierShares(click.ParamType[TierWeights]):
    """`high=80,normal=15,low=5`; a tier that is left out keeps its default."""

    name = "tier shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TierWeights:
        """Parse."""
        try:
            return TierWeights.parse(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


_positive = click.IntRange(1)

engine_options = section(
    "Engine: speed and memory, never the answers",
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="auto: a GPU where there is one that torch can use.",
    ),
    click.option(
        "--max-num-seqs", type=_positive, help="Rows in the batch at most.  [default: 64 on a CPU, 256 on a GPU]"
    ),
    click.option(
        "--max-num-batched-tokens",
        type=_positive,
        help="Tokens in one step.  [default: 512 on a CPU, 8192 on a GPU]",
    ),
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
        "--gpu-memory-utilization",
        type=click.FloatRange(0, 1, min_open=True),
        default=0.9,
        show_default=True,
        help="Share of a GPU's memory for weights, pages and the rest; what others hold there counts.",
    ),
    click.option("--enforce-eager", is_flag=True, help="GPU: record no graphs of decode steps; starts sooner."),
    click.option(
        "--async-scheduling/--no-async-scheduling",
        default=None,
        help="GPU: decide a step while the one before runs.  [default: async-scheduling]",
    ),
    click.option(
        "--swap-space",
        type=SwapSpace(),
        metavar="SIZE",
        help="For KV of rows that had to give way: 512M, or GiB; 0: compute it again.  [default: a fourth of the pool]",
    ),
    click.option(
        "--tier-share",
        type=TierShares(),
        default=str(DEFAULT_WEIGHTS),
        show_default=True,
        metavar="TIER=N,…",
        help="What each tier gets of the computed tokens at least while it has work; what it does not use flows down.",
    ),
    click.option(
        "--look-ahead",
        type=click.IntRange(0),
        default=DEFAULT_LOOK_AHEAD,
        show_default=True,
        help="Rows of a tier that wait in the engine, so that those with a common prefix run together.",
    ),
    click.option(
        "--num-threads",
        "--threads",
        type=_positive,
        help="CPU threads of the engine.  [default: one a core, as far as the control group's quota goes]",
    ),
    click.option("--in-process", is_flag=True, hidden=True),
)


def read_engine(flags: dict[str, Any]) -> EngineOptions:
    """What the flags of `engine_options` say."""
    return EngineOptions(
        device=flags["device"],
        page_size=flags["page_size"],
        max_num_seqs=flags["max_num_seqs"],
        max_num_batched_tokens=flags["max_num_batched_tokens"],
        enable_prefix_caching=flags["enable_prefix_caching"],
        enable_shared_attention=flags["enable_shared_attention"],
        gpu_memory_utilization=flags["gpu_memory_utilization"],
        enforce_eager=flags["enforce_eager"],
        async_scheduling=flags["async_scheduling"],
        pool_bytes=flags["kv_cache_memory_bytes"],
        swap_bytes=flags["swap_space"],
        num_threads=flags["num_threads"],
        look_ahead=flags["look_ahead"],
        tier_shares=flags["tier_share"],
    )
