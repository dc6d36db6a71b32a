"""Errors with stable codes: a class's docstring is its default message.

`NightmillError` ends a command (its `exit_code` is the process's). `RowError` never does: it becomes the
`error_code` and `error_message` of one output row.
"""

from enum import StrEnum


class ExitCode:
    """Exit codes of the command line (design: the row contract)."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    VALIDATION = 3
    NOT_FOUND = 4
    ROWS_FAILED = 5
    CANCELLED = 6
    WAIT_TIMED_OUT = 124
    INTERRUPTED = 130
    TERMINATED = 143


class NightmillError(Exception):
    """Something went wrong."""

    code = "internal_error"
    exit_code = ExitCode.FAILED

    def __init__(self, message: str | None = None, *, hint: str | None = None) -> None:
        self.message = message or (self.__doc__ or "").strip()
        self.hint = hint
        super().__init__(self.message if hint is None else f"{self.message}\n  {hint}")


class ConfigError(NightmillError):
    """A setting is unknown or has a bad value."""

    code = "invalid_config"
    exit_code = ExitCode.USAGE


class ValidationError(NightmillError):
    """The input does not fit the row contract; nothing was submitted."""

    code = "validation_failed"
    exit_code = ExitCode.VALIDATION


class SpecMismatchError(ValidationError):
    """The output belongs to a job with another specification."""

    code = "spec_mismatch"


class OutputOccupiedError(ValidationError):
    """The output location holds files that this job did not write."""

    code = "output_occupied"


class NotFoundError(NightmillError):
    """No such job."""

    code = "not_found"
    exit_code = ExitCode.NOT_FOUND


class JobStateError(NightmillError):
    """The job's status does not allow this."""

    code = "invalid_job_status"


class ModelError(NightmillError):
    """The model cannot be loaded."""

    code = "model_unavailable"
    exit_code = ExitCode.VALIDATION


class EngineError(NightmillError):
    """The engine failed."""

    code = "engine_error"


class ErrorBudgetExceededError(NightmillError):
    """More rows failed than --max-failed-rows allows; what is finished is kept."""

    code = "error_budget_exceeded"
    exit_code = ExitCode.ROWS_FAILED


class WaitTimedOutError(NightmillError):
    """The job has not ended in the time given; it goes on."""

    code = "wait_timed_out"
    exit_code = ExitCode.WAIT_TIMED_OUT


class StorageError(NightmillError):
    """Reading or writing the data failed."""

    code = "storage_error"


class PartLostError(StorageError):
    """A part that was committed is gone, or is not as long as it was."""

    code = "part_lost"


class BrokerError(NightmillError):
    """The message broker takes no messages; what is owed to it waits in the store."""

    code = "broker_unavailable"


class StoreError(StorageError):
    """The job store cannot be reached, or is damaged."""

    code = "store_unavailable"


class FencedError(NightmillError):
    """Another attempt holds this shard now: stop at once and write nothing."""

    code = "fenced"


class RowErrorCode(StrEnum):
    """Why one row has no completion. Stable: users filter on these."""

    NULL_PROMPT = "null_prompt"
    EMPTY_PROMPT = "empty_prompt"
    INVALID_MESSAGES = "invalid_messages"
    INVALID_SAMPLING_PARAMS = "invalid_sampling_params"
    INVALID_SCHEMA = "invalid_schema"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    TEMPLATE_ERROR = "template_error"
    REQUEST_TIMEOUT = "request_timeout"
    ENGINE_ERROR = "engine_error"
    QUARANTINED = "quarantined"
    SOURCE_CHANGED = "source_changed"  # the input was overwritten after the job was planned
    SOURCE_MISSING = "source_missing"  # the input is gone, or cannot be read any more
    BATCH_CANCELLED = "batch_cancelled"
    BATCH_EXPIRED = "batch_expired"


class RowError(Exception):
    """One row cannot be answered; its neighbours are not concerned."""

    def __init__(self, code: RowErrorCode, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(f"{code}: {message}")
