"""The one secret: provider keys."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from backburner.adapters.aws import translated

REFRESH_SECONDS_MIN = 30.0
"""However many calls are refused as unauthorised, the secret is read again no more often than this."""


class ProviderSecret:
    """The secret's JSON object, read once and again when a key turns out to be refused. Thread-safe."""

    def __init__(self, client: Any, arn: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._arn = arn
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._keys: dict[str, str] | None = None
        self._refreshed_at = float("-inf")

    def get(self, name: str) -> str:
        """The key of that name, without white space around it; empty if there is none."""
        with self._lock:
            if self._keys is None:
                self._read()
            return (self._keys or {}).get(name, "").strip()

    def refresh(self, name: str, refused: str) -> bool:
        """Read the secret again, unless that was done just now; whether the key now differs from the refused one."""
        with self._lock:
            current = (self._keys or {}).get(name, "").strip()
            if current == refused and self._monotonic() - self._refreshed_at >= REFRESH_SECONDS_MIN:
                self._read()
                self._refreshed_at = self._monotonic()
                current = (self._keys or {}).get(name, "").strip()
            return current != refused

    def _read(self) -> None:
        with translated():
            text = self._client.get_secret_value(SecretId=self._arn)["SecretString"]
        try:
            fields = json.loads(text)
        except ValueError:  # somebody pasted a key instead of the object; then there is no key of any name
            fields = None
        self._keys = (
            {name: value for name, value in fields.items() if isinstance(value, str)}
            if isinstance(fields, dict)
            else {}
        )
