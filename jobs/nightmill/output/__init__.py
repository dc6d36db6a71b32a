"""What a job writes: checkpoints while it runs, one part for each shard, the manifest at the end."""

from nightmill.output.checkpoint import CheckpointFile, CheckpointReader, CheckpointWriter, read_checkpoints
from nightmill.output.folder import JobFile, OutputFolder, claim_output, read_job_file
from nightmill.output.manifest import finalize_output
from nightmill.output.part import PartInfo, Unanswered, find_part, write_part

__all__ = [
    "CheckpointFile",
    "CheckpointReader",
    "CheckpointWriter",
    "JobFile",
    "OutputFolder",
    "PartInfo",
    "Unanswered",
    "claim_output",
    "finalize_output",
    "find_part",
    "read_checkpoints",
    "read_job_file",
    "write_part",
]
