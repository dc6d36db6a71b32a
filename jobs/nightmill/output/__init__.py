"""What a job writes: checkpoints while it runs, one part for each shard, the manifest at the end."""

from nightmill.output.checkpoint import CheckpointFile, CheckpointReader, CheckpointWriter, read_checkpoints
from nightmill.output.folder import OutputFolder
from nightmill.output.manifest import finalize_output
from nightmill.output.part import PartInfo, find_part, publish_part, replace_part, write_part
from nightmill.output.part_reader import PartRow, read_part
from nightmill.output.part_rows import Unanswered

__all__ = [
    "CheckpointFile",
    "CheckpointReader",
    "CheckpointWriter",
    "OutputFolder",
    "PartInfo",
    "PartRow",
    "Unanswered",
    "finalize_output",
    "find_part",
    "publish_part",
    "read_checkpoints",
    "read_part",
    "replace_part",
    "write_part",
]
