"""The row contract: input rows to requests or row errors, and the one output schema of a job."""

from nightmill.rows.parse import InputRow, custom_ids, parse_rows
from nightmill.rows.schema import job_source_schema, output_schema, unify_schemas

__all__ = ["InputRow", "custom_ids", "job_source_schema", "output_schema", "parse_rows", "unify_schemas"]
