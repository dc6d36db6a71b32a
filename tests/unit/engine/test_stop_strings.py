from collections.abc import Sequence

import pytest

from nightmill_worker.engine.stop import StopStrings


def utf8(token_ids: Sequence[int]) -> str:
    """One token per byte."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def push_all(stop: StopStrings, text: str | bytes, unarmed: int = 0) -> tuple[int, str] | None:
    data = text.encode() if isinstance(text, str) else text
    for i, byte in enumerate(data):
        found = stop.push(byte, armed=i >= unarmed)
        if found is not None:
            return i + 1, found
    return None


def test_stop_string_that_spans_tokens():
    assert push_all(StopStrings(("END",), utf8), "text EN ENDING") == (11, "END")


def test_stop_string_of_one_character():
    assert push_all(StopStrings(("\n",), utf8), "a\nb") == (2, "\n")


def test_first_to_begin_wins_when_one_token_completes_two():
    pieces = ["xab", "cd"]
    stop = StopStrings(("bcd", "abc"), lambda ids: "".join(pieces[i] for i in ids))
    assert stop.push(0, armed=True) is None
    assert stop.push(1, armed=True) == "abc"


def test_stop_string_with_multibyte_characters():
    text = "…naïve 終わり。"
    assert push_all(StopStrings(("終わり",), utf8), text) == (len("…naïve 終わり".encode()), "終わり")


def test_stop_string_right_before_half_a_character():
    pieces = {0: b"ab", 1: b"END\xe7", 2: b"\xb5\x82"}

    def decode(ids: Sequence[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")

    stop = StopStrings(("END",), decode)
    assert stop.push(0, armed=True) is None
    assert stop.push(1, armed=True) == "END"


def test_replacement_character_of_half_a_character_is_not_text():
    stop = StopStrings(("終",), utf8)
    assert push_all(stop, "終".encode()[:2]) is None
    assert stop.push("終".encode()[2], armed=True) == "終"


def test_bytes_that_are_no_utf8_do_not_grow_the_tail():
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return utf8(ids)

    stop = StopStrings(("END",), decode)
    assert push_all(stop, b"\xff" * 500 + b"END") == (503, "END")
    assert longest <= 24


def test_match_completed_before_min_tokens_does_not_count_later():
    stop = StopStrings(("END",), utf8)
    assert push_all(stop, "END then END", unarmed=4) == (12, "END")


@pytest.mark.parametrize("stop", ["a", "ab", "aab", "aaaa"])
def test_agrees_with_a_search_in_the_whole_text(stop: str):
    text = "abaabbaaabaaaab"
    expected = text.find(stop)
    assert push_all(StopStrings((stop,), utf8), text) == (expected + len(stop), stop)


def test_tokenizer_whose_text_depends_on_the_left_neighbour():
    words = ["stop", "here", "now"]

    def decode(ids: Sequence[int]) -> str:
        return " ".join(words[i] for i in ids)  # a leading space unless first, as SentencePiece does

    stop = StopStrings((" here",), decode)
    assert [stop.push(i, armed=True) for i in (0, 1)] == [None, " here"]
