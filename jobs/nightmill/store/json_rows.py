"""A list of small records as rows of a query: one statement, one text, however many records."""

from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, Text, cast, column, func, literal
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.selectable import TableValuedAlias


def json_rows(connection: Connection, text: str) -> TableValuedAlias:
    """The objects of a JSON array as rows, to be joined by their fields."""
    if connection.dialect.name == "postgresql":
        rows = func.jsonb_array_elements(cast(literal(text, Text), JSONB)).table_valued(column("value", JSONB))
        return rows.alias("json_rows")
    return func.json_each(literal(text, Text)).table_valued(column("value", Text)).alias("json_rows")


def string(rows: TableValuedAlias, name: str) -> ColumnElement[Any]:
    """A field of the objects, as text."""
    value = rows.c.value
    return value.op("->>")(name) if isinstance(value.type, JSONB) else func.json_extract(value, f"$.{name}")


def number(rows: TableValuedAlias, name: str) -> ColumnElement[Any]:
    """A field of the objects, as an integer."""
    return cast(string(rows, name), BigInteger)
