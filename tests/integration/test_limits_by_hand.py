"""What an operator sees of the limits and changes in them, on the Limits table itself."""

from __future__ import annotations

from typing import Any

import boto3
import pytest

from backburner.models import Gauge, Limits
from backburner.pricing import PriceList
from cli.limits import change, gauges, shown, state
from tests.integration.deployed import Deployed

MINI = "gpt-5.4-mini"


@pytest.fixture
def table(deployed: Deployed) -> tuple[Any, str]:
    """A low-level client and the table's name."""
    return boto3.client("dynamodb"), deployed.names["LimitsTable"]


def test_a_limit_is_set_changed_and_taken_back(table: tuple[Any, str]) -> None:
    """The others stay; what is taken back leaves the catalogue's."""
    first = change(*table, MINI, {"requests": 50, "tokens": 7}, None).revision
    change(*table, MINI, {"requests": 60}, 250)
    gauge = gauges(*table)[MINI]
    assert (gauge.limits, gauge.burst_ms, gauge.revision) == (Limits(requests=60, tokens=7), 250, first + 1)
    change(*table, MINI, {"requests": None}, None)
    model = PriceList.load().find(MINI)
    assert model is not None
    lines = {line.dimension: line for line in shown(model, gauges(*table)[MINI])}
    assert (lines["requests"].in_force, lines["requests"].operator) == (model.limits.requests, None)
    assert (lines["tokens"].in_force, lines["tokens"].catalogue) == (7, model.limits.tokens)


def test_a_limit_typed_into_the_table_can_be_changed(table: tuple[Any, str]) -> None:
    """A row with one limit and nothing else."""
    client, name = table
    client.put_item(TableName=name, Item={"limit_id": {"S": f"model#{MINI}"}, "requests_per_minute": {"N": "7"}})
    assert gauges(*table)[MINI].limits == Limits(requests=7)
    assert change(*table, MINI, {"requests": None, "tokens": 5}, None).limits == Limits(tokens=5)
    assert gauges(*table)[MINI].limits == Limits(tokens=5)


def test_a_misspelt_model_is_refused(table: tuple[Any, str]) -> None:
    """Or a limit would be set that nobody heeds."""
    with pytest.raises(ValueError, match="mimi"):
        change(*table, "gpt-5.4-mimi", {"requests": 1}, None)
    assert gauges(*table) == {}


def test_what_is_unusual_is_said() -> None:
    """And nothing where nothing is."""
    assert state(Gauge("model#m"), 1_000) == ""
    gauge = Gauge("model#m", held_until=9_000, share=0.5, strikes=2, cursors={"requests": 3_500_000})
    assert state(gauge, 1_000) == (
        "held by the provider for 8 s more, using 50% of its limits after refusals, 2 strikes after failures, "
        "reserved 2.5 s ahead"
    )
