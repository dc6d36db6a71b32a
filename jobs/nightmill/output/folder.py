"""The names of everything below a job's output folder."""

from dataclasses import dataclass

from nightmill.storage import absolute


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """Paths below one output. Names that begin with `_` are invisible to Spark, DuckDB, pandas and polars."""

    uri: str
    job_id: str

    @property
    def root(self) -> str:
        """The folder itself, absolute."""
        return absolute(self.uri)

    @property
    def work(self) -> str:
        """What this job's attempts write while it runs; gone when it is done."""
        return f"{self.root}/_nightmill/{self.job_id}"

    def checkpoints(self, generation: int) -> str:
        """Checkpoints of one generation of the job: what a late writer of an earlier one leaves is not looked at."""
        return f"{self.work}/retry-{generation}" if generation else self.work

    @property
    def manifest(self) -> str:
        """Written when every shard is terminal."""
        return f"{self.root}/_manifest.json"

    @property
    def success(self) -> str:
        """Empty; its presence says that the folder is complete."""
        return f"{self.root}/_SUCCESS"

    def part(self, shard_index: int) -> str:
        """The one part of a shard."""
        return f"{self.root}/part-{shard_index:05d}.parquet"

    def attempt_part(self, shard_index: int, attempt: int) -> str:
        """One attempt's part, not published yet: for stores that cannot create atomically."""
        return f"{shard_folder(self.work, shard_index)}/part-{attempt:04d}.parquet"


def shard_folder(work: str, shard_index: int) -> str:
    """Folder of one shard's checkpoints."""
    return f"{work}/shard-{shard_index:05d}"
