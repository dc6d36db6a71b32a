import json

import pytest

from nightmill import messages
from nightmill.states import Tier


@pytest.mark.parametrize("shard_id", [0, 1, 2**62])
def test_a_message_comes_back_as_it_went(shard_id: int) -> None:
    assert messages.decode(json.loads(json.dumps(messages.encode(shard_id)))) == shard_id
    (body,), kwargs, _ = json.loads(messages.task_body(shard_id))
    assert (messages.decode(body), kwargs) == (shard_id, {})


@pytest.mark.parametrize(
    "body",
    [None, 7, "7", [], {}, {"v": 1}, {"shard_id": 7}, {"v": 2, "shard_id": 7}]
    + [{"v": 1, "shard_id": wrong} for wrong in (None, "7", 7.0, True, -1)],
)
def test_what_is_not_ours_is_refused(body: object) -> None:
    with pytest.raises(ValueError, match="message"):
        messages.decode(body)


def test_an_error_does_not_quote_a_novel() -> None:
    with pytest.raises(ValueError) as caught:
        messages.decode("x" * 100_000)
    assert len(str(caught.value)) < 300


def test_each_tier_has_a_queue_with_the_version_in_its_name() -> None:
    assert {tier: f"nightmill.{tier}.v1" for tier in Tier} == messages.QUEUES


def test_two_rings_are_two_messages() -> None:
    assert messages.new_task_id() != messages.new_task_id()


@pytest.mark.parametrize("shard_id", [0, 7, 2**63 - 1])
def test_a_task_is_read_from_its_bytes(shard_id: int) -> None:
    assert messages.read_task(messages.task_body(shard_id)) == shard_id
    assert messages.read_task(memoryview(messages.task_body(shard_id))) == shard_id
    assert messages.read_task(messages.task_body(shard_id).decode()) == shard_id


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"x", b"\xff\xfe", b"null", b"7", b"{}", b"[]", b"[[],{},{}]", b"[1,2,3]", b"[" * 4000, b"x" * 10**6),
        b'[[{"v": 1, "shard_id": 9223372036854775808}], {}, {}]',
    ],
)
def test_bytes_that_are_no_task_of_ours_are_refused_in_a_line(body: bytes) -> None:
    with pytest.raises(ValueError, match="message") as caught:
        messages.read_task(body)
    assert len(str(caught.value)) < 300
