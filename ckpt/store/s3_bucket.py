"""The calls to a bucket of an S3-compatible store, through boto3. Each has a time limit, and a deadline with retries.

boto3 is imported on first use. It reads credentials, region and endpoint as all programs of that store do: the
environment (``AWS_ENDPOINT_URL``), the user's files, the machine's role.
"""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, TypeVar

from resilio_hpc.core.errors import UsageError

DEADLINE_VARIABLE = "RESILIO_S3_DEADLINE_S"
DEADLINE_S = 120.0
"""For how long a call is repeated while the store is overloaded, or away."""
CONNECT_S, ANSWER_S = 10.0, 60.0
THREADS = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_BUSY = {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "ThrottlingException", "Throttling",
         "RequestTimeTooSkewed", "OperationAborted", "ConditionalRequestConflict", "TooManyRequests"}  # fmt: skip
_REFUSED = {"PreconditionFailed", "412"}
_MISSING = {"NoSuchKey", "404", "NotFound"}
_FORBIDDEN = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403", "ExpiredToken", "InvalidToken"}


Result = TypeVar("Result")


class Object(NamedTuple):
    """What is known of an object. ``tag``: its ETag, which differs where its content does."""

    size_bytes: int
    changed_ns: int
    tag: str


class S3Bucket:
    """A bucket. All methods raise OSError: FileNotFoundError where an object is missing."""

    def __init__(self, name: str, client: Any = None, deadline_s: float | None = None) -> None:
        """``client``: boto3's, made from the environment by default. Raises UsageError where boto3 is missing."""
        self.name = name
        self._given = client
        assert self._client is not None
        self._deadline_s = _deadline_s() if deadline_s is None else deadline_s
        self._is_told = False

    @property
    def _client(self) -> Any:
        return _new_client() if self._given is None else self._given

    def get(self, key: str, start: int = 0, size: int = -1) -> tuple[bytes, Object]:
        """Return an object's bytes, or ``size`` of them from ``start`` on, fewer at its end."""
        wanted = {} if size < 0 and not start else {"Range": f"bytes={start}-{start + size - 1 if size >= 0 else ''}"}

        def act() -> tuple[bytes, Object]:
            answer = self._client.get_object(Bucket=self.name, Key=key, **wanted)
            data: bytes = answer["Body"].read()
            total = int(str(answer.get("ContentRange", "")).rpartition("/")[2] or answer["ContentLength"])
            if len(data) != (total - start if size < 0 else min(size, total - start)):
                raise ConnectionError("a part of the answer is missing")
            return data, _object(answer, len(data))

        try:
            return self._call(key, act)
        except _OutOfRange:
            return b"", Object(0, 0, "")

    def head(self, key: str) -> Object | None:
        """Return what is known of an object, None where it is missing."""
        try:
            return self._call(key, lambda: _object(answer := self._head(key), answer["ContentLength"]))
        except FileNotFoundError:
            return None

    def _head(self, key: str) -> Any:
        return self._client.head_object(Bucket=self.name, Key=key)

    def put(self, key: str, data: bytes | bytearray, former: str | None = None) -> bool:
        """Write an object. ``former``: only where it is missing (""), or has this tag; return False where it is not.

        The answer to a request may be lost, and its repetition be refused. So what is there then is compared.
        """
        condition = {} if former is None else {"IfNoneMatch": "*"} if not former else {"IfMatch": former}
        tries = 0

        def act() -> bool:
            nonlocal tries
            tries += 1
            self._client.put_object(Bucket=self.name, Key=key, Body=data, **condition)
            return True

        try:
            return self._call(key, act)
        except (_Refused, FileNotFoundError):  # If-Match of a missing object is a 404 in some stores
            return former is not None and tries > 1 and self._is(key, data)

    def _is(self, key: str, data: bytes | bytearray) -> bool:
        try:
            return self.get(key)[0] == data
        except FileNotFoundError:
            return False

    def delete(self, key: str) -> None:
        """Remove an object, which may be missing."""
        self._call(key, lambda: self._client.delete_object(Bucket=self.name, Key=key))

    def listed(self, prefix: str, delimiter: str = "") -> Iterator[tuple[str, Object]]:
        """Yield the keys that begin so, with what is known of them. A list may be older than other answers.

        ``delimiter``: keys with it after the prefix are left out.
        """
        more: dict[str, str] = {}
        while True:
            page: Any = self._call(
                prefix,
                lambda: self._client.list_objects_v2(Bucket=self.name, Prefix=prefix, Delimiter=delimiter, **more),  # noqa: B023
            )
            for one in page.get("Contents", ()):
                yield one["Key"], Object(one["Size"], _ns(one["LastModified"]), one["ETag"])
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    # -- uploads in parts ------------------------------------------------------------------------------------------

    def begin_upload(self, key: str) -> str:
        """Begin an upload in parts; return its name."""
        upload: str = self._call(key, lambda: self._client.create_multipart_upload(Bucket=self.name, Key=key))[
            "UploadId"
        ]
        return upload

    def upload_part(self, key: str, upload: str, number: int, data: bytes | bytearray) -> str:
        """Upload a part, from number 1 on; return its tag."""
        where = {"Bucket": self.name, "Key": key, "UploadId": upload, "PartNumber": number}
        tag: str = self._call(key, lambda: self._client.upload_part(Body=data, **where))["ETag"]
        return tag

    def complete_upload(self, key: str, upload: str, tags: list[str], size_bytes: int) -> None:
        """Make an object of the parts."""
        parts = {"Parts": [{"PartNumber": at, "ETag": tag} for at, tag in enumerate(tags, 1)]}
        where = {"Bucket": self.name, "Key": key, "UploadId": upload, "MultipartUpload": parts}
        try:
            self._call(key, lambda: self._client.complete_multipart_upload(**where))
        except FileNotFoundError:  # no such upload: the answer of an earlier try may have been lost
            found = self.head(key)
            if found is None or found.size_bytes != size_bytes:
                raise

    def abort_upload(self, key: str, upload: str) -> None:
        """Give an upload up; it may be over."""
        where = {"Bucket": self.name, "Key": key, "UploadId": upload}
        try:
            self._call(key, lambda: self._client.abort_multipart_upload(**where))
        except FileNotFoundError:
            return

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return the (key, name) of uploads that are not complete."""
        found: list[tuple[str, str]] = []
        more: dict[str, str] = {}
        while True:
            page: Any = self._call(
                prefix,
                lambda: self._client.list_multipart_uploads(Bucket=self.name, Prefix=prefix, **more),  # noqa: B023
            )
            found += [(one["Key"], one["UploadId"]) for one in page.get("Uploads", ())]
            if not page.get("IsTruncated"):
                return found
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    # -- errors ----------------------------------------------------------------------------------------------------

    def _call(self, key: str, act: Callable[[], Result]) -> Result:
        """Repeat a call while the store is overloaded or away, until the deadline."""
        deadline, pause_s = time.monotonic() + self._deadline_s, _FIRST_PAUSE_S
        while True:
            try:
                return act()
            except Exception as error:  # noqa: BLE001 - boto3's errors have no common base
                why = self._why_again(key, error)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"the object store does not serve requests ({why}), {self._deadline_s:g} s long",
                    f"s3://{self.name}/{key}",
                )  # fmt: skip
            if not self._is_told and pause_s > 1.0 and left_s > 1.0:
                self._is_told = True
                print(f"resilio: s3://{self.name}: {why}; trying again for {left_s:.0f} s", file=sys.stderr, flush=True)
            time.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _why_again(self, key: str, error: Exception) -> str:
        """Return why a call may be repeated. Raises OSError where that is of no use, or what else went wrong."""
        from botocore import exceptions

        where = f"s3://{self.name}/{key}"
        if isinstance(error, exceptions.ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if code in _BUSY or status in (429, 500, 502, 503, 504):
                return f"it answers {status} {code}"
            if code == "NoSuchBucket":
                raise OSError(
                    errno.ENODEV, "there is no such bucket: make it, or see its name and AWS_ENDPOINT_URL",
                    f"s3://{self.name}",
                ) from error  # fmt: skip
            if code in _REFUSED or status == 412:
                raise _Refused(errno.EEXIST, "another process was faster", where) from error
            if code in _MISSING or status == 404:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where) from error
            if status == 416:
                raise _OutOfRange(errno.EINVAL, "no bytes there", where) from error
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
            raise OSError(errno.EINVAL, str(error), where) from error
        raise error


def _away() -> tuple[type[Exception], ...]:
    """Return the errors of connections: the store did not answer, or not with all of it."""
    from botocore import exceptions as of
    from urllib3.exceptions import HTTPError

    return of.HTTPClientError, of.ConnectionError, of.IncompleteReadError, HTTPError, OSError


class _Refused(OSError):
    """A condition of a write does not hold."""


class _OutOfRange(OSError):
    """No byte of the object is in the range."""


def _object(answer: Any, size: int) -> Object:
    return Object(size, _ns(answer["LastModified"]), answer["ETag"])


def _ns(at: datetime) -> int:
    return int(at.timestamp() * 1e9)


def _deadline_s() -> float:
    given = os.environ.get(DEADLINE_VARIABLE, "")
    try:
        return max(1.0, float(given)) if given else DEADLINE_S
    except ValueError:
        raise UsageError(f"{DEADLINE_VARIABLE} is {given!r}, not a number of seconds") from None


@cache
def _new_client() -> Any:
    """Return this process's client. Checksums that only newer stores know are not asked for: files have their own."""
    try:
        import boto3
        from botocore import exceptions
        from botocore.config import Config
    except ImportError:
        raise UsageError("an object store (s3://…) needs boto3: pip install 'resilio_hpc[s3]'") from None
    config = Config(
        connect_timeout=CONNECT_S, read_timeout=ANSWER_S, max_pool_connections=2 * THREADS,
        retries={"total_max_attempts": 1, "mode": "standard"}, tcp_keepalive=True,
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
    )  # fmt: skip
    try:
        region = os.environ.get("AWS_REGION") or boto3.session.Session().region_name or "us-east-1"
        return boto3.session.Session().client("s3", region_name=region, config=config)
    except (exceptions.BotoCoreError, ValueError) as error:
        raise UsageError(f"the object store cannot be used: {error}") from None


os.register_at_fork(after_in_child=_new_client.cache_clear)  # its connections are the parent's
