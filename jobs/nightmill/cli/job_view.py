"""A job as the commands show it: OpenAI's batch object with our fields beside its own, or lines for a person."""

from datetime import datetime
from typing import Any

from nightmill.cli.show import iso
from nightmill.durations import clock
from nightmill.records import JobInfo
from nightmill.states import JobStatus


def job_object(job: JobInfo) -> dict[str, Any]:
    """JSON: the names, statuses and counts of OpenAI's Batch object; ours come after them."""
    ended = {
        status: job.finished_at if job.status is status else None
        for status in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED)
    }
    return {
        "id": job.job_id,
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "status": job.status.value,
        "errors": _errors(job),
        "created_at": _epoch(job.created_at),
        "in_progress_at": _epoch(job.started_at),
        **{f"{status.value}_at": _epoch(moment) for status, moment in ended.items()},
        "request_counts": {
            "total": job.rows.total,
            "completed": job.rows.completed,
            "failed": job.rows.failed,
            "cancelled": job.rows.cancelled,
        },
        "usage": {
            "input_tokens": job.tokens.prompt,
            "input_tokens_details": {"cached_tokens": job.tokens.cached},
            "output_tokens": job.tokens.completion,
            "total_tokens": job.tokens.prompt + job.tokens.completion,
        },
        "model": job.spec.model.model,
        "inputs": list(job.spec.inputs),
        "output": job.spec.output,
        "tier": job.options.tier.value,
        "shards": {state.value: count for state, count in job.num_shards_by_state.items()},
        "rows_running": job.rows_running,
        "rows_resumed": job.rows_resumed,
        "rows_recomputed": job.rows_recomputed,
        "error_codes": job.error_codes,
        "last_progress_at": _epoch(job.last_progress_at),
    }


def job_fields(job: JobInfo) -> dict[str, object]:
    """The lines of `nightmill status`."""
    rows = job.rows
    done = rows.completed + rows.failed + rows.cancelled
    percent = 100 * done / rows.total if rows.total else 0.0
    states = ", ".join(f"{count} {state.value}" for state, count in job.num_shards_by_state.items() if count)
    return {
        "job": job.job_id,
        "status": job.status.value,
        "error": None if job.error_code is None else f"{job.error_code}: {job.error_message}",
        "rows": f"{done:,} of {rows.total:,} ({percent:.1f} %): {rows.completed:,} completed, {rows.failed:,} failed"
        + (f", {rows.cancelled:,} cancelled" if rows.cancelled else ""),
        "running": job.rows_running or None,
        "error codes": ", ".join(f"{code} {count:,}" for code, count in sorted(job.error_codes.items())) or None,
        "tokens": f"{job.tokens.prompt:,} prompt ({job.tokens.cached:,} cached), {job.tokens.completion:,} completion",
        "shards": f"{job.num_shards}: {states}",
        "tier": job.options.tier.value,
        "model": job.spec.model.model,
        "output": job.spec.output,
        "created": iso(job.created_at),
        "started": iso(job.started_at),
        "finished": iso(job.finished_at),
        "took": _took(job),
        "last progress": iso(job.last_progress_at) if job.finished_at is None else None,
    }


def _took(job: JobInfo) -> str | None:
    """From the first shard's start; of a retried job, from the first time on."""
    if job.started_at is None or job.finished_at is None:
        return None
    seconds = (job.finished_at - job.started_at).total_seconds()
    rate = f", {job.tokens.completion / seconds:,.0f} tokens/s" if seconds >= 1 and job.generation == 0 else ""
    return clock(seconds) + rate


def _errors(job: JobInfo) -> dict[str, Any] | None:
    if job.error_code is None:
        return None
    return {"object": "list", "data": [{"code": job.error_code, "message": job.error_message}]}


def _epoch(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
