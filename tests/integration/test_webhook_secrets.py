"""What seals webhook secrets, and where the clients' own are kept, on moto."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from backburner.adapters.dynamodb import ClientsTable
from backburner.adapters.secrets import REFRESH_SECONDS_MIN, FernetSeals
from backburner.errors import PortUnavailable, SealBroken
from cli.clients import create_client
from cli.sealing import rotate_key
from tests.integration.deployed import Deployed

DAY = 86_400_000


class Hours:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def keys_kept(deployed: Deployed) -> Iterator[None]:
    """The template's secret as it was, for whoever comes next."""
    client: Any = boto3.client("secretsmanager")
    before = client.get_secret_value(SecretId=deployed.names["WebhookKeySecret"])["SecretString"]
    yield
    put(deployed, before)


def put(deployed: Deployed, text: str) -> None:
    """Replace the keys, as an operator does."""
    client: Any = boto3.client("secretsmanager")
    client.put_secret_value(SecretId=deployed.names["WebhookKeySecret"], SecretString=text)


def seals(deployed: Deployed, clock: Hours | None = None) -> FernetSeals:
    """A function's."""
    return FernetSeals(
        lambda: boto3.client("secretsmanager"), deployed.names["WebhookKeySecret"], monotonic=clock or Hours()
    )


def test_what_is_sealed_opens_and_shows_nothing(deployed: Deployed) -> None:
    """In this process and in another, and never twice as the same token."""
    put(deployed, "the one and only key".replace(" ", "-"))
    ours = seals(deployed)
    first, second = ours.seal("whsec_ü"), ours.seal("whsec_ü")
    assert first != second
    assert "whsec" not in first
    assert first.isascii()
    assert [seals(deployed).open(token) for token in (first, second)] == ["whsec_ü"] * 2


@pytest.mark.parametrize("between", [" ", "\n", ",", ", \n"])
def test_a_key_is_replaced_by_putting_a_new_one_before_it(deployed: Deployed, between: str) -> None:
    """The new one seals, both open, and when the old one is gone, what it sealed is lost, and said to be."""
    put(deployed, "old")
    old = seals(deployed).seal("a")
    put(deployed, f"new{between}old")
    new = seals(deployed).seal("b")
    assert [seals(deployed).open(token) for token in (old, new)] == ["a", "b"]
    put(deployed, "new")
    assert seals(deployed).open(new) == "b"
    with pytest.raises(SealBroken):
        seals(deployed).open(old)


def test_a_running_function_learns_of_a_new_key_when_it_needs_it(deployed: Deployed) -> None:
    """A token of the new key is no broken one; but the keys are not read for each broken token."""
    clock = Hours()
    put(deployed, "old")
    ours = seals(deployed, clock)
    ours.seal("a")
    put(deployed, "new old")
    token = seals(deployed).seal("b")
    with pytest.raises(SealBroken):
        ours.open(token)
    clock.seconds += REFRESH_SECONDS_MIN
    assert ours.open(token) == "b"


@pytest.mark.parametrize("token", ["", "x", "gAAAAA", "ü", "whsec_abc"])
def test_what_is_no_seal_of_ours_is_broken(deployed: Deployed, token: str) -> None:
    """And no other error."""
    put(deployed, "key")
    with pytest.raises(SealBroken):
        seals(deployed).open(token)


def test_without_a_key_nothing_is_sealed(deployed: Deployed) -> None:
    """An empty secret, or none to be read, is an unavailable port."""
    put(deployed, " , ")
    with pytest.raises(PortUnavailable):
        seals(deployed).seal("a")
    with pytest.raises(PortUnavailable):
        FernetSeals(lambda: boto3.client("secretsmanager"), "no-such-secret").seal("a")


def test_a_clients_secrets_are_its_own_and_the_last_one_stays_valid_for_a_while(deployed: Deployed) -> None:
    """The newest first; of three, the first is gone at once."""
    table = ClientsTable(boto3.client("dynamodb"), deployed.names["ClientsTable"])
    assert table.of("alice", 0) == []
    table.put_webhook_secret("alice", "one", 1_000, previous_until=1_000 + DAY)
    assert table.of("alice", 10 * DAY) == ["one"]
    table.put_webhook_secret("alice", "two", 2_000, previous_until=2_000 + DAY)
    assert table.of("alice", 1_999 + DAY) == ["two", "one"]
    assert table.of("alice", 2_000 + DAY) == ["two"]
    table.put_webhook_secret("alice", "three", 3_000, previous_until=3_000)
    assert table.of("alice", 3_001) == ["three"]
    assert table.of("bob", 3_001) == []


def test_a_clients_secrets_are_no_api_key_and_no_client(deployed: Deployed) -> None:
    """The item lies in the Clients table under a name that no key's hash is."""
    table = ClientsTable(boto3.client("dynamodb"), deployed.names["ClientsTable"])
    table.put_webhook_secret("alice", "one", 0, previous_until=0)
    assert not table.knows("alice")
    create_client(boto3.resource("dynamodb").Table(deployed.names["ClientsTable"]), "alice", "Alice", 1)
    assert table.knows("alice")
    assert not table.knows("alic")


def rotated(deployed: Deployed, keep: int | None) -> tuple[int, int]:
    """What an operator's tool does."""
    table = ClientsTable(boto3.client("dynamodb"), deployed.names["ClientsTable"])
    manager: Any = boto3.client("secretsmanager")
    return rotate_key(manager, deployed.names["WebhookKeySecret"], table, keep=keep)


def test_the_key_that_seals_is_rotated_and_nothing_sealed_is_lost(deployed: Deployed) -> None:
    """A job's secret opens by the old key as long as that is kept, a client's own by the new one alone."""
    put(deployed, "old")
    table = ClientsTable(boto3.client("dynamodb"), deployed.names["ClientsTable"])
    table.put_webhook_secret("alice", seals(deployed).seal("one"), 0, previous_until=0)
    table.put_webhook_secret("alice", seals(deployed).seal("two"), 1, previous_until=1 + DAY)
    table.put_webhook_secret("bob", seals(deployed).seal("three"), 0, previous_until=0)
    of_a_job = seals(deployed).seal("of a job")
    assert rotated(deployed, None) == (2, 2)
    assert seals(deployed).open(of_a_job) == "of a job"
    with pytest.raises(SealBroken):
        [seals_by("old").open(token) for token in table.of("alice", 2)]
    assert rotated(deployed, 0) == (1, 2)
    assert [seals(deployed).open(token) for token in table.of("alice", 2)] == ["two", "one"]
    assert [seals(deployed).open(token) for token in table.of("bob", 2)] == ["three"]
    assert table.of("alice", 1 + DAY) == table.of("alice", 2)[:1]
    with pytest.raises(SealBroken):
        seals(deployed).open(of_a_job)


def test_no_key_is_dropped_while_a_clients_secret_cannot_be_opened(deployed: Deployed) -> None:
    """Somebody has to look first."""
    put(deployed, "old")
    table = ClientsTable(boto3.client("dynamodb"), deployed.names["ClientsTable"])
    table.put_webhook_secret("alice", seals_by("lost").seal("one"), 0, previous_until=0)
    with pytest.raises(SealBroken):
        rotated(deployed, 0)
    manager: Any = boto3.client("secretsmanager")
    left = manager.get_secret_value(SecretId=deployed.names["WebhookKeySecret"])["SecretString"].split()
    assert left[1:] == ["old"]


def seals_by(keys: str) -> FernetSeals:
    """Seals by these keys, whatever the template's secret holds."""

    class Vault:
        def get_secret_value(self, **_: Any) -> dict[str, str]:
            return {"SecretString": keys}

    return FernetSeals(Vault, "", monotonic=Hours())
