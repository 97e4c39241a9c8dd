"""What lies in Secrets Manager: provider keys, and the keys that seal webhook secrets."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from backburner.adapters.aws import translated
from backburner.errors import PortUnavailable, SealBroken

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


class FernetSeals:
    """Sealing by Fernet (AES-128-CBC with HMAC-SHA256), as ports.Seals. Thread-safe.

    The secret is one or more random texts with white space or commas between. The first seals, all of them open: so a
    key is replaced by putting a new one before it. `client` gives a Secrets Manager client when one is first needed.
    """

    def __init__(self, client: Callable[[], Any], arn: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._arn = arn
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._fernet: Any = None
        self._read_at = float("-inf")

    def seal(self, text: str) -> str:
        """Encrypt under the first key."""
        token: bytes = self._keys().encrypt(text.encode())
        return token.decode()

    def open(self, token: str) -> str:
        """Decrypt under whichever key fits; a key that was put there meanwhile is read. Raises SealBroken."""
        from cryptography.fernet import InvalidToken  # noqa: PLC0415  few functions open anything

        for newer in (False, True):
            try:
                text: bytes = self._keys(newer=newer).decrypt(token.encode())
                return text.decode()
            except InvalidToken:
                continue
        raise SealBroken

    def _keys(self, *, newer: bool = False) -> Any:
        with self._lock:
            age = self._monotonic() - self._read_at
            if self._fernet is None or (newer and age >= REFRESH_SECONDS_MIN):
                with translated():
                    text = self._client().get_secret_value(SecretId=self._arn)["SecretString"]
                self._fernet = _fernet(sealing_keys(text))
                self._read_at = self._monotonic()
            return self._fernet


def sealing_keys(text: str) -> list[str]:
    """The keys in the secret, the newest first."""
    return text.replace(",", " ").split()


def _fernet(keys: list[str]) -> Any:
    from cryptography.fernet import Fernet, MultiFernet  # noqa: PLC0415
    from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415

    def derived(key: str) -> bytes:
        return HKDF(SHA256(), 32, salt=None, info=b"backburner webhook secrets").derive(key.encode())

    if not keys:
        raise PortUnavailable("the secret that seals webhook secrets is empty")
    return MultiFernet([Fernet(base64.urlsafe_b64encode(derived(key))) for key in keys])
