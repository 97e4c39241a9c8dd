"""Clients and their API keys."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from decimal import Decimal
from typing import Any

from boto3.dynamodb.conditions import Attr

from backburner.models import SLACK, ClientLimits

CLIENT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""Also the name of the client's message group in the queues, and a metric dimension."""


def new_key() -> str:
    """A fresh API key: 256 random bits, so its SHA-256 needs no salt."""
    return f"bb_{secrets.token_urlsafe(32)}"


def create_client(
    clients_table: Any,
    client_id: str,
    name: str,
    now_ms: int,
    *,
    background: bool | None = None,
    limits: ClientLimits | None = None,
) -> str:
    """Store a new client in the Clients table (a boto3 Table) and return its key, which is kept nowhere.

    background: whether providers may keep its calls going in the background; None: as the deployment says.
    limits: None for a client that may use as much as it likes.
    Raises ValueError for an id that is not lower-case letters, digits and hyphens.
    """
    if client_id == SLACK:
        raise ValueError(f"{SLACK!r} is the client that all people in Slack are")
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
            **{name: value for name, value in asdict(limits or ClientLimits()).items() if value is not None},
        },
        ConditionExpression="attribute_not_exists(key_hash)",
    )
    return key


def limit_client(clients_table: Any, client_id: str, wanted: Mapping[str, int | None]) -> ClientLimits:
    """Set these limits of a client, for all of its keys; a None takes one back. Returns those then in force.

    The client that all people in Slack are has no key, but a row under its name. Raises LookupError if there is no such
    client.
    """
    if client_id == SLACK:
        clients_table.update_item(
            Key={"key_hash": SLACK},
            UpdateExpression="SET client_id = :id, #name = if_not_exists(#name, :name)",
            ExpressionAttributeNames={"#name": "name"},
            ExpressionAttributeValues={":id": SLACK, ":name": "Slack"},
        )
    rows: list[dict[str, Any]] = []
    start: dict[str, Any] = {}
    while True:  # there is an index by key only, and a client is limited rarely
        page = clients_table.scan(FilterExpression=Attr("client_id").eq(client_id), **start)
        rows += page["Items"]
        if "LastEvaluatedKey" not in page:
            break
        start = {"ExclusiveStartKey": page["LastEvaluatedKey"]}
    if not rows:
        raise LookupError(f"there is no client {client_id!r}")
    sets = {name: value for name, value in wanted.items() if value is not None}
    clauses = ["SET " + ", ".join(f"{name} = :{name}" for name in sets)] if sets else []
    removes = [name for name in wanted if name not in sets]
    clauses += ["REMOVE " + ", ".join(removes)] if removes else []
    changed: dict[str, Any] = {}
    for row in rows:
        changed = clients_table.update_item(
            Key={"key_hash": row["key_hash"]},
            UpdateExpression=" ".join(clauses),
            ConditionExpression="attribute_exists(key_hash)",
            ReturnValues="ALL_NEW",
            **({"ExpressionAttributeValues": {f":{name}": value for name, value in sets.items()}} if sets else {}),
        )["Attributes"]
    names = asdict(ClientLimits())
    return ClientLimits(**{name: int(changed[name]) for name in names if name in changed})


def micro_usd(usd: float) -> int:
    """Dollars in micro-dollars, to the nearest."""
    return round(Decimal(str(usd)) * 1_000_000)
