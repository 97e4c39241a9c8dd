"""The Jobs and Clients tables.

The row of a job: attributes that conditions or indexes read are DynamoDB numbers and strings; everything else is JSON
text, so that numbers come back as they were sent (DynamoDB's own numbers would refuse 0.7 as a float and NaN at all).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from heapq import merge
from itertools import batched, islice
from typing import Any, Final, Unpack

from botocore.exceptions import ClientError

from backburner.adapters.aws import translated
from backburner.errors import PortUnavailable
from backburner.models import (
    Attempt,
    Charge,
    Client,
    ClientLimits,
    EpochMs,
    Failure,
    Job,
    JobStatus,
    Lane,
    Notice,
    NoticeStatus,
    Payload,
    SlackOrigin,
    Slot,
    Trail,
    Usage,
    Webhook,
    canonical_json,
)
from backburner.ports import Conflict, Guard, Patch, cursor_after, cursor_at, position_of

type Item = dict[str, Any]

DUE_INDEX: Final = "due"
CLIENT_INDEX: Final = "by_client"
WAITING_INDEX: Final = "waiting"
DUE_SHARDS: Final = 8
"""The due index is spread over so many keys: one key takes 1,000 writes a second, a job causes about four."""

LOOKED_AT_MAX = 1_000
"""Rows that one request looks at for a rare status: some 20 round trips, well within a request's time."""
KEYS_MAX = 100
"""DynamoDB reads so many rows by key in one request."""
_CONDITION_FAILED = "ConditionalCheckFailedException"
_NUMBERS = (
    "created_at", "available_at", "deadline_at", "deadline_seconds", "expires_at", "due_at", "claims", "attempts",
    "claimed_at", "finished_at", "attempts_limit", "place", "parked_since", "ahead", "waiting_since",
    "discarded_at", "lease_until",
)  # fmt: skip
_STRINGS = ("job_id", "client_id", "lane", "status", "fingerprint", "owner")
_LISTED = ("request", "request_key", "result", "result_key", "log", "outbox", "metadata", "webhook")
"""Attributes that a listing leaves unread."""


def _number(value: int) -> Item:
    return {"N": str(value)}


def due_shard(job_id: str) -> str:
    """The partition of the due index that a job lies in."""
    return str(zlib.crc32(job_id.encode()) % DUE_SHARDS)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _attempt_json(attempt: Attempt) -> str:
    return canonical_json(_given(asdict(attempt)))


def _outbox_json(outbox: Sequence[Notice]) -> str:
    return canonical_json([asdict(notice) for notice in outbox])


def _attempt(text: str) -> Attempt:
    fields = json.loads(text)
    usage = fields.pop("usage", None)
    return Attempt(**fields, usage=Usage(**usage) if usage else None)


def _notice(fields: Mapping[str, Any]) -> Notice:
    return Notice(**{**fields, "status": NoticeStatus(fields["status"])})


def _slot(text: str) -> Slot:
    fields = json.loads(text)
    return Slot(**{**fields, "guess": tuple(fields["guess"])})


def _text(text: str | None) -> Item | None:
    return None if text is None else {"S": text}


_SPELLED: Mapping[str, Callable[[Any], Item | None]] = {
    "metadata": _text,
    "handle": _text,
    "model_index": lambda index: _number(index) if index else None,
    "charge": lambda charge: _text(charge and canonical_json(asdict(charge))),
    "slot": lambda slot: _text(slot and canonical_json(asdict(slot))),
    "background": lambda background: {"BOOL": True} if background else None,
    "error": lambda error: _text(error and canonical_json(asdict(error))),
    "webhook": lambda webhook: _text(webhook and canonical_json(_given(asdict(webhook)))),
    "outbox": lambda outbox: _text(_outbox_json(outbox) if outbox else None),
    "trail": lambda trail: _text(trail and canonical_json(_given(asdict(trail)))),
    "slack": lambda slack: _text(slack and canonical_json(_given(asdict(slack)))),
    "targets": lambda targets: _text(canonical_json(list(targets)) if targets else None),
    "log": lambda log: {"L": [{"S": _attempt_json(attempt)} for attempt in log]} if log else None,
    **dict.fromkeys(_NUMBERS, lambda value: None if value is None else _number(value)),
    **dict.fromkeys(_STRINGS, lambda value: {"S": str(value)}),
}
"""How each field is written; None removes the attribute."""


def attributes(values: Mapping[str, Any], job_id: str) -> Item:
    """Fields of a job as attributes of its row; a None becomes None, to be removed."""
    item: Item = {}
    for name, value in values.items():
        if name in ("request", "result"):
            item[name], item[f"{name}_key"] = _text(value and value.text), _text(value and value.key)
        elif name == "schema_version":
            item["v"] = _number(value)
        else:
            item[name] = _SPELLED[name](value)
    if "due_at" in item:
        item["due_shard"] = None if item["due_at"] is None else {"S": due_shard(job_id)}
    return item


def job_of(item: Item) -> Job:
    """The job that a row describes. Attributes of later versions are passed over."""
    plain: dict[str, Any] = {name: int(item[name]["N"]) for name in _NUMBERS if name in item}
    plain |= {name: item[name]["S"] for name in _STRINGS}
    plain["lane"] = Lane(plain["lane"])
    plain["status"] = JobStatus(plain["status"])
    plain.setdefault("due_at", None)
    error = json.loads(item["error"]["S"]) if "error" in item else None
    return Job(
        **plain,
        schema_version=int(item["v"]["N"]),
        request=Payload(item.get("request", {}).get("S"), item.get("request_key", {}).get("S")),
        result=_payload(item, "result"),
        error=Failure(**error) if error else None,
        log=tuple(_attempt(entry["S"]) for entry in item.get("log", {"L": []})["L"]),
        model_index=int(item.get("model_index", {"N": "0"})["N"]),
        background="background" in item,
        handle=item.get("handle", {}).get("S"),
        charge=Charge(**json.loads(item["charge"]["S"])) if "charge" in item else None,
        slot=_slot(item["slot"]["S"]) if "slot" in item else None,
        metadata=item.get("metadata", {}).get("S"),
        slack=_slack(item),
        trail=Trail(**json.loads(item["trail"]["S"])) if "trail" in item else None,
        targets=tuple(json.loads(item["targets"]["S"])) if "targets" in item else (),
        webhook=Webhook(**json.loads(item["webhook"]["S"])) if "webhook" in item else None,
        outbox=tuple(_notice(fields) for fields in json.loads(item["outbox"]["S"])) if "outbox" in item else (),
    )


def _slack(item: Item) -> SlackOrigin | None:
    fields = json.loads(item["slack"]["S"]) if "slack" in item else None
    if not fields:
        return None
    known = {name: value for name, value in fields.items() if name in SlackOrigin.__dataclass_fields__}
    return SlackOrigin(**{**known, "streams": tuple(known.get("streams", ()))})


def _payload(item: Item, name: str) -> Payload | None:
    text, key = item.get(name, {}).get("S"), item.get(f"{name}_key", {}).get("S")
    return None if text is None and key is None else Payload(text, key)


class _Expressions:
    """Names and values of one request: DynamoDB wants both as placeholders, since `status` and others are reserved."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.values: Item = {}

    def name(self, attribute: str) -> str:
        placeholder = f"#{attribute}"
        self.names[placeholder] = attribute
        return placeholder

    def value(self, value: Item) -> str:
        placeholder = f":v{len(self.values)}"
        self.values[placeholder] = value
        return placeholder

    def condition(self, guard: Guard) -> str:
        """The guard as a condition expression."""
        name, value = self.name, self.value
        statuses = ", ".join(value({"S": status}) for status in sorted(guard.statuses))
        parts = [f"attribute_exists({name('job_id')})", f"{name('status')} IN ({statuses})"]
        expired_by = None if guard.unexpired_at is None else guard.unexpired_at // 1000
        for attribute, relation, bound in (
            ("claims", "=", guard.claims),
            ("available_at", "<=", guard.available_by),
            ("due_at", "<=", guard.due_by),
            ("due_at", ">=", guard.due_after),
            ("lease_until", "<=", guard.lease_by),
            ("due_at", "=", guard.due_at),
            ("deadline_at", ">", guard.deadline_after),
            ("expires_at", ">", expired_by),
        ):
            if bound is not None:
                parts.append(f"{name(attribute)} {relation} {value(_number(bound))}")
        if guard.undiscarded:
            parts.append(f"attribute_not_exists({name('discarded_at')})")
        lists = {
            "outbox": guard.outbox and _outbox_json(guard.outbox),
            "targets": guard.targets and canonical_json(list(guard.targets)),
        }
        for attribute, text in lists.items():
            if text:
                parts.append(f"{name(attribute)} = {value({'S': text})}")
            elif text is not None:  # an empty list is not written
                parts.append(f"attribute_not_exists({name(attribute)})")
        return " AND ".join(parts)

    def update(self, job_id: str, patch: Patch) -> str:
        """The patch as an update expression."""
        fields: dict[str, Any] = dict(patch)
        adds = {name.removeprefix("add_"): fields.pop(name) for name in list(fields) if name.startswith("add_")}
        appended: Sequence[Attempt] = fields.pop("append_log", ())
        written = attributes(fields, job_id)
        sets = [f"{self.name(name)} = {self.value(value)}" for name, value in written.items() if value is not None]
        if appended:
            lines = self.value({"L": [{"S": _attempt_json(attempt)} for attempt in appended]})
            log, empty = self.name("log"), self.value({"L": []})
            sets.append(f"{log} = list_append(if_not_exists({log}, {empty}), {lines})")
        removes = [self.name(name) for name, value in written.items() if value is None]
        clauses = [f"SET {', '.join(sets)}"] if sets else []
        clauses += [f"REMOVE {', '.join(removes)}"] if removes else []
        if adds:
            clauses.append("ADD " + ", ".join(f"{self.name(n)} {self.value(_number(v))}" for n, v in adds.items()))
        return " ".join(clauses)


def adding(table: str, job: Job, now: EpochMs) -> Item:
    """The request that stores a new row unless an unexpired one stands there."""
    fields = {name: getattr(job, name) for name in Job.__dataclass_fields__}
    return {
        "TableName": table,
        "Item": {name: value for name, value in attributes(fields, job.job_id).items() if value is not None},
        "ConditionExpression": "attribute_not_exists(job_id) OR expires_at <= :now",
        "ExpressionAttributeValues": {":now": _number(now // 1000)},
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }


def updating(table: str, job_id: str, guard: Guard, patch: Patch) -> Item:
    """The request that writes the patch if the guard holds."""
    expressions = _Expressions()
    return {
        "TableName": table,
        "Key": {"job_id": {"S": job_id}},
        "ConditionExpression": expressions.condition(guard),
        "UpdateExpression": expressions.update(job_id, patch),
        "ExpressionAttributeNames": expressions.names,
        "ExpressionAttributeValues": expressions.values,
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }


class JobsTable:
    """The Jobs table, as ports.JobStore."""

    def __init__(self, client: Any, table: str) -> None:
        self._client = client
        self._table = table

    def add(self, job: Job, now: EpochMs) -> Job | None:
        """Store a new row unless an unexpired one stands there; then return that one."""
        try:
            with translated():
                self._client.put_item(**adding(self._table, job, now))
        except PortUnavailable as error:
            return job_of(_refused_item(error))
        return None

    def get(self, job_id: str) -> Job | None:
        """The row as last written."""
        with translated():
            reply = self._client.get_item(TableName=self._table, Key={"job_id": {"S": job_id}}, ConsistentRead=True)
        return job_of(reply["Item"]) if "Item" in reply else None

    def update(self, job_id: str, guard: Guard, **patch: Unpack[Patch]) -> Job:
        """Write the patch if the guard holds; return the new row. Raises Conflict."""
        try:
            with translated():
                reply = self._client.update_item(**updating(self._table, job_id, guard, patch), ReturnValues="ALL_NEW")
        except PortUnavailable as error:
            item = _refused_item(error)
            raise Conflict(job_of(item) if item else None) from error
        return job_of(reply["Attributes"])

    def due(self, before: EpochMs, limit: int) -> Iterable[str]:
        """Ids of due rows over all shards, the longest overdue first."""
        shards = [list(islice(self._due_in(str(shard), before), limit)) for shard in range(DUE_SHARDS)]
        return [job_id for _, job_id in islice(merge(*shards), limit)]

    def in_hand(self, before: EpochMs, limit: int) -> Collection[str]:
        """The index has keys only, so the rows are asked for their status. What is throttled is left out."""
        latest = [
            job_id
            for shard in range(DUE_SHARDS)
            for _, job_id in islice(self._due_in(str(shard), before, latest_first=True), -(-limit // DUE_SHARDS))
        ]
        found: list[str] = []
        for keys in batched(latest, KEYS_MAX, strict=False):
            wanted = {
                "Keys": [{"job_id": {"S": job_id}} for job_id in keys],
                "ProjectionExpression": "job_id, #status",
                "ExpressionAttributeNames": {"#status": "status"},
            }
            with translated():
                reply = self._client.batch_get_item(RequestItems={self._table: wanted})
            rows = reply["Responses"].get(self._table, ())
            found += [row["job_id"]["S"] for row in rows if row["status"]["S"] == JobStatus.PROCESSING]
        return found

    def _due_in(self, shard: str, before: EpochMs, *, latest_first: bool = False) -> Iterable[tuple[int, str]]:
        pages = self._client.get_paginator("query").paginate(
            TableName=self._table,
            IndexName=DUE_INDEX,
            KeyConditionExpression="due_shard = :shard AND due_at < :before",
            ExpressionAttributeValues={":shard": {"S": shard}, ":before": _number(before)},
            ScanIndexForward=not latest_first,
        )
        with translated():
            for page in pages:
                for item in page["Items"]:
                    yield int(item["due_at"]["N"]), item["job_id"]["S"]

    def oldest_waiting(self, lane: Lane) -> EpochMs | None:
        """The first entry of the index that holds queued rows only, by lane and age."""
        with translated():
            page = self._client.query(
                TableName=self._table,
                IndexName=WAITING_INDEX,
                KeyConditionExpression="lane = :lane",
                ExpressionAttributeValues={":lane": {"S": lane}},
                Limit=1,
            )
        return next((int(item["waiting_since"]["N"]) for item in page["Items"]), None)

    def list_by_client(
        self, client_id: str, status: JobStatus | None, cursor: str | None, limit: int
    ) -> tuple[Sequence[Job], str | None]:
        """A page of the client's jobs, newest first; without their requests and results. Raises InvalidRequest."""
        start: Item | None = _cursor_key(cursor, client_id) if cursor else None
        found: list[Job] = []
        looked_at = 0
        while len(found) <= limit:  # one more than asked for tells whether another page follows
            with translated():
                page = self._client.query(
                    TableName=self._table,
                    IndexName=CLIENT_INDEX,
                    KeyConditionExpression="client_id = :client",
                    ExpressionAttributeValues={":client": {"S": client_id}},
                    ScanIndexForward=False,
                    Limit=limit + 1 if status is None else KEYS_MAX,  # a rare status is far between
                    **({"ExclusiveStartKey": start} if start else {}),
                )
            jobs = self._rows([item["job_id"]["S"] for item in page["Items"]])
            found += [job for job in jobs if status in (None, job.status)]
            start = page.get("LastEvaluatedKey")
            looked_at += len(jobs)
            if start is None:
                break
            if (
                looked_at >= LOOKED_AT_MAX and len(found) <= limit
            ):  # a short page, with the cursor of what was looked at
                return found, cursor_at(int(start["created_at"]["N"]), start["job_id"]["S"])
        return found[:limit], cursor_after(found[limit - 1]) if len(found) > limit else None

    def _rows(self, job_ids: Sequence[str]) -> list[Job]:
        wanted = [name for name in Job.__dataclass_fields__ if name not in (*_LISTED, "schema_version")] + ["v"]
        names = {f"#{name}": name for name in wanted}
        asked: Item = {"Keys": [{"job_id": {"S": job_id}} for job_id in job_ids],
                       "ProjectionExpression": ", ".join(names), "ExpressionAttributeNames": names}  # fmt: skip
        rows: dict[str, Job] = {}
        requests: Any = {self._table: asked} if job_ids else {}
        while requests:
            with translated():
                reply = self._client.batch_get_item(RequestItems=requests)
            rows |= {item["job_id"]["S"]: job_of(item) for item in reply["Responses"].get(self._table, [])}
            requests = reply.get("UnprocessedKeys", {})
        return [rows[job_id] for job_id in job_ids if job_id in rows]


def _refused_item(error: PortUnavailable) -> Item:
    """The row that refused a conditional write ({} if there was none); any other error is raised again."""
    cause = error.__cause__
    if isinstance(cause, ClientError) and cause.response.get("Error", {}).get("Code") == _CONDITION_FAILED:
        response: Item = dict(cause.response)  # botocore's types do not know of Item here
        item: Item = response.get("Item") or {}
        return item
    raise error


def _cursor_key(cursor: str, client_id: str) -> Item:
    created_at, job_id = position_of(cursor)
    return {"client_id": {"S": client_id}, "created_at": _number(created_at), "job_id": {"S": job_id}}


class ClientsTable:
    """The Clients table, as ports.Clients: found by the SHA-256 of the key, which is random enough to need no salt."""

    def __init__(self, client: Any, table: str) -> None:
        self._client = client
        self._table = table

    def find(self, key_hash: str) -> Client | None:
        """The client whose key has this hash."""
        with translated():
            reply = self._client.get_item(TableName=self._table, Key={"key_hash": {"S": key_hash}})
        item = reply.get("Item")
        if item is None or item.get("disabled", {}).get("BOOL", False):
            return None
        return Client(
            client_id=item["client_id"]["S"],
            name=item.get("name", {}).get("S", ""),
            background=item.get("background", {}).get("BOOL"),
            limits=_limits(item),
        )

    def of(self, client_id: str, now: EpochMs) -> Sequence[str]:
        """The client's valid webhook secrets, as ports.WebhookSecrets: of an item of their own, since keys change."""
        with translated():
            reply = self._client.get_item(
                TableName=self._table, Key={"key_hash": {"S": webhook_item(client_id)}}, ConsistentRead=True
            )
        secrets: list[dict[str, Any]] = json.loads(reply["Item"]["secrets"]["S"]) if "Item" in reply else []
        return [secret["sealed"] for secret in secrets if secret["until"] is None or secret["until"] > now]

    def put_webhook_secret(self, client_id: str, sealed: str, now: EpochMs, *, previous_until: EpochMs) -> None:
        """Make this the client's secret; those before it are valid until then and no longer."""
        before = self.of(client_id, now)
        secrets = [{"sealed": sealed, "until": None}] + [{"sealed": old, "until": previous_until} for old in before[:1]]
        with translated():
            self._client.put_item(
                TableName=self._table,
                Item={"key_hash": {"S": webhook_item(client_id)}, "secrets": {"S": canonical_json(secrets)}},
            )

    def reseal(self, sealed_anew: Callable[[str], str]) -> int:
        """Seal all clients' webhook secrets anew; how many clients have one. For an operator's tool only.

        A client's whose secret is replaced meanwhile are left alone: they were sealed just now.
        """
        pages = self._client.get_paginator("scan").paginate(
            TableName=self._table,
            FilterExpression="begins_with(key_hash, :prefix)",
            ExpressionAttributeValues={":prefix": {"S": webhook_item("")}},
            ConsistentRead=True,
        )
        count = 0
        with translated():
            for item in (item for page in pages for item in page["Items"]):
                count += 1
                secrets = [
                    {**secret, "sealed": sealed_anew(secret["sealed"])} for secret in json.loads(item["secrets"]["S"])
                ]
                with suppress(self._client.exceptions.ConditionalCheckFailedException):
                    self._client.update_item(
                        TableName=self._table,
                        Key={"key_hash": item["key_hash"]},
                        UpdateExpression="SET secrets = :new",
                        ConditionExpression="secrets = :old",
                        ExpressionAttributeValues={":new": {"S": canonical_json(secrets)}, ":old": item["secrets"]},
                    )
        return count

    def knows(self, client_id: str) -> bool:
        """Whether some key is the client's. Reads the whole table: for an operator's tool only."""
        pages = self._client.get_paginator("scan").paginate(
            TableName=self._table,
            FilterExpression="client_id = :client",
            ExpressionAttributeValues={":client": {"S": client_id}},
            ProjectionExpression="client_id",
        )
        with translated():
            return any(page["Items"] for page in pages)


def webhook_item(client_id: str) -> str:
    """The key under which a client's webhook secrets lie; no SHA-256, so no API key's."""
    return f"webhook:{client_id}"


def _limits(item: Item) -> ClientLimits | None:
    given = {name: int(item[name]["N"]) for name in ClientLimits.__dataclass_fields__ if name in item}
    return ClientLimits(**given) if given else None
