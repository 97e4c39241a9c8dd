"""The deployed stack, as its clients and operators see it: HTTP and the AWS API; and the fake provider's controls."""

from __future__ import annotations

import json
import os
import time
import urllib.parse
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
import httpx2
import pytest

from cli.clients import create_client
from tests.fakes.slack import SIGNING_SECRET, FakeSlack, signed

pytestmark = pytest.mark.e2e

WAIT_SECONDS = 60.0
MODELS = ("gpt-5.4-mini", "gpt-5.4", "claude-haiku-4-5")
"""Those that tests ask for."""


@dataclass(frozen=True)
class Stack:
    """The stack under test."""

    api_url: str
    socket_url: str
    api_key: str
    endpoint_url: str
    region: str
    outputs: dict[str, str]

    def aws(self, service: str, *, resource: bool = False) -> Any:
        """An AWS client, or resource, with the operator's rights."""
        factory: Any = boto3.resource if resource else boto3.client
        return factory(
            service,
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def submit(self, *, key: str | None = None, status: int = 202, **fields: Any) -> dict[str, Any]:
        """POST /jobs; the reply's body."""
        headers = {"Idempotency-Key": key} if key else {}
        reply = self.http().post("/jobs", json=fields, headers=headers)
        assert reply.status_code == status, reply.text
        return reply.json()  # type: ignore[no-any-return]

    def http(self) -> httpx2.Client:
        """A client with the stack's key."""
        return httpx2.Client(
            base_url=self.api_url, headers={"Authorization": f"Bearer {self.api_key}"}, timeout=30, trust_env=False
        )

    def patient(self) -> Stack:
        """The stack as seen by a client whose calls may go on in the background."""
        table = self.aws("dynamodb", resource=True).Table(self.outputs["ClientsTableName"])
        return replace(self, api_key=create_client(table, "patient", "Patient", 0, background=True))

    def make_due(self, job_id: str) -> None:
        """Turn the row's clock rather than wait a minute."""
        self._let_pass(job_id, "due_at")

    def lapse(self, job_id: str) -> None:
        """Let a lease be over rather than wait half a minute. It is due after that, so both."""
        self._let_pass(job_id, "lease_until")
        self._let_pass(job_id, "due_at")

    def _let_pass(self, job_id: str, instant: str) -> None:
        self.aws("dynamodb").update_item(
            TableName=self.outputs["JobsTableName"],
            Key={"job_id": {"S": job_id}},
            UpdateExpression="SET #instant = :past",
            ConditionExpression="attribute_exists(#instant)",
            ExpressionAttributeNames={"#instant": instant},
            ExpressionAttributeValues={":past": {"N": "1"}},
        )

    def job(self, job_id: str) -> dict[str, Any]:
        """GET /jobs/{id}."""
        reply = self.http().get(f"/jobs/{job_id}")
        assert reply.status_code == 200, reply.text
        return reply.json()  # type: ignore[no-any-return]

    def ended(self, job_id: str, seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """The job once it has ended."""

        def job() -> dict[str, Any] | None:
            found = self.job(job_id)
            return None if found["status"] in ("queued", "processing") else found

        return until(job, seconds, lambda: f"{job_id} has not ended: {self.job(job_id)}")

    def limit(self, model: str, per_minute: int) -> None:
        """Set a model's limits by its row, and forget what was learned and held."""
        dimensions = ("requests", "tokens", "input_tokens", "output_tokens")
        self.aws("dynamodb", resource=True).Table(self.outputs["LimitsTableName"]).put_item(
            Item={"limit_id": f"model#{model}", **{f"{name}_per_minute": per_minute for name in dimensions}}
        )

    def repair(self) -> None:
        """Let the repairer run now, as the schedule would within a minute."""
        reply = self.aws("lambda").invoke(FunctionName=self.outputs["RepairFunctionName"], Payload=b"{}")
        assert "FunctionError" not in reply, reply["Payload"].read()

    def dead_letters(self, job_id: str | None = None) -> list[dict[str, Any]]:
        """The letters in the dead-letter queue, of one job or all; they stay there."""
        sqs, found = self.aws("sqs"), {}
        for _ in range(5):
            reply = sqs.receive_message(
                QueueUrl=self.outputs["DeadLetterQueueUrl"],
                MaxNumberOfMessages=10,
                VisibilityTimeout=0,
                MessageAttributeNames=["All"],
            )
            for message in reply.get("Messages", []):
                if job_id is None or job_id in message["Body"]:
                    found[message["MessageId"]] = message
        return list(found.values())


def until[T](look: Callable[[], T | None], seconds: float, say: Callable[[], str]) -> T:
    """Look until there is something to see."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(say())


@dataclass(frozen=True)
class Fake:
    """The fake provider's controls. Each test marks its prompts, so that tests do not disturb each other."""

    address: str

    def script(self, match: str, *steps: dict[str, Any]) -> None:
        """What calls whose prompt holds `match` get, one after the other."""
        reply = httpx2.post(
            f"{self.address}/_control/scripts", json={"match": match, "steps": list(steps)}, trust_env=False
        )
        assert reply.status_code < 300, reply.text

    def calls(self, match: str) -> list[dict[str, Any]]:
        """The calls whose prompt holds `match`."""
        ledger = httpx2.get(f"{self.address}/_control/ledger", trust_env=False).json()
        return [call for call in ledger if match in json.dumps(call)]


@dataclass(frozen=True)
class Workspace:
    """The fake Slack's controls, with a channel and a person of the test's own; and the sender of what Slack sends."""

    address: str
    api_url: str
    channel: str
    user: str

    def control(self, verb: str, what: str, **given: Any) -> Any:
        """Steer the fake Slack."""
        reply = httpx2.request(verb, f"{self.address}/_control/{what}", trust_env=False, timeout=30, **given)
        assert reply.status_code < 300, reply.text
        return reply.json()

    def say(self, text: str, **more: Any) -> dict[str, Any]:
        """A person says something in the channel; its event."""
        event: dict[str, Any] = self.control(
            "POST", "messages", json={"text": text, "channel": self.channel, "user": self.user, **more}
        )
        return event

    def script(self, method: str, *steps: dict[str, Any], match: str | None = None) -> None:
        """What calls about this channel, or with another match, get one after the other."""
        script = {"method": method, "match": match or self.channel, "steps": list(steps)}
        self.control("POST", "scripts", json=script)

    def calls(self, method: str) -> list[dict[str, Any]]:
        """The calls about this channel."""
        ledger = self.control("GET", "ledger")
        return [call for call in ledger if call["method"] == method and self.channel in json.dumps(call)]

    def messages(self, thread_ts: str | None = None) -> list[dict[str, Any]]:
        """The app's messages that everybody sees, oldest first."""
        found = self.control(
            "GET", "messages", params={"channel": self.channel} | ({"thread_ts": thread_ts} if thread_ts else {})
        )
        return [message for message in found if message["bot"] and message["ephemeral_for"] is None]

    def answers(self, thread_ts: str | None = None, *, count: int = 1, seconds: float = WAIT_SECONDS) -> list[str]:
        """What they say, once there are so many."""

        def look() -> list[str] | None:
            found = [message["markdown"] for message in self.messages(thread_ts)]
            return found if len(found) >= count else None

        return until(look, seconds, lambda: f"not {count} answers: {self.messages(thread_ts)}")

    def post(self, path: str, body: str, headers: dict[str, str] | None = None) -> httpx2.Response:
        """A request as Slack sends it, signed now."""
        kind = "application/json" if body.startswith("{") else "application/x-www-form-urlencoded"
        sent = {"Content-Type": kind, **signed(SIGNING_SECRET, body, time.time()), **(headers or {})}
        return httpx2.post(f"{self.api_url}/slack/{path}", content=body, headers=sent, timeout=30, trust_env=False)

    def send(self, event: dict[str, Any], headers: dict[str, str] | None = None) -> int:
        """Send the event; the status of the reply."""
        return self.post("events", json.dumps(FakeSlack().envelope(event)), headers).status_code

    def press(self, button: dict[str, Any], **more: Any) -> int:
        """A button is pressed; the status of the reply."""
        action = {"action_id": button["action_id"], "value": button["value"], "action_ts": f"{time.time():.6f}"}
        payload = {"type": "block_actions", "user": {"id": self.user}, "actions": [action], **more}
        return self.post("interactions", urllib.parse.urlencode({"payload": json.dumps(payload)})).status_code


@pytest.fixture(scope="session")
def stack() -> Stack:
    """The stack that `make e2e` deployed."""
    path = os.environ.get("BACKBURNER_STACK_FILE")
    if path is None:
        pytest.skip("run by make e2e")
    described = json.loads(Path(path).read_text())
    return Stack(
        **{name: described[name] for name in ("api_url", "socket_url", "api_key", "endpoint_url", "region", "outputs")}
    )


@pytest.fixture(scope="session")
def fake() -> Fake:
    """The fake provider behind the stack."""
    return Fake(os.environ["BACKBURNER_FAKE_PROVIDER"])


@pytest.fixture(autouse=True)
def no_limits(stack: Stack) -> None:
    """No test waits for what another has used up; those of the limits set their own."""
    for model in MODELS:
        stack.limit(model, 10**12)


@pytest.fixture
def slack(stack: Stack) -> Workspace:
    """The fake Slack behind the stack, and a channel and a person that no other test uses."""
    name = uuid.uuid4().hex[:12].upper()
    return Workspace(os.environ["BACKBURNER_FAKE_SLACK"], stack.api_url, f"C{name}", f"U{name}")


@pytest.fixture
def mark() -> str:
    """A word that no other test's prompt holds."""
    return f"mark-{uuid.uuid4().hex}"
