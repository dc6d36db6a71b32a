"""Durable output of a shard: row checkpoints, the part, the job's manifest."""
