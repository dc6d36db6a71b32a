"""The part that an attempt writes: the shard's first one, or one with the answers of a retry in the old one's place."""

from collections.abc import Mapping
from typing import Any, Protocol

import pyarrow as pa

from nightmill.output.folder import OutputFolder
from nightmill.output.part import PartInfo, find_part, replace_part, write_part
from nightmill.output.part_reader import read_part
from nightmill.records import Completion, JobInfo, ShardLease
from nightmill.storage import Storage


class OutputPlace(Protocol):
    """Of JobContext: where the job's output goes, and what it is made of."""

    @property
    def job(self) -> JobInfo:
        """Whose output it is."""
        ...

    @property
    def storage(self) -> Storage:
        """Of the output."""
        ...

    @property
    def folder(self) -> OutputFolder:
        """Of the output."""
        ...

    @property
    def source_schema(self) -> pa.Schema:
        """Of all inputs together."""
        ...

    @property
    def sources(self) -> Storage | None:
        """Of the input."""
        ...

    @property
    def model_name(self) -> str:
        """Value of the `model` column."""
        ...


class FirstPart:
    """Created once, by whichever attempt comes first."""

    def __init__(self, place: OutputPlace, lease: ShardLease) -> None:
        self._place = place
        self._lease = lease

    def standing(self) -> PartInfo | None:
        """What an earlier attempt wrote before it died: commit it, compute nothing."""
        place = self._place
        return find_part(place.storage, place.folder, self._lease.range, place.job.spec_digest)

    def kept(self) -> list[Completion]:
        """Rows whose answers stand in a part already: none."""
        return []

    def write(self, completions: Mapping[int, Completion]) -> PartInfo:
        """After `standing` found none: build and create it; one that was faster is adopted."""
        place = self._place
        common = _common(place, self._lease)
        return write_part(place.storage, place.folder, self._lease.range, completions, **common, look_first=False)


class RetriedPart:
    """Replaces the part of `etag`; what is answered there is kept bit for bit."""

    def __init__(self, place: OutputPlace, lease: ShardLease, etag: str) -> None:
        self._place = place
        self._lease = lease
        self._etag = etag

    def standing(self) -> PartInfo | None:
        """What an earlier attempt of this retry put in place before it died."""
        place = self._place
        part = find_part(place.storage, place.folder, self._lease.range, place.job.spec_digest)
        return part if part is not None and part.etag != self._etag and part.replaces == self._etag else None

    def kept(self) -> list[Completion]:
        """Rows that have an answer: no retry touches them."""
        place, shard = self._place, self._lease.range
        part = read_part(place.storage, place.folder.part(shard.index), shard, spec=place.job.spec)
        return [row.completion for row in part.values() if row.is_answered]

    def write(self, completions: Mapping[int, Completion]) -> PartInfo:
        """Build it and put it in the old one's place."""
        place, shard = self._place, self._lease.range
        common = _common(place, self._lease)
        return replace_part(place.storage, place.folder, shard, completions, etag=self._etag, **common)


def shard_output(place: OutputPlace, lease: ShardLease) -> FirstPart | RetriedPart:
    """What this attempt has to write."""
    if lease.replaces_etag is None:
        return FirstPart(place, lease)
    return RetriedPart(place, lease, lease.replaces_etag)


def _common(place: OutputPlace, lease: ShardLease) -> dict[str, Any]:
    return {
        "spec": place.job.spec,
        "spec_digest": place.job.spec_digest,
        "source_schema": place.source_schema,
        "model": place.model_name,
        "attempt": lease.attempt,
        "source_storage": place.sources,
    }
