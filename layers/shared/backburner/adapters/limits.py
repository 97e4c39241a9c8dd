"""The Limits table's rows of models: `limit_id` is `model#<name>`.

Attributes an operator may read and change: `requests_per_minute`, `tokens_per_minute`, `input_tokens_per_minute`,
`output_tokens_per_minute`, `burst_ms`. `cursor_*` are microseconds since the epoch; `state` and `learned` are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from botocore.exceptions import ClientError

from backburner.adapters.aws import translated
from backburner.errors import PortUnavailable
from backburner.models import (
    DIMENSIONS,
    EpochSeconds,
    Gauge,
    Learned,
    Limits,
    Micros,
    Vacancy,
    canonical_json,
)
from backburner.ports import Stale

type Item = dict[str, Any]

CURSOR = "cursor_"
STATE = ("seen", "share", "share_at", "held_until", "refused_at", "strikes", "struck_at", "vacant")


def item_of(gauge: Gauge) -> Item:
    """A gauge as the row spells it, without its key; what is not set stays out."""
    item = {f"{name}_per_minute": _number(getattr(gauge.limits, name)) for name in DIMENSIONS}
    item |= {f"{CURSOR}{name}": _number(at) for name, at in gauge.cursors.items()}
    state = {name: value for name, value in asdict(gauge).items() if name in STATE}
    return {name: value for name, value in item.items() if value is not None} | {
        "revision": {"N": str(gauge.revision)},
        "burst_ms": {"N": str(gauge.burst_ms)},
        "state": {"S": canonical_json(state)},
        "learned": {"S": canonical_json(asdict(gauge.learned))},
    }


def gauge_of(item: Item) -> Gauge:
    """The gauge that a row describes. Attributes of later versions are passed over."""
    read = json.loads(item["state"]["S"]) if "state" in item else {}
    state: dict[str, Any] = {name: value for name, value in read.items() if name in STATE}
    if "seen" in state:
        state["seen"] = Limits(**state["seen"])
    if "burst_ms" in item:
        state["burst_ms"] = int(item["burst_ms"]["N"])
    if "vacant" in state:
        state["vacant"] = tuple(Vacancy(**vacancy) for vacancy in state["vacant"])
    return Gauge(
        name=item["limit_id"]["S"],
        revision=int(item.get("revision", {"N": "0"})["N"]),
        limits=Limits(
            **{name: int(item[f"{name}_per_minute"]["N"]) for name in DIMENSIONS if f"{name}_per_minute" in item}
        ),
        learned=Learned(**json.loads(item["learned"]["S"])) if "learned" in item else Learned(),
        cursors={name.removeprefix(CURSOR): int(value["N"]) for name, value in item.items() if name.startswith(CURSOR)},
        **state,
    )


def _number(value: int | None) -> Item | None:
    return None if value is None else {"N": str(value)}


class _Expression:
    """Names and values of one update: `#0`, `:0` and so on."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.values: Item = {}

    def name(self, attribute: str) -> str:
        return next((key for key, name in self.names.items() if name == attribute), None) or self._new(attribute)

    def _new(self, attribute: str) -> str:
        key = f"#{len(self.names)}"
        self.names[key] = attribute
        return key

    def value(self, value: Item) -> str:
        key = f":{len(self.values)}"
        self.values[key] = value
        return key


class LimitsTable:
    """The Limits table, as ports.LimitStore."""

    def __init__(self, client: Any, table: str) -> None:
        self._client = client
        self._table = table

    def read(self, name: str) -> Gauge | None:
        """The gauge, possibly a moment old: half the price of a consistent read, and the writes are conditional."""
        with translated():
            reply = self._client.get_item(TableName=self._table, Key={"limit_id": {"S": name}})
        return gauge_of(reply["Item"]) if "Item" in reply else None

    def add(self, gauge: Gauge, costs: Mapping[str, Micros], *, floor: Micros, ceilings: Mapping[str, Micros]) -> Gauge:
        """Move the cursors on if they lie where they were thought to. Raises Stale."""
        expression = _Expression()
        conditions = [f"{expression.name('revision')} = {expression.value({'N': str(gauge.revision)})}"]
        low = expression.value({"N": str(floor)})
        sets, adds = [], []
        for name, cost in costs.items():
            cursor = expression.name(CURSOR + name)
            if gauge.cursors.get(name, -1) < floor:
                conditions.append(f"(attribute_not_exists({cursor}) OR {cursor} <= {low})")
                sets.append(f"{cursor} = {expression.value({'N': str(floor + cost)})}")
            else:
                conditions.append(f"{cursor} BETWEEN {low} AND {expression.value({'N': str(ceilings[name])})}")
                adds.append(f"{cursor} {expression.value({'N': str(cost)})}")
        clauses = [f"{word} {', '.join(moves)}" for word, moves in (("SET", sets), ("ADD", adds)) if moves]
        return self._update(gauge.name, " ".join(clauses), " AND ".join(conditions), expression)

    def replace(self, old: Gauge | None, new: Gauge) -> Gauge:
        """Write what differs, if what was read still stands. Raises Stale."""
        expression, before, after = _Expression(), item_of(old) if old is not None else {}, item_of(new)
        if old is None or old.revision == 0:  # no row, or one that an operator has typed in
            conditions = [f"attribute_not_exists({expression.name('revision')})"]
        else:
            conditions = [f"{expression.name('revision')} = {expression.value({'N': str(old.revision)})}"]
        for name, value in after.items():
            if old is not None and name.startswith(CURSOR) and value != before.get(name):
                stood = before.get(name)
                conditions.append(
                    f"{expression.name(name)} = {expression.value(stood)}"
                    if stood
                    else f"attribute_not_exists({expression.name(name)})"
                )
        changed = {name: value for name, value in after.items() if value != before.get(name)}
        sets = [f"{expression.name(name)} = {expression.value(value)}" for name, value in changed.items()]
        gone = [expression.name(name) for name in before if name not in after]
        update = f"SET {', '.join(sets)}" + (f" REMOVE {', '.join(gone)}" if gone else "")
        return self._update(new.name, update, " AND ".join(conditions), expression)

    def adjust(self, name: str, costs: Mapping[str, Micros], learned: Learned | None) -> Gauge:
        """Move the cursors, and note what was learned. Raises Stale if there is no such row."""
        expression = _Expression()
        condition = f"attribute_exists({expression.name('limit_id')})"
        clauses = []
        if learned is not None:
            text = expression.value({"S": canonical_json(asdict(learned))})
            clauses.append(f"SET {expression.name('learned')} = {text}")
        if costs:
            moves = [
                f"{expression.name(CURSOR + key)} {expression.value({'N': str(cost)})}" for key, cost in costs.items()
            ]
            clauses.append(f"ADD {', '.join(moves)}")
        return self._update(name, " ".join(clauses), condition, expression)

    def advance(self, name: str, start: Micros, step: Micros, until: EpochSeconds) -> Micros:
        """Take the next place in a line: one write while the line is ahead of `start`, else two."""
        key = {"limit_id": {"S": name}}
        values = {":start": {"N": str(start)}, ":step": {"N": str(step)}, ":until": {"N": str(until)}}
        for update, condition in (
            ("SET line_end = line_end + :step, expires_at = :until", "line_end >= :start"),
            ("SET line_end = :ahead, expires_at = :until", "attribute_not_exists(line_end) OR line_end < :start"),
            ("SET line_end = line_end + :step, expires_at = :until", "line_end >= :start"),
        ):
            used = {name: value for name, value in values.items() if name in update + condition}
            if ":ahead" in update:
                used[":ahead"] = {"N": str(start + step)}
            try:
                with translated():
                    reply = self._client.update_item(
                        TableName=self._table,
                        Key=key,
                        UpdateExpression=update,
                        ConditionExpression=condition,
                        ExpressionAttributeValues=used,
                        ReturnValues="UPDATED_NEW",
                    )
                return int(reply["Attributes"]["line_end"]["N"]) - step
            except PortUnavailable as error:
                if _refused(error) is None:
                    raise
        return start

    def end_of(self, name: str) -> Micros:
        """The end of a line, possibly a moment old; 0 if there is none."""
        with translated():
            reply = self._client.get_item(
                TableName=self._table, Key={"limit_id": {"S": name}}, ProjectionExpression="line_end"
            )
        return int(reply["Item"]["line_end"]["N"]) if reply.get("Item") else 0

    def _update(self, name: str, update: str, condition: str, expression: _Expression) -> Gauge:
        values = {"ExpressionAttributeValues": expression.values} if expression.values else {}
        try:
            with translated():
                reply = self._client.update_item(
                    TableName=self._table,
                    Key={"limit_id": {"S": name}},
                    UpdateExpression=update,
                    ConditionExpression=condition,
                    ExpressionAttributeNames=expression.names,
                    ReturnValues="ALL_NEW",
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                    **values,
                )
        except PortUnavailable as error:
            refused = _refused(error)
            if refused is None:
                raise
            raise Stale(gauge_of(refused) if refused else None) from error
        return gauge_of(reply["Attributes"])


class MarksTable:
    """Rows of the Limits table that are no limits but small facts, as ports.Marks: a set of texts under a name."""

    def __init__(self, client: Any, table: str) -> None:
        self._client = client
        self._table = table

    def admit(self, name: str, item: str, *, limit: int, until: EpochSeconds) -> bool:
        """Whether the item is among the first: one write."""
        try:
            with translated():
                self._client.update_item(
                    TableName=self._table,
                    Key={"limit_id": {"S": name}},
                    UpdateExpression="ADD #items :item SET expires_at = :until",
                    ConditionExpression="attribute_not_exists(#items) OR contains(#items, :one) OR size(#items) < :n",
                    ExpressionAttributeNames={"#items": "items"},  # a reserved word
                    ExpressionAttributeValues={
                        ":item": {"SS": [item]},
                        ":one": {"S": item},
                        ":n": {"N": str(limit)},
                        ":until": {"N": str(until)},
                    },
                )
        except PortUnavailable as error:
            if _refused(error) is None:
                raise
            return False
        return True

    def is_marked(self, name: str) -> bool:
        """Whether there is such a row."""
        with translated():
            reply = self._client.get_item(
                TableName=self._table, Key={"limit_id": {"S": name}}, ProjectionExpression="limit_id"
            )
        return "Item" in reply


def _refused(error: PortUnavailable) -> Item | None:
    """The row that refused a conditional write ({} if there was none); None for any other error."""
    cause = error.__cause__
    if (
        isinstance(cause, ClientError)
        and cause.response.get("Error", {}).get("Code") == "ConditionalCheckFailedException"
    ):
        response: Item = dict(cause.response)  # botocore's types do not know of Item here
        item: Item = response.get("Item") or {}
        return item
    return None
