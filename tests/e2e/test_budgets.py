"""Clients with limits, on the deployed stack: refused in time, settled in the end, never exceeded by racing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from backburner.models import ClientLimits
from cli.clients import create_client
from local.state import ROOT, STACK_NAME
from tests.e2e.conftest import Fake, Stack, until

pytestmark = pytest.mark.e2e

SMALL: dict[str, Any] = {"model": "gpt-5.4-mini", "max_tokens": 300}


def limited(stack: Stack, **limits: int) -> tuple[Stack, str]:
    """The stack as a new client with these limits, and its id."""
    client_id = f"limited-{uuid.uuid4().hex}"
    table = stack.aws("dynamodb", resource=True).Table(stack.outputs["ClientsTableName"])
    key = create_client(table, client_id, client_id, time.time_ns() // 1_000_000, limits=ClientLimits(**limits))
    return replace(stack, api_key=key), client_id


def tally(stack: Stack, client_id: str) -> dict[str, int]:
    """What the client's jobs hold of today's budgets."""
    reply = stack.aws("dynamodb").get_item(
        TableName=stack.outputs["LimitsTableName"], Key={"limit_id": {"S": f"client#{client_id}"}}, ConsistentRead=True
    )
    return {name: int(reply["Item"][name]["N"]) for name in ("tokens", "micro_usd")}


def test_a_client_beyond_its_requests_is_told_when_to_come_back_and_then_accepted(stack: Stack, mark: str) -> None:
    """429 with the seconds to the end of the minute; with the requests a minute old, 202."""
    client, client_id = limited(stack, requests_per_minute=1)
    http = client.http()
    replies = [http.post("/jobs", json={"prompt": mark, **SMALL}) for _ in range(3)]  # a minute may end among them
    assert replies[0].status_code == 202
    assert replies[0].headers["ratelimit"].startswith('"requests";r=0;t=')
    refusal = replies[-1]
    assert (refusal.status_code, refusal.json()["code"]) == (429, "too_many_requests")
    assert 0 < int(refusal.headers["retry-after"]) <= 60
    stack.aws("dynamodb").update_item(
        TableName=stack.outputs["LimitsTableName"],
        Key={"limit_id": {"S": f"client#{client_id}"}},
        UpdateExpression="ADD #minute :ago",
        ConditionExpression="attribute_exists(#minute)",
        ExpressionAttributeNames={"#minute": "minute"},
        ExpressionAttributeValues={":ago": {"N": "-1"}},
    )
    assert http.post("/jobs", json={"prompt": mark, **SMALL}).status_code == 202


def test_a_budget_is_free_again_as_far_as_it_was_not_used(stack: Stack, fake: Fake, mark: str) -> None:
    """One job takes nearly all of it while it runs, and what it cost when it has ended. Then there is room again."""
    fake.script(mark, {"text": "short", "usage": {"input_tokens": 20, "output_tokens": 10}, "latency_seconds": 3})
    client, client_id = limited(stack, tokens_per_day=500, micro_usd_per_day=10_000_000)
    job_id = client.submit(prompt=mark, **SMALL)["job_id"]
    refusal = client.http().post("/jobs", json={"prompt": mark, **SMALL})
    assert (refusal.status_code, refusal.json()["code"]) == (429, "budget_used_up")
    assert 0 < int(refusal.headers["retry-after"]) <= 86_400
    job = client.ended(job_id)
    assert job["status"] == "completed"
    assert "deliveries" not in job
    spent = {"tokens": job["usage"]["total_tokens"], "micro_usd": round(job["cost_usd"] * 1_000_000)}
    until(lambda: tally(stack, client_id) == spent, 10, lambda: f"{tally(stack, client_id)}, {spent} were spent")
    assert client.submit(prompt=mark, **SMALL)["status"] == "queued"
    assert client.submit(prompt=mark, status=422, model="gpt-5.4-mini", max_tokens=501)["code"] == "over_budget"


# Reads a line before it sends, so that all send at once; a connection that the gateway cannot take is opened again.
RACER = """
import http.client, json, sys, time, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1] + "/jobs")
headers = {"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}
sys.stdin.readline()
for _ in range(60):
    connection = http.client.HTTPConnection(url.netloc, timeout=120)
    connection.request("POST", url.path, sys.argv[3], headers)
    reply = connection.getresponse()
    body = json.load(reply)
    if body.get("code") in ("budget_used_up", None) and reply.status in (202, 429) and "Message" not in body:
        break
    time.sleep(0.5)
print(reply.status, body.get("job_id"), reply.headers.get("Retry-After"))
"""


def test_rtb_01_twenty_processes_at_once_exceed_no_budget(stack: Stack, fake: Fake, mark: str) -> None:
    """RTB-01: a client of whom there is no row yet, 2.00 dollars a day, twenty requests of 0.70 each: two are taken.

    The others get 429 with a hint when to come back. What is spent in the end is within the budget. (0.70 dollars, but
    for a little: 46,600 tokens of output at 15 dollars a million, and a few of input.)
    """
    fake.script(mark, *[{"text": "short", "usage": {"input_tokens": 20, "output_tokens": 10}}] * 2)
    client, client_id = limited(stack, micro_usd_per_day=2_000_000)
    with lane_at_rest(stack, "bulk"):  # else a job that has ended makes room for another
        replies = race(client, {"prompt": mark, "model": "gpt-5.4", "max_tokens": 46_600, "priority": "bulk"})
        assert sorted(status for status, _, _ in replies) == ["202"] * 2 + ["429"] * 18
        assert 1_390_000 < tally(stack, client_id)["micro_usd"] <= 2_000_000
    assert all(0 < int(wait) <= 86_400 for status, _, wait in replies if status == "429")
    jobs = [client.ended(job_id) for status, job_id, _ in replies if status == "202"]
    spent = sum(round(job["cost_usd"] * 1_000_000) for job in jobs)
    until(lambda: tally(stack, client_id)["micro_usd"] == spent, 10, lambda: str(tally(stack, client_id)))
    assert 0 < spent <= 2_000_000
    assert len(fake.calls(mark)) == 2


@contextmanager
def lane_at_rest(stack: Stack, lane: str) -> Iterator[None]:
    """No worker gets a job of the lane."""
    functions = stack.aws("lambda")
    queue = stack.outputs[f"{lane.capitalize()}QueueUrl"].rpartition("/")[2]
    pollers = functions.list_event_source_mappings(FunctionName=stack.outputs["WorkerFunctionName"])
    (own,) = [p["UUID"] for p in pollers["EventSourceMappings"] if p["EventSourceArn"].endswith(f":{queue}")]
    functions.update_event_source_mapping(UUID=own, Enabled=False)
    try:
        yield
    finally:
        functions.update_event_source_mapping(UUID=own, Enabled=True)


def race(client: Stack, body: dict[str, Any]) -> list[list[str]]:
    """Status, job id and Retry-After of twenty processes that all send the request at once."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", RACER, client.api_url, client.api_key, json.dumps(body)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(20)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.communicate(timeout=200)[0].split() for process in processes]


def test_the_operator_sets_a_clients_limits_while_it_works(stack: Stack, mark: str) -> None:
    """By the tool; in force within half a minute."""
    client, client_id = limited(stack)
    assert client.submit(prompt=mark, **SMALL)["status"] == "queued"

    def run(*arguments: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "cli", "clients", "limits", client_id, "--stack", STACK_NAME, "--json", *arguments],
            env={
                **os.environ,
                "AWS_ENDPOINT_URL": stack.endpoint_url,
                "AWS_DEFAULT_REGION": stack.region,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'layers' / 'shared'}",
            },
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    given = run("--tokens-per-day", "100", "--usd-per-day", "1.5")
    assert given.items() >= {
        "requests_per_minute": None, "tokens_per_day": 100, "micro_usd_per_day": 1_500_000,
    }.items()  # fmt: skip

    def status() -> int:
        return int(client.http().post("/jobs", json={"prompt": mark, **SMALL}).status_code)

    until(lambda: status() == 422, 40, lambda: "the limit is not in force")
    assert run("--tokens-per-day", "0", "--usd-per-day", "0")["tokens_per_day"] is None
    until(lambda: status() == 202, 40, lambda: "the limit is still in force")
