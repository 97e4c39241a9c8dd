"""Which function emits which metric, seen by letting each do its work: the enum says so, and alarms rely on it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from backburner import bootstrap
from backburner.observability import Metric
from tests.fakes.provider import Behaviour, FakeProvider
from tests.fakes.slack import SIGNING_SECRET, TOKEN, FakeSlack, signed
from tests.integration.deployed import Deployed
from tests.integration.functions import Context, Stack, event, sigterm_kept

SMALL = {"prompt": "Name a river.", "max_tokens": 64}
NOT_SHOWN = {
    ("BudgetsNearlyUsed", "slack"),
    ("BudgetRefusals", "slack"),
    ("JobsRefused", "slack"),  # these three as by ingest: both submit by the same use case
    ("JobsCancelled", "slack"),  # the button's; as by status
    ("TellingDelay", "worker"),  # of listeners, whom the same channel tells in the notifier; see test_websocket.py
    *(("Faults", name) for name in ("status", "slack", "websocket", "worker", "notifier")),  # as by ingest
    ("JobsExpired", "repair"),  # as by the worker: `expire` is called by both
}
"""What this walk leaves out."""


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    with FakeSlack() as server:
        yield server


@pytest.fixture
def stack(
    deployed: Deployed, provider: FakeProvider, slack: FakeSlack, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stack]:
    """All functions, with keys; backoff without wait."""
    monkeypatch.setattr(bootstrap.SystemChance, "uniform", lambda _self, low, _high: low)
    provider.configure(tokens_per_chunk=100_000)
    functions = Stack(deployed, {"SLACK_API_BASE_URL": slack.base_url})
    secrets = {"openai_api_key": "sk", "slack_signing_secret": SIGNING_SECRET, "slack_bot_token": TOKEN}
    functions.provider_keys(json.dumps(secrets))
    with sigterm_kept():
        yield functions


def emitted(text: str) -> dict[tuple[str, str], set[tuple[str, ...]]]:
    """By metric and function, the sets of dimensions."""
    found: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for line in text.splitlines():
        if '"_aws"' not in line:
            continue
        document: dict[str, Any] = json.loads(line)
        [described] = document["_aws"]["CloudWatchMetrics"]
        assert described["Namespace"].startswith("Backburner/")
        for entry in described["Metrics"]:
            sets = found.setdefault((entry["Name"], document["service"]), set())
            sets |= {tuple(names) for names in described["Dimensions"]}
    return found


def test_each_function_emits_what_the_enum_says_and_nothing_else(
    stack: Stack, provider: FakeProvider, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that complete, fail, are cancelled, refused, lost, put off and told of."""
    key = stack.client("alice", tokens_per_day=90)
    stack.post(key, SMALL)
    while stack.post(key, SMALL).status == 202:
        pass
    provider.script("never", *[Behaviour(status=400, body={"error": {"message": "no"}})] * 3)
    bob = stack.client("bob")
    stack.post(bob, {**SMALL, "prompt": "never", "stream": True})
    cancelled = stack.post(bob, SMALL).json["job_id"]
    assert stack.delete(bob, cancelled).status == 200
    late = stack.post(bob, SMALL).json["job_id"]
    stack.let_pass(late, "deadline_at")
    while stack.work():
        pass

    asked = event("slack_event")
    asked["headers"] |= signed(SIGNING_SECRET, asked["body"], time.time())
    stack.function("SlackFunction")(asked, Context())
    assert stack.work("InteractiveQueue") == 1
    assert stack.tell() == 1

    left = stack.post(bob, SMALL).json["job_id"]
    _set(stack, left, status={"S": "processing"}, due_at={"N": "1"}, claims={"N": "1"}, attempts={"N": "1"})
    assert stack.work() == 1  # its lease has lapsed, so it is taken over
    lost = stack.post(bob, SMALL).json["job_id"]
    _set(stack, lost, status={"S": "processing"}, due_at={"N": "1"}, claims={"N": "3"}, attempts={"N": "3"})
    stack.repair()
    assert stack.row(lost)["status"]["S"] == "failed"

    def broken(*_: Any, **__: Any) -> None:
        raise KeyError

    monkeypatch.setattr("backburner.submission.Submission.accept", broken)
    assert stack.post(bob, SMALL).status == 500

    found = emitted(capsys.readouterr().out)
    declared = {(metric.value, function): metric for metric in Metric for function in metric.functions}
    assert found.keys() <= declared.keys()
    assert declared.keys() - found.keys() == NOT_SHOWN
    for pair, sets in found.items():
        assert sets == {("service",), *(tuple(by.split(",")) for by in declared[pair].by)}, pair


def _set(stack: Stack, job_id: str, **values: dict[str, str]) -> None:
    import boto3

    client: Any = boto3.client("dynamodb")
    names = {f"#{name}": name for name in values}
    client.update_item(
        TableName=stack.deployed.names["JobsTable"],
        Key={"job_id": {"S": job_id}},
        UpdateExpression="SET " + ", ".join(f"#{name} = :{name}" for name in values),
        ExpressionAttributeNames=names,
        ExpressionAttributeValues={f":{name}": value for name, value in values.items()},
    )
