"""The database's clock as SQL expressions: a worker's own clock decides nothing."""

from typing import Any

from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import FunctionElement

from nightmill.schema import UtcDateTime


class now(FunctionElement[Any]):  # noqa: N801 - reads as the SQL function it is
    """The present moment, not the start of the transaction; `now(seconds)` is that much later."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(now, "sqlite")
def _sqlite(element: now, compiler: SQLCompiler, **kwargs: Any) -> str:
    # Milliseconds, always written: all texts have one width and sort as times do.
    seconds = compiler.process(element.clauses, **kwargs)
    shift = f", CAST({seconds} AS REAL) || ' seconds'" if seconds else ""
    return f"strftime('%Y-%m-%d %H:%M:%f', 'now'{shift})"


@compiles(now, "postgresql")
def _postgresql(element: now, compiler: SQLCompiler, **kwargs: Any) -> str:
    seconds = compiler.process(element.clauses, **kwargs)
    shift = f" + make_interval(secs => CAST({seconds} AS double precision))" if seconds else ""
    return f"(clock_timestamp(){shift})"
