"""The payloads bucket: requests and results too large for a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backburner.adapters.aws import translated
from backburner.errors import PayloadMissing, PortUnavailable


class PayloadsBucket:
    """The bucket, as ports.PayloadStore. Its lifecycle rule deletes objects when their rows have expired.

    `client` gives the S3 client: few jobs need one, and making it costs a cold start some 25 ms.
    """

    def __init__(self, client: Callable[[], Any], bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def put(self, key: str, text: str) -> None:
        """Store a text as UTF-8."""
        with translated():
            self._client().put_object(
                Bucket=self._bucket, Key=key, Body=text.encode(), ContentType="application/json; charset=utf-8"
            )

    def get(self, key: str) -> str:
        """Read it back. Raises PayloadMissing."""
        try:
            with translated():
                body: bytes = self._client().get_object(Bucket=self._bucket, Key=key)["Body"].read()
        except PortUnavailable as error:
            if error.message in ("NoSuchKey", "404"):
                raise PayloadMissing from error
            raise
        return body.decode()

    def remove(self, key: str) -> None:
        """Delete the object; S3 says nothing if there is none."""
        with translated():
            self._client().delete_object(Bucket=self._bucket, Key=key)

    def link(self, key: str, seconds: int) -> str:
        """A presigned URL."""
        parameters = {"Bucket": self._bucket, "Key": key}
        url: str = self._client().generate_presigned_url("get_object", Params=parameters, ExpiresIn=seconds)
        return url
