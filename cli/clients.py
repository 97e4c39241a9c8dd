"""`backburner clients`: who may submit jobs, their API keys, limits and webhook secrets."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Annotated, Any

import typer
from boto3.dynamodb.conditions import Attr

from backburner.adapters.dynamodb import ClientsTable
from backburner.adapters.secrets import FernetSeals
from backburner.adapters.tallies import TalliesTable
from backburner.budgets import MINUTE_SECONDS, day_of
from backburner.models import SLACK, WEBHOOK_SECRET_PREFIX, ClientLimits, EpochMs, Tally
from backburner.ports import Seals
from cli.deployment import Deployment, Profile, Region, StackName
from cli.screen import AsJson, Refused, Yes, confirm, show, table

CLIENT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""Also the name of the client's message group in the queues, and a metric dimension."""
LIMITS = tuple(ClientLimits.__dataclass_fields__)
COPIED = ("client_id", "name", "background", *LIMITS)
"""What a client's new key has in common with its others."""


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
    Raises Refused for an id that is not lower-case letters, digits and hyphens.
    """
    if client_id == SLACK:
        raise Refused(f"{SLACK!r} is the client that all people in Slack are")
    if not CLIENT_ID.fullmatch(client_id):
        raise Refused("a client id is 1 to 63 lower-case letters, digits and hyphens, and begins with no hyphen")
    row = {"client_id": client_id, "name": name, "background": background, **asdict(limits or ClientLimits())}
    return _put_key(clients_table, row, now_ms)


def _put_key(clients_table: Any, row: Mapping[str, Any], now_ms: int) -> str:
    """Store a row of the Clients table, but for what is None, under a fresh key; return that."""
    key = new_key()
    clients_table.put_item(
        Item={
            "key_hash": hashlib.sha256(key.encode()).hexdigest(),
            "created_at": now_ms,
            **{name: value for name, value in row.items() if value is not None},
        },
        ConditionExpression="attribute_not_exists(key_hash)",
    )
    return key


@dataclass(frozen=True)
class Shown:
    """A client as its operator sees it. keys, disabled_keys: how many; newest_key_at: when the newest was made."""

    client_id: str
    name: str
    keys: int
    disabled_keys: int
    newest_key_at: EpochMs | None
    background: bool | None
    limits: ClientLimits


def list_clients(clients_table: Any) -> list[Shown]:
    """All clients, by id."""
    by_client: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(clients_table):
        by_client.setdefault(row["client_id"], []).append(row)
    return [_shown(rows) for _, rows in sorted(by_client.items())]


def _shown(rows: Sequence[Mapping[str, Any]]) -> Shown:
    newest = _newest(rows)
    disabled = sum(bool(row.get("disabled")) for row in rows)
    return Shown(
        client_id=newest["client_id"],
        name=newest.get("name", ""),
        keys=len(rows) - disabled,
        disabled_keys=disabled,
        newest_key_at=int(newest["created_at"]) if "created_at" in newest else None,
        background=newest.get("background"),
        limits=_limits_of(newest),
    )


def _limits_of(row: Mapping[str, Any]) -> ClientLimits:
    return ClientLimits(**{name: int(row[name]) for name in LIMITS if name in row})


def _rows(clients_table: Any, client_id: str | None = None) -> list[dict[str, Any]]:
    """The rows of all clients' keys, or of one client's. Raises Refused if there is no such client."""
    rows = _rows_if_any(clients_table, client_id)
    if client_id is not None and not rows:
        raise Refused(f"there is no client {client_id!r}")
    return rows


def _rows_if_any(clients_table: Any, client_id: str | None) -> list[dict[str, Any]]:
    wanted = Attr("client_id").exists() if client_id is None else Attr("client_id").eq(client_id)
    rows: list[dict[str, Any]] = []
    start: dict[str, Any] = {}
    while True:  # there is an index by key only, and an operator looks rarely
        page = clients_table.scan(FilterExpression=wanted, **start)
        rows += page["Items"]
        if "LastEvaluatedKey" not in page:
            return rows
        start = {"ExclusiveStartKey": page["LastEvaluatedKey"]}


def _newest(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(rows, key=lambda row: row.get("created_at", 0))


def limits_of(clients_table: Any, client_id: str) -> ClientLimits:
    """A client's limits. Raises Refused if there is no such client."""
    if client_id == SLACK and not _rows_if_any(clients_table, client_id):
        return ClientLimits()  # it has a row only once it was given some
    return _limits_of(_newest(_rows(clients_table, client_id)))


@dataclass(frozen=True)
class Used:
    """What a limited client has used: requests of this minute; tokens and dollars of the UTC day."""

    day: str
    requests: int = 0
    tokens: int = 0
    micro_usd: int = 0


def used(tally: Tally | None, now: EpochMs) -> Used:
    """What its tally says as of now; nothing of minutes and days that are over."""
    day, minute = day_of(now), now // 1000 // MINUTE_SECONDS
    if tally is None:
        return Used(day)
    requests = tally.requests if tally.minute >= minute else 0
    return Used(day, requests, tally.tokens, tally.micro_usd) if tally.day >= day else Used(day, requests)


def limit_client(clients_table: Any, client_id: str, wanted: Mapping[str, int | None]) -> ClientLimits:
    """Set these limits of a client, for all of its keys; a None takes one back. Returns those then in force.

    The client that all people in Slack are has no key, but a row under its name. Raises Refused if there is no such
    client.
    """
    if client_id == SLACK:
        clients_table.update_item(
            Key={"key_hash": SLACK},
            UpdateExpression="SET client_id = :id, #name = if_not_exists(#name, :name)",
            ExpressionAttributeNames={"#name": "name"},
            ExpressionAttributeValues={":id": SLACK, ":name": "Slack"},
        )
    sets = {name: value for name, value in wanted.items() if value is not None}
    clauses = ["SET " + ", ".join(f"{name} = :{name}" for name in sets)] if sets else []
    removes = [name for name in wanted if name not in sets]
    clauses += ["REMOVE " + ", ".join(removes)] if removes else []
    changed: dict[str, Any] = {}
    for row in _rows(clients_table, client_id):
        changed = clients_table.update_item(
            Key={"key_hash": row["key_hash"]},
            UpdateExpression=" ".join(clauses),
            ConditionExpression="attribute_exists(key_hash)",
            ReturnValues="ALL_NEW",
            **({"ExpressionAttributeValues": {f":{name}": value for name, value in sets.items()}} if sets else {}),
        )["Attributes"]
    return _limits_of(changed)


def rotate_key(clients_table: Any, client_id: str, now_ms: int) -> str:
    """Give a client another key, with all that its newest one may do, and return it. Its others stay valid.

    Raises Refused if there is no such client, or none with a key.
    """
    rows = _rows(clients_table, client_id)
    if client_id == SLACK:
        raise Refused("Slack's people have no API key; their requests are signed, see `backburner secrets set`")
    newest = _newest(rows)
    return _put_key(clients_table, {name: newest.get(name) for name in COPIED}, now_ms)


def disable_keys(clients_table: Any, client_id: str, *, all_but_newest: bool) -> int:
    """Disable a client's keys, and return how many that were. Raises Refused if there is no such client."""
    rows = sorted(_rows(clients_table, client_id), key=lambda row: row.get("created_at", 0))
    live = [row for row in rows if not row.get("disabled")]
    going = live[:-1] if all_but_newest else live
    for row in going:
        clients_table.update_item(
            Key={"key_hash": row["key_hash"]},
            UpdateExpression="SET disabled = :yes",
            ConditionExpression="attribute_exists(key_hash)",
            ExpressionAttributeValues={":yes": True},
        )
    return len(going)


def micro_usd(usd: float) -> int:
    """Dollars in micro-dollars, to the nearest."""
    return round(Decimal(str(usd)) * 1_000_000)


def new_webhook_secret() -> str:
    """A fresh webhook secret: 256 random bits."""
    return WEBHOOK_SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def rotate_webhook_secret(clients: ClientsTable, seals: Seals, client_id: str, *, now: EpochMs, grace_ms: int) -> str:
    """Give a client a new webhook secret and return it; the one before stays valid for so long.

    It is kept sealed only. Raises Refused if there is no such client.
    """
    if not clients.knows(client_id):
        raise Refused(f"there is no client {client_id!r}")
    secret = new_webhook_secret()
    clients.put_webhook_secret(client_id, seals.seal(secret), now, previous_until=now + grace_ms)
    return secret


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────

app = typer.Typer(no_args_is_help=True, help="Clients: their API keys, limits and webhook secrets.")
webhook_secret = typer.Typer(no_args_is_help=True, help="What a client's webhooks are signed with.")
app.add_typer(webhook_secret, name="webhook-secret")

ClientId = Annotated[str, typer.Argument(help="As it was created.")]
RequestsPerMinute = Annotated[int | None, typer.Option(min=0, help="0 for no limit.", show_default=False)]
TokensPerDay = Annotated[
    int | None, typer.Option(min=0, help="Input and output, by UTC's day; 0 for no limit.", show_default=False)
]
UsdPerDay = Annotated[
    float | None, typer.Option(min=0, help="Dollars, by UTC's day; 0 for no limit.", show_default=False)
]


def _now() -> EpochMs:
    return time.time_ns() // 1_000_000


def _given(requests: int | None, tokens: int | None, usd: float | None) -> dict[str, int | None]:
    """The limits that were named, a zero as None."""
    given = {
        "requests_per_minute": requests,
        "tokens_per_day": tokens,
        "micro_usd_per_day": None if usd is None else micro_usd(usd),
    }
    return {name: value or None for name, value in given.items() if value is not None}


def _in_words(limits: ClientLimits) -> str:
    """Limits for people, such as `60 requests a minute, $20 a day`."""
    words = []
    if limits.requests_per_minute is not None:
        words.append(f"{limits.requests_per_minute:,} requests a minute")
    if limits.tokens_per_day is not None:
        words.append(f"{limits.tokens_per_day:,} tokens a day")
    if limits.micro_usd_per_day is not None:
        words.append(f"${limits.micro_usd_per_day / 1_000_000:,.10g} a day")
    return ", ".join(words) or "no limit"


@app.command("create")
def create(
    client_id: Annotated[str, typer.Argument(help="Lower-case letters, digits and hyphens.")],
    name: Annotated[str, typer.Option(help="What people call it; the id if left out.")] = "",
    background: Annotated[
        bool | None,
        typer.Option(help="Let OpenAI keep its calls going in the background, or not; left out: as deployed."),
    ] = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    usd_per_day: UsdPerDay = None,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Create a client and print its API key, which is kept nowhere else."""
    at = Deployment.find(stack, profile, region)
    clients, api_url = at.table("ClientsTableName"), at.outputs["ApiUrl"]
    wanted = ClientLimits(**_given(requests_per_minute, tokens_per_day, usd_per_day))
    key = create_client(clients, client_id, name or client_id, _now(), background=background, limits=wanted)
    show(
        {"client_id": client_id, "api_key": key, "api_url": api_url},
        f"Client {client_id} may now use this key. Keep it safe: it is not stored and cannot be shown again.",
        f"\n  {key}\n",
        f"Try it:  curl {api_url}/jobs -H 'Authorization: Bearer {key}' \\\n"
        "           -H 'Content-Type: application/json' -d '{\"prompt\":\"Name a river.\"}'",
        as_json=as_json,
    )


@app.command("list")
def list_(stack: StackName = None, profile: Profile = None, region: Region = None, as_json: AsJson = False) -> None:
    """List the clients, with their limits and the number of their keys."""
    found = list_clients(Deployment.find(stack, profile, region).table("ClientsTableName"))
    grid = table("client", "name", "#keys", "#disabled", "newest key", "limits")
    for client in found:
        made = time.strftime("%Y-%m-%d", time.gmtime((client.newest_key_at or 0) / 1000))
        grid.add_row(
            client.client_id,
            client.name,
            str(client.keys),
            str(client.disabled_keys or ""),
            made if client.newest_key_at else "",
            _in_words(client.limits),
        )
    show({"clients": found}, grid, as_json=as_json)


@app.command("limits")
def limits(
    client_id: ClientId,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    usd_per_day: UsdPerDay = None,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Set a client's limits, in force within half a minute; or show them, and what is used of them today.

    The client `slack` is all people in Slack.
    """
    wanted = _given(requests_per_minute, tokens_per_day, usd_per_day)
    at = Deployment.find(stack, profile, region)
    clients = at.table("ClientsTableName")
    limits = limit_client(clients, client_id, wanted) if wanted else limits_of(clients, client_id)
    tallies = TalliesTable(at.client("dynamodb"), at.outputs["LimitsTableName"], at.outputs["JobsTableName"])
    found = used(tallies.read(client_id), _now())
    told = f"{client_id}: {_in_words(limits)}"
    show({**asdict(limits), "used": found}, told, *_use_in_words(limits, found), as_json=as_json)


def _use_in_words(limits: ClientLimits, used: Used) -> list[str]:
    if limits == ClientLimits():
        return ["What a client without limits uses is not counted."]
    usd = used.micro_usd / 1_000_000
    return [
        f"used today ({used.day}, UTC): {used.tokens:,} tokens and ${usd:,.10g}, with the worst case of what runs",
        f"requests in this minute: {used.requests:,}",
    ]


@app.command("rotate")
def rotate(
    client_id: ClientId,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Give a client another API key and print it, once. The old ones work until you disable them.

    When nobody uses them any more: `backburner clients disable CLIENT --old-keys`.
    """
    key = rotate_key(Deployment.find(stack, profile, region).table("ClientsTableName"), client_id, _now())
    show(
        {"client_id": client_id, "api_key": key},
        f"{client_id} may now use this key too. Keep it safe: it is not stored and cannot be shown again.",
        f"\n  {key}\n",
        f"Once nobody uses the others: backburner clients disable {client_id} --old-keys",
        as_json=as_json,
    )


@app.command("disable")
def disable(
    client_id: ClientId,
    old_keys: Annotated[bool, typer.Option("--old-keys", help="All keys but the newest.")] = False,
    yes: Yes = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Disable a client's API keys, in force within half a minute. Its jobs go on; `clients rotate` lets it in again."""
    at = Deployment.find(stack, profile, region)
    which = "all keys but the newest" if old_keys else "ALL keys"
    confirm(f"Disable {which} of {client_id} on {at.name}?", yes=yes)
    count = disable_keys(at.table("ClientsTableName"), client_id, all_but_newest=old_keys)
    show({"client_id": client_id, "disabled": count}, f"{client_id}: {count} disabled.", as_json=as_json)


@webhook_secret.command("rotate")
def rotate_secret(
    client_id: Annotated[str, typer.Argument(help="A client that exists.")],
    grace_hours: Annotated[float, typer.Option(min=0, max=720, help="How long the one before stays valid too.")] = 24,
    yes: Yes = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Give a client a new webhook secret and print it, once. Until the one before ends, both sign.

    Asks only where the one before would end at once.
    """
    at = Deployment.find(stack, profile, region)
    grace_ms = round(grace_hours * 3_600_000)
    if not grace_ms:
        confirm(f"Replace the webhook secret of {client_id} on {at.name}? The one before ends at once.", yes=yes)
    clients = ClientsTable(at.client("dynamodb"), at.outputs["ClientsTableName"])
    seals = FernetSeals(lambda: at.client("secretsmanager"), at.outputs["WebhookKeySecretArn"])
    secret = rotate_webhook_secret(clients, seals, client_id, now=_now(), grace_ms=grace_ms)
    show(
        {"client_id": client_id, "webhook_secret": secret},
        f"Webhooks of {client_id} are now signed with this secret. Give it to the receiver; it is not shown again.",
        f"\n  {secret}\n",
        f"The one before, if there was one, signs as well for {grace_hours:g} hours.",
        as_json=as_json,
    )
