"""What a worker of the fleet asks before it claims: whose is this shard, which jobs have something to claim."""

from sqlalchemy import Connection, and_, case, select, update

from nightmill.schema import jobs, shards
from nightmill.states import JobStatus, Tier
from nightmill.store.leases import has_available, job_may_run

_tier_rank = case({tier.value: tier.rank for tier in Tier}, value=jobs.c.tier)


def job_of_shard(connection: Connection, shard_id: int) -> str | None:
    """The job of a shard; None when there is no such shard."""
    job_id: str | None = connection.scalar(select(shards.c.job_id).where(shards.c.shard_id == shard_id))
    return job_id


def claimable_jobs(connection: Connection) -> list[tuple[str, Tier]]:
    """Jobs with a shard that `claim` would grant now, by tier, then oldest first."""
    available = has_available(shards.c.num_failures < jobs.c.max_failures)
    query = select(jobs.c.job_id, jobs.c.tier).where(job_may_run(), available)
    rows = connection.execute(query.order_by(_tier_rank, jobs.c.created_at, jobs.c.job_id))
    return [(row.job_id, Tier(row.tier)) for row in rows]


def source_schema(connection: Connection, job_id: str) -> str | None:
    """As the submitter has told it."""
    text: str | None = connection.scalar(select(jobs.c.source_schema).where(jobs.c.job_id == job_id))
    return text


def refuse_model(connection: Connection, job_id: str, limit: int, error_code: str, error_message: str) -> bool:
    """Count that a worker could not load the job's model; True when the job fails for it.

    Only while no shard of it was ever taken: what one worker cannot load, another one runs.
    """
    mine = and_(jobs.c.job_id == job_id, jobs.c.status == JobStatus.QUEUED, jobs.c.error_code.is_(None))
    refused = update(jobs).where(mine).values(num_refusals=jobs.c.num_refusals + 1).returning(jobs.c.num_refusals)
    count = connection.scalar(refused)
    if count is None or count < limit:
        return False
    reason = {"error_code": error_code, "error_message": error_message}
    connection.execute(update(jobs).where(mine).values(**reason))
    return True


def pin_model(connection: Connection, job_id: str, digest: str) -> str | None:
    """Say which content the job's model has; returns what was said first, None when there is no such job."""
    unset = update(jobs).where(jobs.c.job_id == job_id, jobs.c.model_digest.is_(None))
    connection.execute(unset.values(model_digest=digest))
    pinned: str | None = connection.scalar(select(jobs.c.model_digest).where(jobs.c.job_id == job_id))
    return pinned
