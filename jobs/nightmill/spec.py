"""What makes two specifications the same job: the digest that fences an output, and the words for a difference."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nightmill.canonical import dumps, to_plain
from nightmill.records import JobSpec, SourceFile

# Where the answers go, and whether ids were checked first, does not change an answer.
_NOT_ANSWERS = frozenset({"output", "check_ids"})
_MAX_SHOWN = 60


def spec_digest(spec: JobSpec) -> str:
    """sha256 of what changes answers or the form of the output, in hex."""
    plain = {name: value for name, value in to_plain(spec).items() if name not in _NOT_ANSWERS}
    return hashlib.sha256(dumps(plain).encode("ascii")).hexdigest()


def diff_specs(old: JobSpec, new: JobSpec) -> list[str]:
    """One line for each difference that the digest sees: `temperature: 0.0 → 0.7`. Empty: the same job."""
    old = replace(old, **{name: getattr(new, name) for name in _NOT_ANSWERS})
    before, after = dict(_leaves(to_plain(old))), dict(_leaves(to_plain(new)))
    times = Counter(path[-1] for path in before)
    return [
        f"{_label(path, times)}: {_show(value)} → {_show(after[path])}"
        for path, value in before.items()
        if value != after[path]
    ]


def diff_sources(old: Sequence[SourceFile], new: Sequence[SourceFile]) -> list[str]:
    """One line for each input file that came, went or changed since it was planned."""
    before, after = {s.uri: s for s in old}, {s.uri: s for s in new}
    lines = [f"input {uri}: removed" for uri in before if uri not in after]
    lines += [f"input {uri}: added" for uri in after if uri not in before]
    for uri in before.keys() & after.keys():
        was, now = before[uri], after[uri]
        if was.num_rows != now.num_rows:
            lines.append(f"input {uri}: {was.num_rows} rows → {now.num_rows} rows")
        elif (was.etag, was.size_bytes) != (now.etag, now.size_bytes):
            lines.append(f"input {uri}: written anew since the job was planned")
    if not lines and list(before) != list(after):
        lines.append("inputs: in another order")
    return sorted(lines)


def _leaves(plain: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in plain.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _label(path: tuple[str, ...], times: Mapping[str, int]) -> str:
    """The last name alone, as on the command line, unless two fields share it."""
    return path[-1] if times[path[-1]] == 1 or len(path) == 1 else ".".join(path)


def _show(value: object) -> str:
    if value is None:
        return "not set"
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _MAX_SHOWN:
        return text
    half = _MAX_SHOWN // 2
    return f"{text[:half]}…{text[-half:]} ({len(text)} characters)"
