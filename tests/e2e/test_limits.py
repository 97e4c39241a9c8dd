"""The provider's limits on the deployed stack."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from cli.clients import create_client
from cli.limits import change
from tests.e2e.conftest import Fake, Stack, until

pytestmark = pytest.mark.e2e

MODEL = "gpt-5.4"


def test_calls_keep_to_the_limit_and_a_raised_limit_is_in_force_within_seconds(
    stack: Stack, fake: Fake, mark: str
) -> None:
    """Sixty a minute are a call a second, whatever is queued; then the operator raises the limit, and nothing waits."""
    stack.limit(MODEL, 10**9)
    client, table = stack.aws("dynamodb"), stack.outputs["LimitsTableName"]
    change(client, table, MODEL, {"requests": 60}, None)
    jobs = [stack.submit(prompt=f"{mark} {number}", model=MODEL)["job_id"] for number in range(5)]
    for job_id in jobs:
        assert stack.ended(job_id)["status"] == "completed"
    began = sorted(call["began"] for call in fake.calls(mark))
    # The first two may come 250 ms closer together (the burst); the last is four seconds after the first but for that.
    assert began[-1] - began[0] >= 3.5
    change(client, table, MODEL, {"requests": 10**9}, None)
    jobs = [stack.submit(prompt=f"{mark} again {number}", model=MODEL)["job_id"] for number in range(5)]
    for job_id in jobs:
        stack.ended(job_id)
    began = sorted(call["began"] for call in fake.calls(f"{mark} again"))
    assert began[-1] - began[0] < 3.5


def test_a_long_wait_is_parked_with_its_slot_and_can_be_cancelled(stack: Stack, fake: Fake, mark: str) -> None:
    """Three a minute: the second waits in the queue, with no worker and no attempt used; it is cancelled there."""
    stack.limit(MODEL, 10**9)
    change(stack.aws("dynamodb"), stack.outputs["LimitsTableName"], MODEL, {"requests": 3}, None)
    first = stack.submit(prompt=f"{mark} first", model=MODEL)["job_id"]
    assert stack.ended(first)["status"] == "completed"
    waiting = stack.submit(prompt=f"{mark} second", model=MODEL)["job_id"]

    def parked() -> bool:
        job = stack.job(waiting)
        return job["status"] == "queued" and _row(stack, waiting).get("claims", {}).get("N") == "1"

    until(parked, 40, lambda: f"not parked: {stack.job(waiting)}")
    assert stack.job(waiting)["attempts"] == 0
    assert stack.http().delete(f"/jobs/{waiting}").json()["status"] == "cancelled"
    assert fake.calls(f"{mark} second") == []


def test_a_job_that_cannot_start_in_time_fails_at_once_and_says_when_it_could(
    stack: Stack, fake: Fake, mark: str
) -> None:
    """One call a minute, and a deadline of 15 seconds."""
    stack.limit(MODEL, 10**9)
    change(stack.aws("dynamodb"), stack.outputs["LimitsTableName"], MODEL, {"requests": 1}, None)
    stack.ended(stack.submit(prompt=f"{mark} first", model=MODEL)["job_id"])
    began = time.time()
    late = stack.ended(stack.submit(prompt=f"{mark} late", model=MODEL, deadline_seconds=30)["job_id"])
    assert (late["status"], late["error"]["code"]) == ("failed", "would_miss_deadline")
    (said,) = [int(word) for word in late["error"]["message"].split() if word.isdigit()]
    assert said > began + 30
    assert fake.calls(f"{mark} late") == []


def test_a_client_with_few_jobs_does_not_wait_for_anothers_backlog(stack: Stack, fake: Fake, mark: str) -> None:
    """Two calls a second, and 30 jobs of one client; another's three end before half of them have begun."""
    stack.limit(MODEL, 10**9)
    dynamodb = stack.aws("dynamodb")
    change(dynamodb, stack.outputs["LimitsTableName"], MODEL, {"requests": 120}, None)
    clients = stack.aws("dynamodb", resource=True).Table(stack.outputs["ClientsTableName"])
    key = create_client(clients, f"few-{mark}", "Few", time.time_ns() // 1_000_000)
    backlog = [stack.submit(prompt=f"{mark} many {number}", model=MODEL)["job_id"] for number in range(30)]
    few = replace(stack, api_key=key)
    jobs = [few.submit(prompt=f"{mark} few {number}", model=MODEL)["job_id"] for number in range(3)]
    assert {few.ended(job_id)["status"] for job_id in jobs} == {"completed"}
    begun = len(fake.calls(f"{mark} many"))
    change(dynamodb, stack.outputs["LimitsTableName"], MODEL, {"requests": 10**9}, None)
    http = stack.http()
    for job_id in backlog:
        http.delete(f"/jobs/{job_id}")
    assert begun < 15


def _row(stack: Stack, job_id: str) -> dict[str, dict[str, str]]:
    reply = stack.aws("dynamodb").get_item(
        TableName=stack.outputs["JobsTableName"], Key={"job_id": {"S": job_id}}, ConsistentRead=True
    )
    item: dict[str, dict[str, str]] = reply["Item"]
    return item
