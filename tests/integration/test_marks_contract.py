"""What every store of marks keeps: the one in memory is as true as DynamoDB's."""

from __future__ import annotations

import time
from typing import Any

import pytest

from backburner.adapters.aws import client as aws_client
from backburner.adapters.limits import MarksTable
from backburner.ports import Marks
from tests.fakes.memory import MemoryMarks
from tests.integration.deployed import Deployed


@pytest.fixture(params=["memory", "dynamodb"])
def marks(request: pytest.FixtureRequest) -> Marks:
    """Either store."""
    if request.param == "memory":
        return MemoryMarks()
    deployed: Deployed = request.getfixturevalue("deployed")
    client = aws_client("dynamodb", connect_seconds=1, read_seconds=5, tries=1)
    return MarksTable(client, deployed.names["LimitsTable"])


UNTIL = int(time.time()) + 600


def test_the_first_items_are_admitted_and_stay_so(marks: Marks) -> None:
    """Up to the limit of each name; one that is among them may come again."""
    assert [marks.admit("a", item, limit=2, until=UNTIL) for item in ("1", "2", "3", "1", "2", "3")] == [
        *(True, True, False),
        *(True, True, False),
    ]
    assert marks.admit("b", "3", limit=1, until=UNTIL)


def test_a_mark_is_there_once_anything_was_admitted(marks: Marks) -> None:
    """And under no other name."""
    assert not marks.is_marked("a")
    marks.admit("a", "x", limit=1, until=UNTIL)
    assert (marks.is_marked("a"), marks.is_marked("b")) == (True, False)


def test_marks_go_when_their_time_is_over(deployed: Deployed) -> None:
    """By the attribute that the table's TTL reads."""
    client: Any = aws_client("dynamodb", connect_seconds=1, read_seconds=5, tries=1)
    table = deployed.names["LimitsTable"]
    MarksTable(client, table).admit("a", "x", limit=1, until=UNTIL)
    row = client.get_item(TableName=table, Key={"limit_id": {"S": "a"}})["Item"]
    assert row["expires_at"] == {"N": str(UNTIL)}
