"""Frozen records as canonical JSON and back: sorted keys, no spaces, every field written, numbers by declared type."""

import dataclasses
import json
import types
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


def encode(record: object) -> str:
    """Equal records give equal text: `temperature=0` and `temperature=0.0` are one value."""
    return dumps(to_plain(record))


def dumps(plain: object) -> str:
    """Dicts, lists and scalars as canonical JSON."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def decode(cls: type[Record], text: str) -> Record:
    """The record `encode` was given. Fields it lacks take their defaults: it may be from an older nightmill.

    Raises:
        ValueError: not JSON, a field this version does not know, or a value of the wrong type.
    """
    return from_plain(cls, json.loads(text))


def to_plain(record: object) -> dict[str, Any]:
    """The record as dicts, lists and scalars."""
    hints = _hints(type(record))  # type: ignore[arg-type]
    return {name: _to_plain(getattr(record, name), hint) for name, hint in hints.items()}


def from_plain(cls: type[Record], plain: object) -> Record:
    """Inverse of `to_plain`."""
    if not isinstance(plain, dict):
        raise ValueError(f"{cls.__name__} must be an object, not {type(plain).__name__}")
    hints = _hints(cls)  # type: ignore[arg-type]
    if unknown := sorted(set(plain) - set(hints)):
        raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}: written by a newer nightmill?")
    return cls(**{name: _from_plain(value, hints[name], f"{cls.__name__}.{name}") for name, value in plain.items()})


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _to_plain(value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_to_plain(v, get_args(_present(hint))[0]) for v in value]
    if _present(hint) is float and isinstance(value, int):
        return float(value)
    return value


def _from_plain(value: Any, hint: Any, where: str) -> Any:
    if value is None:
        if type(None) in get_args(hint):
            return None
        raise ValueError(f"{where} must not be null")
    wanted = _present(hint)
    if dataclasses.is_dataclass(wanted):
        return from_plain(wanted, value)  # type: ignore[arg-type]
    if get_origin(wanted) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list")
        return tuple(_from_plain(v, get_args(wanted)[0], where) for v in value)
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return wanted(value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise ValueError(f"{where} must be {wanted.__name__}, not {value!r}")
    return value


def _present(hint: Any) -> Any:
    """`T` of `T | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    return hint
