"""A whole small job without an engine, for tests of what is written."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from nightmill.output import CheckpointWriter, OutputFolder, PartInfo, Unanswered, read_checkpoints, write_part
from nightmill.reader import read_shard
from nightmill.records import CommittedShard, Completion, JobSpec, ShardRange
from nightmill.rows import InputRow, job_source_schema, parse_rows
from nightmill.sharding import list_sources, plan_shards
from nightmill.states import ShardState
from nightmill.storage import LocalStorage

STORAGE = LocalStorage()
DIGEST = "d" * 64

Answer = Callable[[InputRow], Completion]


def answer(row: InputRow, **fields: Any) -> Completion:
    """A completion that depends on the row alone."""
    values: dict[str, Any] = {
        "row_index": row.row_index,
        "custom_id": row.custom_id,
        "text": f"answer to {row.prompt or row.messages}",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 1,
        "seed": row.seed,
        "max_tokens_effective": row.sampling.max_tokens,
    }
    return Completion(**(values | fields))


@dataclass
class SmallJob:
    spec: JobSpec
    job_id: str = "job-1"
    shard_rows: int = 2000
    shards: tuple[ShardRange, ...] = field(init=False)
    source_schema: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        sources = list_sources(self.spec.inputs, output=self.spec.output)
        self.shards = plan_shards(sources, self.shard_rows)
        self.source_schema = job_source_schema(sources, self.spec)
        self.folder = OutputFolder(self.spec.output, self.job_id)

    def completions(self, shard: ShardRange, make: Answer = answer) -> list[Completion]:
        return [
            row if isinstance(row, Completion) else make(row)
            for batch in read_shard(shard, self.spec)
            for row in parse_rows(batch, self.spec)
        ]

    def writer(self, shard: ShardRange, attempt: int = 1, max_rows: int = 256) -> CheckpointWriter:
        return CheckpointWriter(STORAGE, self.folder.work, shard.index, attempt, max_rows=max_rows)

    def checkpointed(self, shard: ShardRange) -> dict[int, Completion]:
        return read_checkpoints(STORAGE, self.folder.work, shard.index)

    def part(
        self,
        shard: ShardRange,
        completions: dict[int, Completion] | list[Completion] | None = None,
        *,
        unanswered: Unanswered | None = None,
        digest: str = DIGEST,
    ) -> PartInfo:
        rows = self.completions(shard) if completions is None else completions
        return write_part(
            STORAGE,
            self.folder,
            shard,
            rows if isinstance(rows, dict) else {row.row_index: row for row in rows},
            spec=self.spec,
            spec_digest=digest,
            source_schema=self.source_schema,
            model="fake",
            unanswered=unanswered,
        )

    def run(self) -> list[CommittedShard]:
        return [committed(shard, self.part(shard)) for shard in self.shards]


def committed(shard: ShardRange, part: PartInfo, state: ShardState = ShardState.COMMITTED) -> CommittedShard:
    return CommittedShard(shard_id=shard.index + 100, range=shard, state=state, attempt=1, result=part.result())
