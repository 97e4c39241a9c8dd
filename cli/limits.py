"""Providers' limits: what stands in the limits table, and changing it while jobs run."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from backburner.adapters.limits import LimitsTable
from backburner.limits import limit_of
from backburner.models import DIMENSIONS, EpochMs, Gauge, Limits, ModelInfo
from backburner.ports import Stale
from backburner.pricing import PriceList

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


def gauges(client: Any, table: str) -> dict[str, Gauge]:
    """The rows of all models that have been called or configured, by model. client: a low-level DynamoDB client."""
    store = LimitsTable(client, table)
    pages = client.get_paginator("scan").paginate(TableName=table, ProjectionExpression="limit_id")
    names = sorted(item["limit_id"]["S"] for page in pages for item in page["Items"])
    found = {name.removeprefix(PREFIX): store.read(name) for name in names if name.startswith(PREFIX)}
    return {model: gauge for model, gauge in found.items() if gauge is not None}


def change(client: Any, table: str, model: str, limits: dict[str, int | None], burst_ms: int | None) -> Gauge:
    """Set an operator's limits of a model; None takes one back. In force from the model's next call.

    client: a low-level DynamoDB client. Raises ValueError for a model that the shipped catalogue lacks and that has no
    row, since it is probably misspelt.
    """
    store = LimitsTable(client, table)
    name = f"{PREFIX}{model}"
    current = store.read(name)
    if current is None and PriceList.load().find(model) is None:
        raise ValueError(f"no model {model!r} in the catalogue, and none of that name has been called yet")
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
    raise RuntimeError("the row changes faster than it can be written; try again")
