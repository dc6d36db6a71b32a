"""What went wrong with a request: whether to try again, and how to say it."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from nightmill.errors import StorageError
from nightmill.storage.s3_settings import ENDPOINT_VARIABLES, S3Settings


class S3Error(StorageError):
    """A store refused a request, or did not answer."""

    def __init__(self, message: str, *, hint: str | None, http_status: int | None, s3_code: str) -> None:
        super().__init__(message, hint=hint)
        self.http_status = http_status  # None: no answer
        self.s3_code = s3_code


class ShortBodyError(Exception):
    """An answer ended before its end."""


class Verdict(Enum):
    """What to do after a failed request."""

    AGAIN = "the same request may work in a moment"
    SLOW_DOWN = "the store asks for fewer requests"
    NEW_CREDENTIALS = "the credentials are out of date; there may be newer ones"
    FAIL = "the same request will fail again"


_AGAIN_STATUS = frozenset({408, 425, 500, 502, 504, 520, 521, 522, 523, 524})
_SLOW_STATUS = frozenset({429, 503, 509})
_AGAIN_CODES = frozenset(
    {
        "InternalError",
        "RequestTimeout",
        "OperationAborted",
        "ConditionalRequestConflict",  # two conditional writes met: neither was decided
        "BadDigest",  # bytes were damaged on the way
        "IncompleteBody",
        "XAmzContentSHA256Mismatch",
    }
)
_SLOW_CODES = frozenset(
    {"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
)
_STALE_CODES = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"}
)
_NO_OBJECT = frozenset({"NoSuchKey", "404", "NotFound"})


def request_errors() -> tuple[type[BaseException], ...]:
    """All that a request may raise for a reason outside this process. Imported late: botocore takes its time."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    return (ClientError, BotoCoreError, ResponseParserError, HTTPError, ShortBodyError)


def judge(error: BaseException) -> Verdict:
    """Whether the request is worth sending again."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, boto.ClientError):
        return _judge_answer(*_status_and_code(error))
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return Verdict.FAIL
    passing = (
        boto.ConnectionError,
        boto.HTTPClientError,
        boto.IncompleteReadError,
        boto.CredentialRetrievalError,
        boto.MetadataRetrievalError,
        ResponseParserError,  # half an XML document
        HTTPError,
        ShortBodyError,
    )
    return Verdict.AGAIN if isinstance(error, passing) else Verdict.FAIL


def _judge_answer(status: int | None, code: str) -> Verdict:
    if code in _STALE_CODES:
        return Verdict.NEW_CREDENTIALS
    if code in _SLOW_CODES or status in _SLOW_STATUS:
        return Verdict.SLOW_DOWN
    if code in _AGAIN_CODES or status in _AGAIN_STATUS:
        return Verdict.AGAIN
    return Verdict.FAIL


def explain(
    error: BaseException, *, action: str, uri: str, settings: S3Settings, tries: int, since_s: float
) -> S3Error:
    """Say what was tried where, what came back, and what to do."""
    status, code = _status_and_code(error)
    problem = _problem(error, status, code, settings)
    patience = f" (given up after {tries} tries in {since_s:.0f} s)" if tries > 1 else ""
    return S3Error(
        f"cannot {action} {uri}: {problem}{patience}",
        hint=_hint(error, status, code, uri, settings),
        http_status=status,
        s3_code=code,
    )


def _problem(error: BaseException, status: int | None, code: str, settings: S3Settings) -> str:
    if status is None:
        return f"no usable answer from {settings.where}: {error}"
    if code in _NO_OBJECT:
        return "there is no such object"
    message = _fields(error).get("Message") or "no reason given"
    return f"{settings.where} answered {status} {code}: {message}"


def _hint(error: BaseException, status: int | None, code: str, uri: str, settings: S3Settings) -> str:
    from botocore.exceptions import BotoCoreError, HTTPClientError, NoCredentialsError

    endpoint = f"{ENDPOINT_VARIABLES[0]} ({settings.endpoint_url or 'not set: AWS itself'})"
    identity = (
        f"profile {settings.profile}" if settings.profile else f"key {settings.access_key_id or 'found by boto3'}"
    )
    if isinstance(error, NoCredentialsError):
        return "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
    if code == "NoSuchBucket":
        return f"Create the bucket {uri.removeprefix('s3://').partition('/')[0]}, or check its name and {endpoint}."
    if code in _NO_OBJECT:
        return f"Check the name and {endpoint}."
    if code in _STALE_CODES:
        return "Get new credentials (for example aws sso login), then run the same command again: it resumes."
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch"):
        return f"Check AWS_ACCESS_KEY_ID ({identity}), AWS_SECRET_ACCESS_KEY and {endpoint}: do they belong together?"
    if status == 403:
        return f"Check what the {identity} may do in this bucket. A missing object looks so too, without leave to list."
    if status in (301, 307, 400) and code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "301"):
        return f"The bucket is in another region than {settings.region or 'the default one'}: set AWS_REGION."
    if judge(error) is not Verdict.FAIL or isinstance(error, HTTPClientError):
        return f"Is the store up, and is {endpoint} right? What is finished is kept: run the same command again."
    if isinstance(error, BotoCoreError):
        return f"Check the AWS configuration of this machine and {endpoint}."
    return f"Check {endpoint} and whether this store offers what S3 does."


def _status_and_code(error: BaseException) -> tuple[int | None, str]:
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return None, type(error).__name__
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status, str(_fields(error).get("Code", status))


def _fields(error: BaseException) -> Mapping[str, Any]:
    response: Mapping[str, Any] = getattr(error, "response", {})
    fields: Mapping[str, Any] = response.get("Error", {})
    return fields
