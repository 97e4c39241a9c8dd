"""The Connections table: who is connected to the WebSocket API, which jobs they follow, and tickets.

| pk | sk | attributes |
|---|---|---|
| `connection#<id>` | `-` | client_id, jobs (a set of ids), expires_at |
| `job#<id>` | connection id | name, draft, position, expires_at |
| `ticket#<SHA-256>` | `-` | client_id, expires_at |

A subscription lies in its job's partition, so that one strongly consistent query finds all of them; the connection's
own set bounds their number and finds them again when the connection is gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from backburner.adapters.aws import translated
from backburner.errors import ConnectionUnknown, PortUnavailable, TooManySubscriptions
from backburner.models import EpochSeconds
from backburner.ports import Listener

type Key = dict[str, dict[str, str]]

_REFUSED = "ConditionalCheckFailedException"
_THERE = "attribute_exists(pk)"


def _key(pk: str, sk: str = "-") -> Key:
    return {"pk": {"S": pk}, "sk": {"S": sk}}


def _connection(connection_id: str) -> Key:
    return _key(f"connection#{connection_id}")


def _subscription(job_id: str, connection_id: str) -> Key:
    return _key(f"job#{job_id}", connection_id)


def _ticket(ticket: str) -> Key:
    """A ticket is random enough to need no salt."""
    return _key(f"ticket#{hashlib.sha256(ticket.encode()).hexdigest()}")


class ConnectionsTable:
    """The table, as ports.Connections and ports.Tickets. `now` gives epoch seconds, since TTL deletes late."""

    def __init__(self, client: Any, table: str, now: Callable[[], EpochSeconds]) -> None:
        self._client = client
        self._table = table
        self._now = now

    # ── Connections ───────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, connection_id: str, client_id: str, expires_at: EpochSeconds) -> None:
        """Store the connection."""
        self._put(_connection(connection_id), client_id=client_id, expires_at=expires_at)

    def client_id(self, connection_id: str) -> str | None:
        """The connection's client."""
        with translated():
            reply = self._client.get_item(TableName=self._table, Key=_connection(connection_id), ConsistentRead=True)
        item = reply.get("Item")
        return None if item is None or self._is_over(item) else str(item["client_id"]["S"])

    def close(self, connection_id: str, *, following: str | None = None) -> None:
        """Delete the connection, then what it followed. Whatever is left behind if this fails, TTL deletes."""
        gone = self._delete(_connection(connection_id))
        for job_id in {*gone.get("jobs", {}).get("SS", ()), *([following] if following else [])}:
            self._delete(_subscription(job_id, connection_id))

    # ── Subscriptions ─────────────────────────────────────────────────────────────────────────────────────────────

    def subscribe(self, job_id: str, listener: Listener, *, jobs_max: int) -> None:
        """Add the job to the connection's set, if there is room, then store the subscription."""
        try:
            with translated():
                connection = self._client.update_item(
                    TableName=self._table,
                    Key=_connection(listener.connection_id),
                    UpdateExpression="ADD jobs :these",
                    ConditionExpression=f"{_THERE} AND "
                    "(attribute_not_exists(jobs) OR contains(jobs, :this) OR size(jobs) < :most)",
                    ExpressionAttributeValues={
                        ":these": {"SS": [job_id]},
                        ":this": {"S": job_id},
                        ":most": {"N": str(jobs_max)},
                    },
                    ReturnValues="ALL_NEW",
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                )["Attributes"]
        except PortUnavailable as error:
            if error.message != _REFUSED:
                raise
            there = "Item" in getattr(error.__cause__, "response", {})
            raise (TooManySubscriptions if there else ConnectionUnknown) from error
        with translated():
            self._client.put_item(
                TableName=self._table,
                Item={
                    **_subscription(job_id, listener.connection_id),
                    "name": {"S": listener.name},
                    "draft": {"N": str(listener.draft)},
                    "position": {"N": str(listener.position)},
                    "expires_at": connection["expires_at"],
                },
            )

    def unsubscribe(self, job_id: str, connection_id: str) -> None:
        """Delete the subscription, then take the job from the connection's set."""
        self._delete(_subscription(job_id, connection_id))
        try:
            with translated():
                self._client.update_item(
                    TableName=self._table,
                    Key=_connection(connection_id),
                    UpdateExpression="DELETE jobs :these",
                    ConditionExpression=_THERE,  # else it would come back, without an owner
                    ExpressionAttributeValues={":these": {"SS": [job_id]}},
                )
        except PortUnavailable as error:
            if error.message != _REFUSED:
                raise

    def listeners(self, job_id: str, limit: int, *, sure: bool) -> Sequence[Listener]:
        """One query of the job's partition."""
        with translated():
            reply = self._client.query(
                TableName=self._table,
                KeyConditionExpression="pk = :job",
                ExpressionAttributeValues={":job": {"S": f"job#{job_id}"}},
                Limit=limit,
                ConsistentRead=sure,
            )
        return [
            Listener(
                connection_id=item["sk"]["S"],
                name=item["name"]["S"],
                draft=int(item["draft"]["N"]),
                position=int(item["position"]["N"]),
            )
            for item in reply["Items"]
            if not self._is_over(item)
        ]

    # ── Tickets ───────────────────────────────────────────────────────────────────────────────────────────────────

    def issue(self, ticket: str, client_id: str, expires_at: EpochSeconds) -> None:
        """Store the ticket's hash."""
        self._put(_ticket(ticket), client_id=client_id, expires_at=expires_at)

    def redeem(self, ticket: str) -> str | None:
        """Delete the ticket: of two who try, one gets what was deleted."""
        deleted = self._delete(_ticket(ticket))
        return None if not deleted or self._is_over(deleted) else str(deleted["client_id"]["S"])

    # ── Items ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _put(self, key: Key, *, client_id: str, expires_at: EpochSeconds) -> None:
        with translated():
            self._client.put_item(
                TableName=self._table,
                Item={**key, "client_id": {"S": client_id}, "expires_at": {"N": str(expires_at)}},
            )

    def _delete(self, key: Key) -> dict[str, Any]:
        """What was deleted; {} if there was nothing."""
        with translated():
            reply = self._client.delete_item(TableName=self._table, Key=key, ReturnValues="ALL_OLD")
        deleted: dict[str, Any] = reply.get("Attributes", {})
        return deleted

    def _is_over(self, item: dict[str, Any]) -> bool:
        return int(item["expires_at"]["N"]) <= self._now()
