"""What the Connections table keeps, in memory as in DynamoDB."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest

from backburner.adapters.aws import client as aws_client
from backburner.adapters.connections import ConnectionsTable
from backburner.errors import ConnectionUnknown, TooManySubscriptions
from backburner.ports import Listener
from tests.fakes.sockets import MemoryConnections
from tests.integration.deployed import Deployed


@dataclass
class Hall:
    """A table and the clock that it goes by."""

    table: Any = None
    time: int = 1_800_000_000
    rows: Any = field(default=list)

    def follow(self, job_id: str, connection_id: str, name: str = "s", **more: int) -> None:
        """Subscribe."""
        self.table.subscribe(job_id, Listener(connection_id, name, **more), jobs_max=2)

    def names(self, job_id: str) -> list[str]:
        """Who follows the job."""
        return sorted(listener.connection_id for listener in self.table.listeners(job_id, 100, sure=True))


@pytest.fixture(params=["memory", "dynamodb"])
def hall(request: pytest.FixtureRequest) -> Hall:
    """Either table."""
    hall = Hall()
    if request.param == "memory":
        hall.table = MemoryConnections(lambda: hall.time)
    else:
        deployed: Deployed = request.getfixturevalue("deployed")
        client = aws_client("dynamodb", connect_seconds=1, read_seconds=5, tries=1)
        hall.table = ConnectionsTable(client, deployed.names["ConnectionsTable"], lambda: hall.time)
        hall.rows = lambda: boto3.resource("dynamodb").Table(deployed.names["ConnectionsTable"]).scan()["Items"]
    hall.table.open("c1", "alice", hall.time + 100)
    hall.table.open("c2", "alice", hall.time + 200)
    return hall


def test_a_connection_is_known_until_it_is_closed_or_expires(hall: Hall) -> None:
    """TTL deletes late, so the time is looked at."""
    assert hall.table.client_id("c1") == "alice"
    assert hall.table.client_id("c3") is None
    hall.time += 100
    assert hall.table.client_id("c1") is None
    assert hall.table.client_id("c2") == "alice"
    hall.table.close("c2")
    hall.table.close("c2")
    assert hall.table.client_id("c2") is None


def test_listeners_are_those_who_follow_the_job(hall: Hall) -> None:
    """As they said last."""
    hall.follow("j1", "c1", "first", draft=1, position=5)
    hall.follow("j1", "c1", "second", draft=2, position=7)
    hall.follow("j1", "c2")
    hall.follow("j2", "c2")
    assert sorted(hall.table.listeners("j1", 100, sure=False), key=lambda listener: listener.connection_id) == [
        Listener("c1", "second", 2, 7),
        Listener("c2", "s", 0, 0),
    ]
    assert len(hall.table.listeners("j1", 1, sure=True)) == 1
    hall.table.unsubscribe("j1", "c2")
    hall.table.unsubscribe("j1", "c2")
    hall.table.unsubscribe("j3", "nobody")
    assert (hall.names("j1"), hall.names("j2"), hall.names("j3")) == (["c1"], ["c2"], [])
    assert hall.table.client_id("nobody") is None


def test_a_closed_connection_follows_nothing(hall: Hall) -> None:
    """Nor does one whose subscription its own list does not name."""
    hall.follow("j1", "c1")
    hall.follow("j2", "c1")
    hall.follow("j2", "c2")
    hall.table.close("c1")
    assert (hall.names("j1"), hall.names("j2")) == ([], ["c2"])
    hall.table.close("c2", following="j2")
    hall.table.close("c2", following="j2")
    assert hall.names("j2") == []
    assert not hall.rows()


def test_an_expired_connection_listens_no_more(hall: Hall) -> None:
    """Its subscriptions expire with it."""
    hall.follow("j1", "c1")
    hall.follow("j1", "c2")
    hall.time += 100
    assert hall.names("j1") == ["c2"]


def test_a_connection_follows_no_more_than_its_bound(hall: Hall) -> None:
    """One that it follows already is no further one; one that it follows no more makes room."""
    hall.follow("j1", "c1")
    hall.follow("j2", "c1")
    with pytest.raises(TooManySubscriptions):
        hall.follow("j3", "c1")
    assert hall.names("j3") == []
    hall.follow("j2", "c1", "anew")
    hall.table.unsubscribe("j1", "c1")
    hall.follow("j3", "c1")
    assert hall.names("j3") == ["c1"]


def test_who_is_not_connected_follows_nothing(hall: Hall) -> None:
    """And does not become a connection by trying."""
    with pytest.raises(ConnectionUnknown):
        hall.follow("j1", "c3")
    assert hall.names("j1") == []
    assert hall.table.client_id("c3") is None


def test_a_ticket_is_good_once_and_for_its_time(hall: Hall) -> None:
    """Not a second time, not after it expired, and no other."""
    hall.table.issue("t1", "alice", hall.time + 60)
    hall.table.issue("t2", "bob", hall.time + 60)
    assert hall.table.redeem("t1") == "alice"
    assert hall.table.redeem("t1") is None
    assert hall.table.redeem("t3") is None
    hall.time += 60
    assert hall.table.redeem("t2") is None


def test_of_two_who_use_a_ticket_at_once_one_gets_in(hall: Hall) -> None:
    """Ten times over."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        for number in range(10):
            hall.table.issue(f"t{number}", "alice", hall.time + 60)
            got = list(pool.map(hall.table.redeem, [f"t{number}"] * 2))
            assert sorted(got, key=str) == [None, "alice"]


def test_a_ticket_cannot_be_read_from_the_table(hall: Hall) -> None:
    """Its hash can."""
    hall.table.issue("secret-ticket", "alice", hall.time + 60)
    assert "secret-ticket" not in str(hall.rows())
