"""The client of an S3-compatible store, boto3's, and what its errors mean.

boto3 is imported on first use. It reads credentials, region and endpoint as all programs of that store do: the
environment (``AWS_ENDPOINT_URL``), the user's files, the machine's role.
"""

from __future__ import annotations

import errno
import os
import threading
from functools import cache
from typing import Any

from resilio_hpc.core.errors import UsageError

CONNECT_S, ANSWER_S = 10.0, 60.0
THREADS = 8
_BUSY = {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "ThrottlingException", "Throttling",
         "OperationAborted", "ConditionalRequestConflict", "TooManyRequests"}  # fmt: skip
_TORN = {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
"""The store got other bytes than were sent."""
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_REFUSED = {"PreconditionFailed", "412"}
_MISSING = {"NoSuchKey", "404", "NotFound"}
_FORBIDDEN = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403", "InvalidToken", *_EXPIRED}
_renewing = threading.Lock()


class ConditionFailed(OSError):
    """A condition of a write does not hold."""


class OutOfRange(OSError):
    """No byte of the object is in the range."""


def why_again(bucket: str, key: str, error: Exception, took_s: float) -> str:
    """Return why a call may be repeated. Raises OSError where that is of no use, or what else went wrong.

    ``took_s``: the call, until its error.
    """
    from botocore import exceptions

    where = f"s3://{bucket}/{key}"
    if isinstance(error, exceptions.ClientError):
        code = _code(error)
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code in _BUSY | _TORN or status in (429, 500, 502, 503, 504):
            return f"it answers {status} {code}"
        if code in _SKEWED and took_s > ANSWER_S:
            return f"it answers {status} {code}"  # this process was stopped, or starved: a new request has a new time
        if code in _SKEWED:
            raise PermissionError(
                errno.EACCES, f"this machine's clock differs too much from the store's ({code}): set it", where
            ) from error
        if code == "NoSuchBucket":
            raise OSError(
                errno.ENODEV, "there is no such bucket: make it, or see its name and AWS_ENDPOINT_URL", f"s3://{bucket}"
            ) from error
        if code in _REFUSED or status == 412:
            raise ConditionFailed(errno.EEXIST, "another process was faster", where) from error
        if code in _MISSING or status == 404:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where) from error
        if status == 416:
            raise OutOfRange(errno.EINVAL, "no bytes there", where) from error
        if code in _FORBIDDEN or status == 403:
            named = "" if code.isdecimal() else f" ({code})"
            raise PermissionError(errno.EACCES, f"it refuses these credentials{named}", where) from error
        raise OSError(errno.EREMOTEIO, f"the object store answers {status} {code}", where) from error
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        raise PermissionError(
            errno.EACCES, "no credentials for the object store (AWS_ACCESS_KEY_ID, a profile, or a role)", where
        ) from error
    if isinstance(error, _away()):
        return f"no answer ({type(error).__name__})"
    if isinstance(error, exceptions.BotoCoreError):
        raise OSError(errno.EINVAL, " ".join(str(error).split()), where) from error
    raise error


def is_expired(error: Exception) -> bool:
    """Return whether the credentials may have been good once. The answer to a HEAD has no code, only a status."""
    from botocore import exceptions

    return isinstance(error, exceptions.ClientError) and _code(error) in {*_EXPIRED, "400", "403"}


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _away() -> tuple[type[Exception], ...]:
    """Return the errors of connections: the store did not answer, not with all of it, or something else answered."""
    from botocore import exceptions as of
    from botocore import parsers
    from urllib3.exceptions import HTTPError

    return (
        of.HTTPClientError,
        of.ConnectionError,
        of.IncompleteReadError,
        parsers.ResponseParserError,
        HTTPError,
        OSError,
    )


@cache
def new_client() -> Any:
    """Return this process's client. Checksums that only newer stores know are not asked for: files have their own."""
    try:
        import boto3
        from botocore import exceptions
        from botocore.config import Config
    except ImportError:
        raise UsageError("an object store (s3://…) needs boto3: pip install 'resilio_hpc[s3]'") from None
    config = Config(
        connect_timeout=CONNECT_S, read_timeout=ANSWER_S, max_pool_connections=4 * THREADS,
        retries={"total_max_attempts": 1, "mode": "standard"}, tcp_keepalive=True,
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
    )  # fmt: skip
    try:
        region = os.environ.get("AWS_REGION") or boto3.session.Session().region_name or "us-east-1"
        return boto3.session.Session().client("s3", region_name=region, config=config)
    except (exceptions.BotoCoreError, ValueError) as error:
        raise UsageError(f"the object store cannot be used: {error}") from None


def renew(client: Any) -> None:
    """Read the credentials again, in place of those of this client: files of them may have changed."""
    with _renewing:
        if new_client() is client:
            new_client.cache_clear()
            new_client()


os.register_at_fork(after_in_child=new_client.cache_clear)  # its connections are the parent's
