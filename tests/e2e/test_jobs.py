"""A job all the way: API Gateway, Lambda, DynamoDB, SQS, Lambda, provider and back, with IAM enforced."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx2
import pytest

from tests.e2e.conftest import Fake, Stack, until

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(("model", "provider"), [("gpt-5.4-mini", "openai"), ("claude-haiku-4-5", "anthropic")])
def test_a_job_is_answered_by_its_provider(stack: Stack, fake: Fake, mark: str, model: str, provider: str) -> None:
    """202, then completed with text, usage, cost and receipt; one call billed."""
    metadata = {"ratio": 0.7, "big": 9007199254740993, "empty": "", "nothing": None, "yes": True, "中": ["😀"]}
    accepted = stack.submit(
        prompt=f"Say {mark}", model=model, metadata=metadata, user_id="u-1", system_prompt="Be brief."
    )
    assert accepted["status"] == "queued"
    assert accepted["poll_url"] == f"/jobs/{accepted['job_id']}"
    job = stack.ended(accepted["job_id"])
    assert job["status"] == "completed"
    assert mark in job["result"]["text"]
    assert (job["result"]["provider"], job["result"]["model"]) == (provider, model)
    assert job["usage"]["total_tokens"] == job["usage"]["input_tokens"] + job["usage"]["output_tokens"] > 0
    assert job["cost_usd"] > 0
    assert job["metadata"] == metadata
    assert job["expires_at"] == accepted["expires_at"]
    assert [line["outcome"] for line in job["receipt"]] == ["completed"]
    assert len(fake.calls(mark)) == 1


def test_a_conversation_reaches_the_provider_in_order(stack: Stack, fake: Fake, mark: str) -> None:
    """messages instead of prompt."""
    turns = [
        {"role": "user", "content": f"first {mark}"},
        {"role": "assistant", "content": "noted"},
        {"role": "user", "content": f"second {mark}"},
    ]
    job = stack.ended(stack.submit(messages=turns, model="claude-haiku-4-5")["job_id"])
    assert "second" in job["result"]["text"]
    assert len(fake.calls(mark)) == 1


def test_a_refusal_by_the_provider_is_a_failure_with_a_code(stack: Stack, fake: Fake, mark: str) -> None:
    """One call, no retry, no dead letter: only the caller can mend it."""
    fake.script(mark, {"status": 400, "body": {"error": {"message": "no", "type": "invalid_request_error"}}})
    job = stack.ended(stack.submit(prompt=mark)["job_id"])
    assert job["status"] == "failed"
    assert job["error"]["code"] == "invalid_request"
    assert job["error"]["retryable"] is False
    assert len(fake.calls(mark)) == 1
    assert stack.dead_letters(job["job_id"]) == []


def test_a_rate_limit_is_waited_out_and_costs_no_attempt(stack: Stack, fake: Fake, mark: str) -> None:
    """429 with retry-after, then the answer; the second call comes no earlier than asked."""
    fake.script(
        mark,
        {"status": 429, "headers": {"retry-after": "2"}, "body": {"error": {"code": "rate_limit_exceeded"}}},
        {"text": "at last"},
    )
    job = stack.ended(stack.submit(prompt=mark)["job_id"])
    assert job["result"]["text"] == "at last"
    first, second = fake.calls(mark)
    assert second["began"] - first["began"] >= 2
    assert job["attempts"] == 1
    assert [line["outcome"] for line in job["receipt"]] == ["completed"]


def test_attempts_used_up_are_a_dead_letter_and_a_redrive_runs_the_job_again_once(
    stack: Stack, fake: Fake, mark: str
) -> None:
    """The letter's reason is on it; moved back to the lane, twice even, it starts one new run."""
    fake.script(mark, {"status": 401, "body": {"error": {"code": "invalid_api_key"}}}, {"text": "alive"})
    job_id = stack.submit(prompt=mark)["job_id"]
    assert stack.ended(job_id)["error"]["code"] == "authentication"
    letters = until(lambda: stack.dead_letters(job_id), 10, lambda: "no letter came")
    attributes = letters[0]["MessageAttributes"]
    assert attributes["reason"]["StringValue"] == "authentication"
    assert "fake" not in attributes["detail"]["StringValue"]
    sqs = stack.aws("sqs")
    for _ in range(2):
        sqs.send_message(QueueUrl=stack.outputs["StandardQueueUrl"], MessageBody=letters[0]["Body"])
    job = until(
        lambda: (found := stack.job(job_id))["status"] == "completed" and found, 60, lambda: str(stack.job(job_id))
    )
    assert job["result"]["text"] == "alive"
    assert len(fake.calls(mark)) == 2


@pytest.mark.parametrize("lane", ["interactive", "standard", "bulk"])
def test_a_job_is_worked_off_by_its_lane(stack: Stack, fake: Fake, mark: str, lane: str) -> None:
    """The others rest: what is not in the lane's own queue is not run."""
    functions = stack.aws("lambda")
    own = stack.outputs[f"{lane.capitalize()}QueueUrl"].rpartition("/")[2]
    others = [
        poller["UUID"]
        for poller in functions.list_event_source_mappings(FunctionName=stack.outputs["WorkerFunctionName"])[
            "EventSourceMappings"
        ]
        if not poller["EventSourceArn"].endswith(f":{own}")
    ]
    assert len(others) == 2
    try:
        for poller in others:
            functions.update_event_source_mapping(UUID=poller, Enabled=False)
        job_id = stack.submit(prompt=mark, priority=lane)["job_id"]
        assert stack.job(job_id)["priority"] == lane
        assert stack.ended(job_id)["status"] == "completed"
    finally:
        for poller in others:
            functions.update_event_source_mapping(UUID=poller, Enabled=True)
    assert len(fake.calls(mark)) == 1


# A client as the documentation asks for: what the gateway or the endpoint could not take is sent again, same key.
CLIENT = """
import http.client, json, sys, time, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1] + "/jobs")
headers = {"Authorization": "Bearer " + sys.argv[2], "Idempotency-Key": sys.argv[3], "Content-Type": "application/json"}
for _ in range(100):
    connection = http.client.HTTPConnection(url.netloc, timeout=240)
    connection.request("POST", url.path, sys.argv[4], headers)
    reply = connection.getresponse()
    body = json.load(reply)
    if reply.status not in (429, 500, 502, 503):
        break
    time.sleep(1)
print(reply.status, body.get("job_id"), reply.headers.get("Idempotent-Replayed"))
"""


def test_fifty_processes_with_one_key_make_one_job(stack: Stack, fake: Fake, mark: str) -> None:
    """One id, one call, and at least 49 replies that say they are replays."""
    bodies = (f'{{"prompt":"{mark}","max_tokens":50}}', f'{{ "max_tokens": 50,\n "prompt": "{mark}" }}')
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", CLIENT, stack.api_url, stack.api_key, mark, bodies[n % 2]],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(50)
    ]
    replies = [process.communicate(timeout=300)[0].split() for process in processes]
    assert {status for status, _, _ in replies} == {"202"}
    assert len({job_id for _, job_id, _ in replies}) == 1
    assert [replayed for _, _, replayed in replies].count("true") >= 49
    stack.ended(replies[0][1], 180)  # the burst may have taken the worker's capacity; then the repairer hints again
    assert len(fake.calls(mark)) == 1


def test_a_key_used_for_another_request_is_a_conflict(stack: Stack, mark: str) -> None:
    """422, and the first job is untouched."""
    first = stack.submit(key=mark, prompt=mark)
    problem = stack.submit(key=mark, prompt=f"other {mark}", status=422)
    assert problem["code"] == "idempotency_conflict"
    assert stack.ended(first["job_id"])["status"] == "completed"


def test_large_requests_and_results_work(stack: Stack, fake: Fake, mark: str) -> None:
    """A request of 1 MB and an answer of 1 MB, both through S3; one call."""
    answer = "中" * 350_000
    fake.script(mark, {"text": answer, "finish_reason": "stop"})
    job = stack.ended(stack.submit(prompt=mark + " x" * 90_000, max_tokens=100_000)["job_id"])
    assert job["status"] == "completed", job
    assert job["result"]["text"] == answer
    assert len(fake.calls(mark)) == 1


def test_a_result_too_large_for_a_reply_is_a_link(stack: Stack, fake: Fake, mark: str) -> None:
    """result_url reads without a key, and the reply says why it is there."""
    answer = '"' * 1_600_000  # four bytes each in a reply, where JSON is wrapped in JSON
    fake.script(mark, {"text": answer, "finish_reason": "stop"})
    job = stack.ended(stack.submit(prompt=mark, max_tokens=100_000)["job_id"], seconds=180)
    assert "result" not in job
    assert "result_url" in job["result_note"]
    reply = httpx2.get(job["result_url"], timeout=30, trust_env=False)
    assert reply.status_code == 200
    assert reply.json()["text"] == answer


def test_a_cancelled_job_stays_cancelled_and_its_call_is_dropped(stack: Stack, fake: Fake, mark: str) -> None:
    """DELETE while the provider writes: cancelled at once, the call ended long before its own end."""
    fake.script(mark, {"text": "word " * 400, "chunk_delay_seconds": 0.5})
    job_id = stack.submit(prompt=mark)["job_id"]
    until(lambda: fake.calls(mark), 30, lambda: "the call did not begin")
    reply = stack.http().delete(f"/jobs/{job_id}")
    assert (reply.status_code, reply.json()["status"]) == (200, "cancelled")
    gone = until(lambda: [call for call in fake.calls(mark) if call["ended"]], 30, lambda: "the call goes on")
    assert gone[0]["outcome"] == "client_gone"
    job = until(lambda: (found := stack.job(job_id)).get("receipt") and found, 30, lambda: str(stack.job(job_id)))
    assert job["status"] == "cancelled"
    assert job["receipt"][-1]["outcome"] == "discarded"
    assert job["usage"]["estimated"] is True
    assert stack.http().delete(f"/jobs/{job_id}").status_code == 200


def test_a_finished_job_cannot_be_cancelled(stack: Stack, mark: str) -> None:
    """409 with a code."""
    job_id = stack.submit(prompt=mark)["job_id"]
    stack.ended(job_id)
    reply = stack.http().delete(f"/jobs/{job_id}")
    assert (reply.status_code, reply.json()["code"]) == (409, "job_is_final")


def test_a_listing_shows_the_callers_jobs_a_page_at_a_time(stack: Stack, mark: str) -> None:
    """Newest first; the cursor goes on where the page ended."""
    ids = [stack.submit(prompt=f"{mark} {n}")["job_id"] for n in range(3)]
    for job_id in ids:
        stack.ended(job_id)
    seen: list[str] = []
    cursor: str | None = None
    while not set(ids) <= set(seen):
        page = stack.http().get(
            "/jobs", params={"limit": 2, "status": "completed", **({"cursor": cursor} if cursor else {})}
        )
        assert page.status_code == 200, page.text
        seen += [job["job_id"] for job in page.json()["jobs"]]
        cursor = page.json()["next_cursor"]
        assert cursor or set(ids) <= set(seen)
    assert [job_id for job_id in seen if job_id in ids] == ids[::-1]


def test_bad_requests_are_problems_that_name_the_field(stack: Stack) -> None:
    """400, 401, 404, 405, 413, 415: each a problem document with its code."""
    http = stack.http()
    cases = [
        (http.post("/jobs", json={"prompt": "a", "colour": "red"}), 400, "invalid_request"),
        (http.post("/jobs", json={"prompt": "a", "max_tokens": True}), 400, "invalid_request"),
        (http.post("/jobs", content=b"[1,2]", headers={"content-type": "application/json"}), 400, "invalid_request"),
        (
            http.post("/jobs", content=b"prompt=a", headers={"content-type": "text/plain"}),
            415,
            "unsupported_media_type",
        ),
        (http.post("/jobs", json={"prompt": "a" * 5_000_001}), 413, "too_large"),
        (http.post("/jobs", json={"prompt": "a"}, headers={"authorization": "Bearer nobody"}), 401, "unauthorized"),
        (http.get("/jobs/job_nobody"), 404, "job_not_found"),
        (http.put("/jobs", json={}), 405, "method_not_allowed"),
        (http.get("/nothing/here"), 404, "not_found"),
    ]
    for reply, status, code in cases:
        assert (reply.status_code, reply.json()["code"]) == (status, code)
        assert reply.headers["content-type"] == "application/problem+json"
    assert cases[0][0].json()["errors"] == [{"field": "colour", "message": "unknown field"}]


def test_no_prompt_answer_or_key_reaches_a_log(stack: Stack, fake: Fake, mark: str) -> None:
    """The functions' logs tell of the job by its id, and hold nothing of its content."""
    fake.script(mark, {"text": f"answer-{mark}"})
    job_id = stack.submit(prompt=f"prompt-{mark}", system_prompt=f"system-{mark}")["job_id"]
    stack.ended(job_id)
    logs = stack.aws("logs")

    def lines() -> str | None:
        text = ""
        for group in logs.describe_log_groups()["logGroups"]:
            for event in logs.filter_log_events(logGroupName=group["logGroupName"])["events"]:
                text += event["message"]
        return text if job_id in text else None

    text = until(lines, 30, lambda: "the job is in no log")
    assert mark not in text
    assert stack.api_key not in text
    assert "fake-openai-key" not in text


def test_a_waiting_request_is_answered_when_something_happens(stack: Stack, fake: Fake, mark: str) -> None:
    """A slow job is followed to its end by as many requests as it has states, each answered soon after the change."""
    fake.script(mark, {"text": "at last", "latency_seconds": 3})
    job_id = stack.submit(prompt=mark)["job_id"]
    states: list[str] = []
    began = time.monotonic()
    with stack.http() as http:
        while not states or states[-1] in ("queued", "processing"):
            states.append(http.get(f"/jobs/{job_id}", params={"wait": 20}).json()["status"])
    assert states[-2:] == ["processing", "completed"][-len(states) :]
    assert len(states) <= 2
    assert 3 <= time.monotonic() - began < 8
