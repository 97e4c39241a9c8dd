"""A deployment finishes what its predecessor left: rows and hints of every earlier schema version stay readable."""

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from backburner.adapters.dynamodb import job_of
from backburner.adapters.sqs import parse_hint
from backburner.errors import MalformedHint
from backburner.models import SCHEMA_VERSION
from tests.fakes.provider import FakeProvider
from tests.integration.deployed import ROOT, Deployed
from tests.integration.functions import Stack, sigterm_kept

LEFT: dict[str, Any] = json.loads((ROOT / "tests" / "integration" / "version_1.json").read_text())


@pytest.fixture
def left(deployed: Deployed, provider: FakeProvider) -> Iterator[Stack]:
    """The stack with what version 1 left in its table."""
    client: Any = boto3.client("dynamodb")
    for row in LEFT["rows"]:
        client.put_item(TableName=deployed.names["JobsTable"], Item=row)
    stack = Stack(deployed)
    stack.provider_keys()
    with sigterm_kept():
        yield stack


def test_jobs_that_the_previous_version_left_are_finished(left: Stack, provider: FakeProvider) -> None:
    """Queued, lost with its worker, dead and redriven: one call each, and the receipt goes on where it stopped."""
    assert left.run(*LEFT["hints"]) == []
    key = left.client()
    jobs = {job_id: left.get(key, job_id).json for job_id in ("job_v1queued", "job_v1lost", "job_v1dead")}
    assert {job["status"] for job in jobs.values()} == {"completed"}
    assert jobs["job_v1queued"]["metadata"] == {"n": 0.7}
    assert [line["outcome"] for line in jobs["job_v1lost"]["receipt"]] == ["overloaded", "outcome_unknown", "completed"]
    assert jobs["job_v1dead"]["attempts"] == 1
    assert len(provider.ledger) == 3


def test_an_answer_that_the_previous_version_stored_is_read(left: Stack) -> None:
    """With its usage and its cost."""
    job = left.get(left.client(), "job_v1done").json
    assert job["result"]["text"] == "The Danube."
    assert (job["usage"]["total_tokens"], job["cost_usd"]) == (7, 0.000012)


def test_fields_of_a_later_version_are_passed_over() -> None:
    """A rolled-back deployment reads the rows of the one before it."""
    row = LEFT["rows"][0] | {"novelty": {"S": "x"}, "v": {"N": str(SCHEMA_VERSION + 1)}}
    assert job_of(row).job_id == "job_v1queued"


def test_a_hint_of_a_later_version_is_refused() -> None:
    """It may mean something else; the row and the newer deployment's repairer bring its job to an end."""
    with pytest.raises(MalformedHint):
        parse_hint(json.dumps({"job_id": "job_1", "v": SCHEMA_VERSION + 1}))
