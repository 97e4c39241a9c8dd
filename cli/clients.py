"""Clients and their API keys."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

CLIENT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""Also the name of the client's message group in the queues, and a metric dimension."""


def new_key() -> str:
    """A fresh API key: 256 random bits, so its SHA-256 needs no salt."""
    return f"bb_{secrets.token_urlsafe(32)}"


def create_client(clients_table: Any, client_id: str, name: str, now_ms: int, *, background: bool | None = None) -> str:
    """Store a new client in the Clients table (a boto3 Table) and return its key, which is kept nowhere.

    background: whether providers may keep its calls going in the background; None: as the deployment says.
    Raises ValueError for an id that is not lower-case letters, digits and hyphens.
    """
    if not CLIENT_ID.fullmatch(client_id):
        raise ValueError("a client id is 1 to 63 lower-case letters, digits and hyphens, and begins with no hyphen")
    key = new_key()
    clients_table.put_item(
        Item={
            "key_hash": hashlib.sha256(key.encode()).hexdigest(),
            "client_id": client_id,
            "name": name,
            "created_at": now_ms,
            **({} if background is None else {"background": background}),
        },
        ConditionExpression="attribute_not_exists(key_hash)",
    )
    return key
