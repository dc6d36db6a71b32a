"""Values of options that click does not know: durations and sizes."""

import re
from typing import Any

import click

from nightmill.durations import parse_duration

_MAX_BYTES = 2**63
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Duration(click.ParamType[float]):
    """`90s`, `30m`, `12h`, `2d`; seconds as a float."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse."""
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class ByteSize(click.ParamType[int]):
    """`512M`, `4G`, `4GiB` or a number of bytes."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
        size = float(match[1]) * _BYTES[match[2]] if match else 0.0
        if not 0 < size < _MAX_BYTES:
            text = repr(value)
            self.fail(f"{text if len(text) <= 40 else text[:40] + '…'} is not a size like 512M or 4G", param, ctx)
        return int(size)
