"""A few prompts in the bucket, so that the first command after `make up` has something to answer."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from deploy.native.s3 import S3Endpoint

SOURCE = Path(__file__).parents[2] / "examples/packages.parquet"
PREFIX = "prompts/"
NUM_ROWS = 16  # answered within a minute, also on two busy cores
_ASK = "Summarise this software package in one short sentence.\n\n"


def put_examples(endpoint: S3Endpoint, bucket: str) -> None:
    """Put them below `prompts/`, unless something is there."""
    client = endpoint.client()
    try:
        if client.list_objects_v2(Bucket=bucket, Prefix=PREFIX, MaxKeys=1).get("KeyCount"):
            return
        packages = pq.read_table(SOURCE).slice(0, NUM_ROWS).select(["package", "description"])
        prompts = [_ASK + text for text in packages["description"].to_pylist()]
        body = io.BytesIO()
        pq.write_table(packages.append_column("prompt", pa.array(prompts, pa.string())), body)
        client.put_object(Bucket=bucket, Key=f"{PREFIX}packages.parquet", Body=body.getvalue())
    finally:
        client.close()
