"""A job's flags are defined once: `run`, `submit` and the client take the same, with the same defaults."""

import shlex
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from nightmill.cli.job_options import job_flags, read_job
from nightmill.cli.main import cli
from nightmill.job_flags import FLAG_NAMES, ignored_options, read_flags
from nightmill.records import JobOptions, JobSpec, ModelSpec
from nightmill.run_command import run_command
from nightmill.sampling import SamplingParams
from nightmill.states import Tier

SEEN: list[tuple[JobSpec, JobOptions]] = []


@click.command()
@click.argument("inputs", nargs=-1, required=True)
@job_flags
def probe(inputs: tuple[str, ...], output: str, **flags: Any) -> None:
    SEEN.append(read_job(inputs, output, flags))


def parse(arguments: list[str]) -> tuple[JobSpec, JobOptions]:
    SEEN.clear()
    result = CliRunner().invoke(probe, arguments)
    assert result.exit_code == 0, result.output
    return SEEN[0]


def options_of(name: str) -> dict[str, click.Parameter]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return {str(parameter.name): parameter for parameter in command.params}


def test_run_and_submit_take_every_flag_of_a_job() -> None:
    run, submit = options_of("run"), options_of("submit")
    for name in FLAG_NAMES | {"output", "model"}:
        assert run[name].to_info_dict() == submit[name].to_info_dict(), name


def test_submit_takes_no_flag_of_the_engine() -> None:
    assert set(options_of("submit")) == FLAG_NAMES | {
        *("inputs", "output", "model"),
        *("stay", "timeout", "as_json", "quiet"),
    }


def test_the_command_line_without_flags_is_the_client_without_flags() -> None:
    assert parse(["in", "-o", "out", "--model", "m"]) == read_flags(["in"], "out", "m", {})
    assert parse(["in", "-o", "out", "--model", "m"]) == (
        JobSpec(inputs=("in",), output="out", model=ModelSpec(model="m")),
        JobOptions(),
    )


def test_every_flag_reaches_the_job() -> None:
    """A flag that is read and then dropped would be a silent lie."""
    flags: dict[str, Any] = {
        "revision": "r", "dtype": "float32", "quantization": "int8", "load_format": "dummy", "max_model_len": 7,
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "max_tokens": 9, "min_tokens": 1, "stop": ["a"],
        "stop_token_ids": [3],
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logprobs": 2, "ignore_eos": True,
        "seed": 5, "prompt_column": "p", "messages_column": "q", "system_prompt": "s", "chat": False,
        "output_column": "c", "output_prefix": "x", "strict": True, "allow_duplicate_ids": True, "check_ids": False,
        "tier": "low", "shard_rows": 10, "max_failed_rows": 2, "idempotency_key": "k", "expires_in": "2h",
    }  # fmt: skip
    assert flags.keys() == FLAG_NAMES
    plain = read_flags(["in"], "out", "m", {})
    for name, value in flags.items():
        assert read_flags(["in"], "out", "m", {name: value}) != plain, name  # type: ignore[misc]


def test_an_unknown_flag_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_tokns"):
        read_flags(["in"], "out", "m", {"max_tokns": 3})  # type: ignore[typeddict-unknown-key]


text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=8)
word = text.filter(lambda value: not value.startswith(("-", "@")))
numbers = st.integers(1, 1000)
specs = st.builds(
    JobSpec,
    inputs=st.lists(word, min_size=1, max_size=3).map(tuple),
    output=word,
    model=st.builds(
        ModelSpec,
        model=word,
        revision=st.none() | text,
        dtype=st.sampled_from(["auto", "float16"]),
        quantization=st.sampled_from([None, "int8"]),
        max_model_len=st.none() | numbers,
    ),
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1),
        top_k=st.integers(0, 50),
        max_tokens=st.integers(5, 99),
        stop=st.lists(text, max_size=2).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 99), max_size=2).map(tuple),
        presence_penalty=st.floats(-2, 2),
        logprobs=st.none() | st.integers(0, 20),
        ignore_eos=st.booleans(),
    ),
    seed=st.integers(-5, 5),
    prompt_column=st.none() | text,
    system_prompt=st.none() | text.filter(lambda value: not value.startswith("@")),
    chat=st.none() | st.booleans(),
    output_prefix=st.just("") | text,
    strict=st.booleans(),
    check_ids=st.booleans(),
)
options = st.builds(
    JobOptions,
    tier=st.sampled_from(Tier),
    shard_rows=numbers,
    max_failed_rows=st.none() | st.integers(0, 9),
    idempotency_key=st.none() | text,
    expires_in_s=st.none() | st.floats(1, 1e6).map(lambda seconds: round(seconds, 3)),
)


@given(specs, options)
def test_the_command_that_is_shown_makes_the_same_job(spec: JobSpec, wanted: JobOptions) -> None:
    words = shlex.split(run_command(spec, wanted))
    assert words[:2] == ["nightmill", "run"]
    assert parse(words[2:]) == (spec, wanted)


def test_options_that_an_existing_job_keeps_are_named(make_info: Any) -> None:
    job = make_info(options=JobOptions(shard_rows=100, tier=Tier.HIGH))
    assert ignored_options(JobOptions(shard_rows=100), job) == []
    (line,) = ignored_options(JobOptions(shard_rows=200), job)
    assert "--shard-rows 200" in line
    assert "100" in line
    assert len(ignored_options(JobOptions(shard_rows=100, tier=Tier.LOW, expires_in_s=60.0), job)) == 2
