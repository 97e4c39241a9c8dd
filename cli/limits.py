"""`backburner limits`: the providers' limits as the Limits table has them, and changing them while jobs run."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from backburner.adapters.limits import LimitsTable
from backburner.limits import limit_of
from backburner.models import DIMENSIONS, EpochMs, Gauge, Limits, ModelInfo
from backburner.ports import Stale
from backburner.pricing import PriceList
from cli.deployment import Deployment, Profile, Region, StackName
from cli.screen import AsJson, Refused, show, table

PREFIX = "model#"
TRIES = 10


@dataclass(frozen=True)
class Shown:
    """One dimension of one model: the limits per minute by where they come from, and the one in force."""

    model: str
    dimension: str
    catalogue: int | None
    operator: int | None
    provider: int | None
    in_force: float | None


def shown(model: ModelInfo, gauge: Gauge) -> list[Shown]:
    """The limits of a model, one line each where there is any."""
    lines = [
        Shown(
            model.name,
            dimension,
            getattr(model.limits, dimension),
            getattr(gauge.limits, dimension),
            getattr(gauge.seen, dimension),
            limit_of(model, gauge, dimension),
        )
        for dimension in DIMENSIONS
    ]
    return [line for line in lines if line.in_force is not None]


def state(gauge: Gauge, now: EpochMs) -> str:
    """What is unusual about a model just now, in a few words; empty if nothing is."""
    words = []
    if gauge.held_until > now:
        words.append(f"held by the provider for {(gauge.held_until - now) / 1000:.0f} s more")
    if gauge.share < 1:
        words.append(f"using {gauge.share:.0%} of its limits after refusals")
    if gauge.strikes:
        words.append(f"{gauge.strikes} strikes after failures")
    ahead = max(gauge.cursors.values(), default=0) / 1000 - now
    if ahead > 0:
        words.append(f"reserved {ahead / 1000:.1f} s ahead")
    return ", ".join(words)


def numbers(gauge: Gauge, now: EpochMs) -> dict[str, float]:
    """The same as numbers; nothing is unusual where the share is 1 and the others are 0."""
    ahead = max(gauge.cursors.values(), default=0) / 1000 - now
    return {
        "held_seconds": max(0.0, (gauge.held_until - now) / 1000),
        "share": gauge.share,
        "strikes": gauge.strikes,
        "reserved_seconds": max(0.0, ahead / 1000),
    }


def gauges(client: Any, limits_table: str) -> dict[str, Gauge]:
    """The rows of all models that have been called or configured, by model. client: a low-level DynamoDB client."""
    store = LimitsTable(client, limits_table)
    pages = client.get_paginator("scan").paginate(TableName=limits_table, ProjectionExpression="limit_id")
    names = sorted(item["limit_id"]["S"] for page in pages for item in page["Items"])
    found = {name.removeprefix(PREFIX): store.read(name) for name in names if name.startswith(PREFIX)}
    return {model: gauge for model, gauge in found.items() if gauge is not None}


def change(
    client: Any,
    limits_table: str,
    model: str,
    limits: dict[str, int | None],
    burst_ms: int | None,
    catalogue: PriceList | None = None,
) -> Gauge:
    """Set an operator's limits of a model; None takes one back. In force from the model's next call.

    client: a low-level DynamoDB client. catalogue: the deployment's; None: the shipped one. Raises Refused for a model
    that it lacks and that has no row, since it is probably misspelt.
    """
    store = LimitsTable(client, limits_table)
    name = f"{PREFIX}{model}"
    current = store.read(name)
    if current is None and (catalogue or PriceList.load()).find(model) is None:
        raise Refused(f"no model {model!r} in the catalogue, and none of that name has been called yet")
    for _ in range(TRIES):
        old = current or Gauge(name)
        new = replace(
            old,
            limits=Limits(**{**asdict(old.limits), **limits}),
            burst_ms=old.burst_ms if burst_ms is None else burst_ms,
            revision=(old.revision or time.time_ns() // 1_000_000) + 1,
        )
        try:
            return store.replace(current, new)
        except Stale as stale:
            current = stale.current
    raise Refused("the row changes faster than it can be written; try again")


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────

app = typer.Typer(no_args_is_help=True, help="The providers' limits, changed while jobs run.")
PerMinute = Annotated[int | None, typer.Option(min=0, help="Per minute; 0 takes it back.", show_default=False)]


def _unknown(name: str) -> ModelInfo:
    """A model of the deployment's own catalogue, of which only its row is known here."""
    return ModelInfo(name, "", 0, 0, 0, 0, 0, 0)


@app.command("show")
def show_limits(
    stack: StackName = None, profile: Profile = None, region: Region = None, as_json: AsJson = False
) -> None:
    """Show each model's limits per minute, where they come from, and what holds it up now."""
    at = Deployment.find(stack, profile, region)
    catalogue, now = at.catalogue, time.time_ns() // 1_000_000
    rows = gauges(at.client("dynamodb"), at.outputs["LimitsTableName"])
    models = [catalogue.find(name) or _unknown(name) for name in sorted({*catalogue.names(), *rows})]
    lines = [line for model in models for line in shown(model, rows.get(model.name, Gauge(model.name)))]
    states = {name: state(row, now) for name, row in rows.items()}
    grid = table("model", "per minute", "#catalogue", "#operator", "#provider says", "#in force")
    for line in lines:
        cells = (line.catalogue, line.operator, line.provider, line.in_force)
        grid.add_row(line.model, line.dimension.replace("_", " "), *(f"{c:,.0f}" if c else "" for c in cells))
    said = [f"{name}: {text or 'nothing reserved'}" for name, text in states.items()]
    now_used = {name: numbers(row, now) for name, row in rows.items()}
    show({"limits": lines, "state": states, "numbers": now_used}, grid, *said, as_json=as_json)


@app.command("set")
def set_limits(
    model: Annotated[str, typer.Argument(help="As in the catalogue.")],
    requests: PerMinute = None,
    tokens: PerMinute = None,
    input_tokens: PerMinute = None,
    output_tokens: PerMinute = None,
    burst_ms: Annotated[int | None, typer.Option(min=0, max=60_000, help="How far calls may bunch together.")] = None,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Set a model's limits, in force from its next call. `tokens` is input and output together, as OpenAI counts."""
    given = {"requests": requests, "tokens": tokens, "input_tokens": input_tokens, "output_tokens": output_tokens}
    wanted = {name: value or None for name, value in given.items() if value is not None}
    if not wanted and burst_ms is None:
        raise Refused("Say what to set, such as --requests 500.")
    at = Deployment.find(stack, profile, region)
    catalogue, table_name = at.catalogue, at.outputs["LimitsTableName"]
    gauge = change(at.client("dynamodb"), table_name, model, wanted, burst_ms, catalogue)
    now = {"model": model, "operator": gauge.limits, "burst_ms": gauge.burst_ms}
    show(now, f"{model}: set. `backburner limits show` tells what is in force.", as_json=as_json)
