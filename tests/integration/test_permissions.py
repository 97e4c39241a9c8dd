"""Calls that no policy grants are found, whatever the test that makes them is about."""

from __future__ import annotations

from typing import Any

import boto3
import pytest

from tests.integration import permissions
from tests.integration.deployed import Deployed
from tests.integration.functions import Stack
from tests.integration.permissions import Call, grants, guarded
from tests.template.resolved import drop, shipped


def test_a_call_that_no_policy_grants_is_found(deployed: Deployed) -> None:
    """By action, by table, by index."""
    client: Any = boto3.client("dynamodb")
    table = deployed.names["JobsTable"]

    def reads(*_: Any) -> None:
        client.get_item(TableName=table, Key={"job_id": {"S": "x"}})

    def scans(*_: Any) -> None:
        client.scan(TableName=table)

    def reads_clients(*_: Any) -> None:
        client.get_item(TableName=deployed.names["ClientsTable"], Key={"key_hash": {"S": "x"}})

    guarded(reads, "RepairFunction", deployed.names)()
    for forbidden in (scans, reads_clients):
        with pytest.raises(AssertionError, match="RepairFunction is not granted"):
            guarded(forbidden, "RepairFunction", deployed.names)()


def test_a_grant_that_is_taken_away_is_missed(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repairer's index, for one."""
    statement = "Resources.RepairRole.Properties.Policies.0.PolicyDocument.Statement.1"
    less = shipped(drop(statement))
    monkeypatch.setattr(permissions, "granted_to", lambda function: grants(less, function))
    with pytest.raises(AssertionError, match="JobsTable/index/due"):
        Stack(deployed).repair()


def test_grants_are_read_as_they_are_written() -> None:
    """With index, prefix and path."""
    assert Call("dynamodb:Query", "JobsTable/index/waiting") in grants(shipped(), "RepairFunction")
    assert Call("s3:PutObject", "PayloadsBucket/results/*") in grants(shipped(), "WorkerFunction")
    assert Call("execute-api:ManageConnections", "SocketApi") in grants(shipped(), "NotifierFunction")
    assert Call("dynamodb:PutItem", "ClientsTable") not in grants(shipped(), "IngestFunction")
