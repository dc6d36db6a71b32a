"""A run whose input and output lie on S3, for tests that kill it."""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.integration.conftest import Bench, Ended
from tests.services.servers import S3Bucket


@dataclass
class S3Bench:
    """Like Bench, with everything in a bucket."""

    bench: Bench
    bucket: S3Bucket

    def __post_init__(self) -> None:
        self.use(self.bucket.endpoint.url)
        self.client = self.bucket.endpoint.client()

    @property
    def root(self) -> str:
        return f"s3://{self.bucket.bucket}"

    @property
    def output(self) -> str:
        return f"{self.root}/team/out"

    def use(self, url: str) -> None:
        """Have the processes reach the store by this address."""
        environment = {**self.bucket.env, "AWS_ENDPOINT_URL_S3": url}
        environment.pop("NIGHTMILL_BUCKET", None)
        self.bench.environment = environment

    def put(self, key: str, data: bytes) -> str:
        self.client.put_object(Bucket=self.bucket.bucket, Key=key, Body=data)
        return f"{self.root}/{key}"

    def put_rows(self, key: str, rows: int | Sequence[Any], *, row_group_size: int = 50) -> str:
        """A Parquet file as `Bench.write` makes it."""
        return self.put(key, self.bench.write(rows, row_group_size=row_group_size).read_bytes())

    def run_arguments(self, *inputs: str, fake: str = "{}", more: Sequence[str] = ()) -> list[str]:
        flags = ["--model", f"fake:{fake}", "--max-tokens", "6", "--shard-rows", "100", "--max-num-seqs", "16"]
        return ["run", *inputs, "-o", self.output, *flags, "--json", *more]

    def call(self, *arguments: str, **environment: str) -> Ended:
        return self.bench.call(*arguments, **environment)

    def summary(self, *arguments: str, **environment: str) -> dict[str, Any]:
        ended = self.call(*arguments, **environment)
        assert ended.code == 0, ended.err
        found = json.loads(ended.out)
        assert isinstance(found, dict)
        return found

    def names(self, prefix: str = "team/out/") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket.bucket, Prefix=prefix)
        return [entry["Key"].removeprefix(prefix) for page in pages for entry in page.get("Contents", ())]

    def parts(self) -> dict[str, tuple[str, Any]]:
        """Name to what tells that it was written anew."""
        heads = {
            key: self.client.head_object(Bucket=self.bucket.bucket, Key=f"team/out/{key}")
            for key in self.names()
            if key.startswith("part-")
        }
        return {key: (head["ETag"], head["Metadata"].get("nightmill-write")) for key, head in heads.items()}

    def rows(self) -> list[dict[str, Any]]:
        """All output rows, part after part."""
        return [row for table in self._tables() for row in table.to_pylist()]

    def _tables(self) -> Iterator[pa.Table]:
        for key in sorted(self.parts()):
            body = self.client.get_object(Bucket=self.bucket.bucket, Key=f"team/out/{key}")["Body"]
            with body:
                yield pq.read_table(io.BytesIO(body.read()))

    @contextmanager
    def closing(self) -> Iterator["S3Bench"]:
        try:
            yield self
        finally:
            self.client.close()
