"""What is lost, doubled, killed or poisoned: the row brings every job to its end."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.e2e.conftest import Fake, Stack, until
from tests.fakes.emulated import kill, worker_processes

pytestmark = pytest.mark.e2e


def _worker_processes(stack: Stack) -> list[int]:
    return worker_processes(stack.outputs["WorkerFunctionName"], stack.outputs["StandardQueueUrl"])


def _standard_lanes_poller(stack: Stack) -> dict[str, Any]:
    """The worker's event source for the standard lane."""
    sources: list[dict[str, Any]] = stack.aws("lambda").list_event_source_mappings(
        FunctionName=stack.outputs["WorkerFunctionName"]
    )["EventSourceMappings"]
    queue = stack.outputs["StandardQueueUrl"].rpartition("/")[2]
    (source,) = (source for source in sources if source["EventSourceArn"].endswith(f":{queue}"))
    return source


def test_a_killed_workers_job_is_taken_over_within_90_seconds(stack: Stack, fake: Fake, mark: str) -> None:
    """SIGKILL in the middle of the call: the lease lapses, the repairer puts the job back, and it is answered."""
    fake.script(mark, {"text": "never read", "latency_seconds": 100}, {"text": "second"})
    job_id = stack.submit(prompt=mark)["job_id"]
    until(lambda: fake.calls(mark), 30, lambda: "the call did not begin")
    workers = _worker_processes(stack)
    assert workers, "no worker process was found"
    kill(workers)
    killed = time.monotonic()
    job = stack.ended(job_id, 120)
    assert time.monotonic() - killed <= 90
    assert job["result"]["text"] == "second"
    assert [line["outcome"] for line in job["receipt"]] == ["outcome_unknown", "completed"]


def test_a_killed_workers_background_call_is_attached_to(stack: Stack, fake: Fake, mark: str) -> None:
    """SIGKILL while a background response runs: the job completes, and one call is billed."""
    stack = stack.patient()
    fake.script(mark, {"text": "word " * 20, "chunk_delay_seconds": 0.3})
    job_id = stack.submit(prompt=mark)["job_id"]
    until(lambda: fake.calls(mark), 30, lambda: "the call did not begin")
    until(lambda: _row(stack, job_id).get("handle"), 10, lambda: "its name was not noted")
    kill(_worker_processes(stack))
    stack.lapse(job_id)
    stack.repair()
    job = stack.ended(job_id)
    assert job["result"]["text"] == "word " * 20
    assert [line["outcome"] for line in job["receipt"]] == ["worker_lost", "completed"]
    assert [call["billed"] for call in fake.calls(mark)] == [True]


def test_a_terminated_worker_hands_its_job_back(stack: Stack, fake: Fake, mark: str) -> None:
    """SIGTERM: the job is queued again at once, by the worker itself."""
    fake.script(mark, {"text": "never read", "latency_seconds": 100}, {"text": "second"})
    job_id = stack.submit(prompt=mark)["job_id"]
    until(lambda: fake.calls(mark), 30, lambda: "the call did not begin")
    for process in _worker_processes(stack):
        os.kill(process, signal.SIGTERM)
    job = stack.ended(job_id)
    assert job["result"]["text"] == "second"
    # The call's own thread may still note what it had used, as "discarded", before its process is gone.
    outcomes = [line["outcome"] for line in job["receipt"] if line["outcome"] != "discarded"]
    assert outcomes == ["interrupted", "completed"]


def test_a_lost_hint_is_sent_again(stack: Stack, mark: str) -> None:
    """The queue lost it; the row is due, and the repairer sends another."""
    sqs, functions = stack.aws("sqs"), stack.aws("lambda")
    source = _standard_lanes_poller(stack)
    functions.update_event_source_mapping(UUID=source["UUID"], Enabled=False)
    try:
        time.sleep(2)  # the poller's present round
        job_id = stack.submit(prompt=mark)["job_id"]
        sqs.purge_queue(QueueUrl=stack.outputs["StandardQueueUrl"])
    finally:
        functions.update_event_source_mapping(UUID=source["UUID"], Enabled=True)
    stack.make_due(job_id)
    stack.repair()
    assert stack.ended(job_id)["status"] == "completed"


def test_a_doubled_hint_is_dropped(stack: Stack, fake: Fake, mark: str) -> None:
    """While the call runs and after it: one call, and the dead-letter queue stays as it was."""
    fake.script(mark, {"text": "once", "latency_seconds": 2})
    job_id = stack.submit(prompt=mark)["job_id"]
    sqs = stack.aws("sqs")
    for _ in range(5):
        sqs.send_message(QueueUrl=stack.outputs["StandardQueueUrl"], MessageBody=f'{{"job_id":"{job_id}","v":1}}')
    stack.ended(job_id)
    sqs.send_message(QueueUrl=stack.outputs["StandardQueueUrl"], MessageBody=f'{{"job_id":"{job_id}","v":1}}')
    probe = stack.submit(prompt=f"after {mark}")["job_id"]
    stack.ended(probe)
    assert [call["prompt"] for call in fake.calls(mark)].count(mark) == 1
    assert stack.dead_letters(job_id) == []


def test_poison_becomes_a_dead_letter_with_its_reason(stack: Stack, mark: str) -> None:
    """A message that is no hint, and a hint of no job."""
    sqs = stack.aws("sqs")
    for body in (f"{{not json {mark}", f'{{"job_id":"job_{mark}"}}'):
        sqs.send_message(QueueUrl=stack.outputs["StandardQueueUrl"], MessageBody=body)
    letters = until(
        lambda: found if len(found := stack.dead_letters(mark)) == 2 else None, 30, lambda: str(stack.dead_letters())
    )
    assert {letter["MessageAttributes"]["reason"]["StringValue"] for letter in letters} == {
        "malformed_hint",
        "unknown_job",
    }


def test_hints_that_the_redrive_policy_buries_end_their_job_as_failed(stack: Stack, mark: str) -> None:
    """After as many as attempts; the repairer explains the letter, and the job can be redriven."""
    sqs, functions = stack.aws("sqs"), stack.aws("lambda")
    source = _standard_lanes_poller(stack)
    functions.update_event_source_mapping(UUID=source["UUID"], Enabled=False)
    try:
        time.sleep(2)  # the poller's present round
        job_id = stack.submit(prompt=mark)["job_id"]
        for _ in range(3):
            sqs.purge_queue(QueueUrl=stack.outputs["StandardQueueUrl"])
            assert stack.job(job_id)["status"] == "queued"
            sqs.send_message(QueueUrl=stack.outputs["DeadLetterQueueUrl"], MessageBody=f'{{"job_id":"{job_id}","v":1}}')
            stack.repair()
    finally:
        functions.update_event_source_mapping(UUID=source["UUID"], Enabled=True)
    job = stack.ended(job_id)
    assert (job["status"], job["error"]["code"]) == ("failed", "undeliverable")
    letters = until(lambda: stack.dead_letters(job_id), 10, lambda: "no letter came")
    assert [letter["MessageAttributes"]["reason"]["StringValue"] for letter in letters] == ["undeliverable"]
    sqs.send_message(QueueUrl=stack.outputs["StandardQueueUrl"], MessageBody=letters[0]["Body"])
    until(lambda: stack.job(job_id)["status"] == "completed", 30, lambda: str(stack.job(job_id)))


def test_a_job_past_its_deadline_expires_without_a_call(stack: Stack, fake: Fake, mark: str) -> None:
    """Nobody started it in time."""
    functions = stack.aws("lambda")
    source = _standard_lanes_poller(stack)
    functions.update_event_source_mapping(UUID=source["UUID"], Enabled=False)
    try:
        time.sleep(2)  # the poller's present round
        job_id = stack.submit(prompt=mark, deadline_seconds=1)["job_id"]
        time.sleep(1.1)  # the deadline itself
        stack.repair()
    finally:
        functions.update_event_source_mapping(UUID=source["UUID"], Enabled=True)
    job = stack.ended(job_id)
    assert (job["status"], job["error"]["code"]) == ("expired", "deadline_passed")
    assert fake.calls(mark) == []


def _row(stack: Stack, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = stack.aws("dynamodb").get_item(
        TableName=stack.outputs["JobsTableName"], Key={"job_id": {"S": job_id}}, ConsistentRead=True
    )["Item"]
    return found
