"""The calls to a bucket of an S3-compatible store. Each has a time limit, and a deadline with retries."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from resilio_hpc.ckpt.store.s3_client import ConditionFailed, OutOfRange, is_expired, new_client, renew, why_again
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.standard_streams import say

DEADLINE_VARIABLE = "RESILIO_S3_DEADLINE_S"
DEADLINE_S = 120.0
"""For how long a call is repeated while the store is overloaded, or away."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0

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
        return new_client() if self._given is None else self._given

    def get(self, key: str, start: int = 0, size: int = -1) -> tuple[bytes, Object]:
        """Return an object's bytes, or ``size`` of them from ``start`` on, fewer at its end."""
        wanted = {} if size < 0 and not start else {"Range": f"bytes={start}-{start + size - 1 if size >= 0 else ''}"}

        def act() -> tuple[bytes, Object]:
            answer = self._client.get_object(Bucket=self.name, Key=key, **wanted)
            data: bytes = answer["Body"].read()
            total = int(str(answer.get("ContentRange", "")).rpartition("/")[2] or answer["ContentLength"])
            if wanted and "ContentRange" not in answer and len(data) == total:  # ranges are not obeyed: it is all of it
                data = data[start : start + size if size >= 0 else None]
            if len(data) != (total - start if size < 0 else min(size, total - start)):
                raise ConnectionError("a part of the answer is missing")
            return data, _object(answer, len(data))

        try:
            return self._call(key, act)
        except OutOfRange:
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

        False may be wrong: where the answer to a request was lost, its repetition is refused.
        """
        condition = {} if former is None else {"IfNoneMatch": "*"} if not former else {"IfMatch": former}
        try:
            self._call(key, lambda: self._client.put_object(Bucket=self.name, Key=key, Body=data, **condition))
        except (ConditionFailed, FileNotFoundError):  # If-Match of a missing object is a 404 in some stores
            if former is None:
                raise
            return False
        return True

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
        return self._call(key, lambda: _tag(self._client.upload_part(Body=data, **where)))

    def complete_upload(self, key: str, upload: str, tags: list[str], size_bytes: int) -> None:
        """Make an object of the parts."""
        parts = {"Parts": [{"PartNumber": at, "ETag": tag} for at, tag in enumerate(tags, 1)]}
        where = {"Bucket": self.name, "Key": key, "UploadId": upload, "MultipartUpload": parts}
        try:
            self._call(key, lambda: _tag(self._client.complete_multipart_upload(**where)))
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
        deadline, pause_s, is_renewed = time.monotonic() + self._deadline_s, _FIRST_PAUSE_S, False
        while True:
            began, client = time.monotonic(), self._client
            try:
                return act()
            except Exception as error:  # noqa: BLE001 - boto3's errors have no common base
                if self._given is None and not is_renewed and is_expired(error):
                    is_renewed = True
                    renew(client)
                    continue
                why = why_again(self.name, key, error, time.monotonic() - began)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"the object store does not serve requests ({why}), {self._deadline_s:g} s long",
                    f"s3://{self.name}/{key}",
                )  # fmt: skip
            if not self._is_told and pause_s > 1.0 and left_s > 1.0:
                self._is_told = True
                say(f"s3://{self.name}: {why}; trying again for {left_s:.0f} s")
            time.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _object(answer: Any, size: int) -> Object:
    if "LastModified" not in answer:
        raise ConnectionError("the answer has no LastModified")
    return Object(size, _ns(answer["LastModified"]), _tag(answer))


def _tag(answer: Any) -> str:
    """Return the tag of an object. Raises ConnectionError for an answer without one: it is not the whole answer."""
    if "ETag" not in answer:
        raise ConnectionError("the answer has no ETag")
    tag: str = answer["ETag"]  # may be "" for an upload that was just completed
    return tag


def _ns(at: datetime) -> int:
    return int(at.timestamp() * 1e9)


def _deadline_s() -> float:
    given = os.environ.get(DEADLINE_VARIABLE, "")
    try:
        return max(1.0, float(given)) if given else DEADLINE_S
    except ValueError:
        raise UsageError(f"{DEADLINE_VARIABLE} is {given!r}, not a number of seconds") from None
