"""The official OpenAI SDK as a client of the functions as shipped, on moto; a fake provider behind them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import boto3
import httpx2
import openai
import pytest

from tests.fakes.provider import Behaviour, FakeProvider, openai_error
from tests.integration.deployed import Deployed
from tests.integration.functions import Context, Reply, Stack, event, reply_of, sigterm_kept

MODELS = ["gpt-5.4-mini", "claude-haiku-4-5"]
EXTRA = {"warm": {"provider": "openai", "context_tokens": 8192, "output_tokens_max": 2000, "temperature": True}}


@pytest.fixture
def stack(deployed: Deployed, provider: FakeProvider) -> Iterator[Stack]:
    """The functions, with keys in the secret and a model that has a temperature."""
    provider.configure(tokens_per_chunk=100_000)
    functions = Stack(deployed, {"EXTRA_MODELS": json.dumps(EXTRA), "LONG_POLL_SECONDS": "20"})
    functions.provider_keys()
    with sigterm_kept():
        yield functions


def gateway(stack: Stack) -> Callable[[httpx2.Request], httpx2.Response]:
    """What API Gateway does with a request: the template's routes, its events, its replies."""
    numbers = itertools.count()

    def answer(request: httpx2.Request) -> httpx2.Response:
        path, method = request.url.path, request.method
        function = "IngestFunction" if (method, path) == ("POST", "/v1/responses") else "StatusFunction"
        query = dict(request.url.params)
        asked = event("post_job" if function == "IngestFunction" else "get_job")
        asked |= {
            "path": path,
            "httpMethod": method,
            "headers": dict(request.headers),
            "multiValueHeaders": {name: [value] for name, value in request.headers.items()},
            "queryStringParameters": query or None,
            "multiValueQueryStringParameters": {name: [value] for name, value in query.items()} or None,
            "body": request.content.decode() or None,
        }
        asked["requestContext"]["requestId"] = f"request-{next(numbers)}"
        reply: Reply = reply_of(stack.function(function)(asked, Context()))
        return httpx2.Response(reply.status, headers=reply.headers, content=reply.text.encode(), request=request)

    return answer


@contextmanager
def sdk(stack: Stack, key: str) -> Iterator[openai.OpenAI]:
    transport = httpx2.MockTransport(gateway(stack))
    with openai.OpenAI(
        api_key=key,
        base_url="https://backburner.example/v1",
        http_client=httpx2.Client(transport=transport),
        max_retries=0,
    ) as client:
        yield client


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with sdk(stack, stack.client()) as opened:
        yield opened


@pytest.mark.parametrize("model", MODELS)
def test_a_response_is_created_retrieved_and_deleted(
    stack: Stack, client: openai.OpenAI, provider: FakeProvider, model: str
) -> None:
    """For a model of either provider; what was asked comes back, and after the deletion nothing."""
    provider.script("river", Behaviour(text="The Danube."))
    created = client.responses.create(
        model=model, input="Name a river.", instructions="Be brief.", background=True, metadata={"team": "maps"}
    )
    assert (created.status, created.model, created.background) == ("queued", model, True)
    stack.work()
    done = client.responses.retrieve(created.id)
    assert (done.status, done.output_text, done.model) == ("completed", "The Danube.", model)
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens > 0
    assert (done.instructions, done.metadata) == ("Be brief.", {"team": "maps"})
    client.responses.delete(created.id)
    with pytest.raises(openai.NotFoundError) as raised:
        client.responses.retrieve(created.id)
    assert (raised.value.code, raised.value.type) == ("job_not_found", "invalid_request_error")
    row: Any = boto3.client("dynamodb").get_item(
        TableName=stack.deployed.names["JobsTable"], Key={"job_id": {"S": created.id}}
    )["Item"]
    assert "Danube" not in str(row)
    assert "river" not in str(row)
    assert "maps" not in str(row)


def test_a_conversation_goes_on_with_the_output_as_it_came(
    stack: Stack, client: openai.OpenAI, provider: FakeProvider
) -> None:
    """What the SDK returns is taken as input again."""
    first = client.responses.create(model=MODELS[0], input="Name a river.", background=True)
    stack.work()
    output = client.responses.retrieve(first.id).output
    turns: Any = [{"role": "user", "content": "Name a river."}, *output, {"role": "user", "content": "Another."}]
    second = client.responses.create(model=MODELS[0], input=turns, background=True)
    stack.work()
    assert client.responses.retrieve(second.id).status == "completed"
    asked = [call for call in provider.ledger if "Another." in json.dumps(call.request)]
    assert [turn["role"] for turn in asked[0].request["input"]] == ["user", "assistant", "user"]


def test_a_temperature_and_a_cache_key_reach_the_provider(
    stack: Stack, client: openai.OpenAI, provider: FakeProvider
) -> None:
    """Where the model has one; the key as a hash, for providers need not know it."""
    for key in ("rivers", "rivers", "lakes"):
        client.responses.create(model="warm", input="hot", background=True, temperature=0.5, prompt_cache_key=key)
    stack.work()
    bodies = [call.request for call in provider.ledger]
    assert [body["temperature"] for body in bodies] == [0.5] * 3
    keys = [body["prompt_cache_key"] for body in bodies]
    assert len(set(keys)) == 2
    assert "rivers" not in keys


def test_cancelling_is_idempotent_and_leaves_what_has_ended(stack: Stack, client: openai.OpenAI) -> None:
    queued = client.responses.create(model=MODELS[0], input="Wait.", background=True)
    assert [client.responses.cancel(queued.id).status for _ in range(2)] == ["cancelled"] * 2
    ended = client.responses.create(model=MODELS[0], input="Quick.", background=True)
    stack.work()
    assert client.responses.cancel(ended.id).status == "completed"


def test_a_running_response_is_not_deleted(stack: Stack, client: openai.OpenAI) -> None:
    """Its answer may be paid for already."""
    queued = client.responses.create(model=MODELS[0], input="Wait.", background=True)
    with pytest.raises(openai.ConflictError) as raised:
        client.responses.delete(queued.id)
    assert raised.value.code == "job_in_use"
    client.responses.cancel(queued.id)
    client.responses.delete(queued.id)


def test_large_texts_come_back_whole_and_are_deleted_too(
    stack: Stack, client: openai.OpenAI, provider: FakeProvider
) -> None:
    """Request and answer lie in the bucket, and nothing is left there."""
    long = "river " * 40_000
    provider.script("river", Behaviour(text=long, finish_reason="stop"))
    created = client.responses.create(model="warm", input=long, background=True)
    stack.work()
    done = client.responses.retrieve(created.id)
    assert (done.output_text, done.model) == (long, "warm")
    bucket = boto3.resource("s3").Bucket(stack.deployed.names["PayloadsBucket"])
    assert len(list(bucket.objects.all())) == 2
    client.responses.delete(created.id)
    assert list(bucket.objects.all()) == []


def test_a_large_response_that_ends_after_a_long_wait_is_asked_for_again(
    stack: Stack, client: openai.OpenAI, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 rather than a function that is cut off while it reads; the next request has its whole time."""
    created = client.responses.create(model="warm", input="river " * 40_000, background=True)
    stack.work()
    with monkeypatch.context() as patch:
        patch.setattr(Context, "get_remaining_time_in_millis", staticmethod(lambda: 8_000))
        with pytest.raises(openai.InternalServerError) as raised:
            client.responses.retrieve(created.id)
    assert (raised.value.status_code, raised.value.response.headers["retry-after"]) == (503, "1")
    assert client.responses.retrieve(created.id).status == "completed"


def test_a_key_makes_one_response_over_both_apis(stack: Stack, client: openai.OpenAI) -> None:
    """Also when it is complete; another request with the key is a conflict."""
    ask: Any = {"model": MODELS[0], "background": True, "extra_headers": {"Idempotency-Key": "k-1"}}
    first = client.responses.create(input="Name a river.", **ask)
    stack.work()
    again = client.responses.with_raw_response.create(input="Name a river.", **ask)
    assert again.headers["idempotent-replayed"] == "true"
    assert (again.parse().id, again.parse().status) == (first.id, "completed")
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        client.responses.create(input="Name a lake.", **ask)
    assert raised.value.code == "idempotency_conflict"


def test_a_failure_is_a_failed_response(stack: Stack, client: openai.OpenAI, provider: FakeProvider) -> None:
    provider.script("doomed", Behaviour(status=400, body=openai_error("no", "invalid_request_error")))
    created = client.responses.create(model=MODELS[0], input="doomed", background=True)
    stack.work()
    failed = client.responses.retrieve(created.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "invalid_prompt"
    assert failed.error.message.startswith("invalid_request: ")


def test_errors_are_the_sdks_classes_with_a_request_id(stack: Stack, client: openai.OpenAI) -> None:
    """Wrong key, wrong field, unknown response and model; each with the id that the logs have."""
    with sdk(stack, "bb_wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model=MODELS[0], input="x")
    assert (raised.value.param, raised.value.code) == ("background", "invalid_request")
    assert (raised.value.request_id or "").startswith("request-")
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="unheard-of", input="x", background=True)
    assert raised.value.param == "model"
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.retrieve("job_x", stream=True)
    assert raised.value.param == "stream"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("job_nobodys")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("unheard-of")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=MODELS[0], messages=[{"role": "user", "content": "x"}])


def test_somebody_elses_response_is_not_there(stack: Stack, client: openai.OpenAI) -> None:
    created = client.responses.create(model=MODELS[0], input="Mine.", background=True)
    with sdk(stack, stack.client("bob")) as other:
        for attempt in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                attempt(created.id)


def test_a_limited_client_sees_where_it_stands(stack: Stack) -> None:
    """In OpenAI's headers; beyond it the SDK raises its own class, with the time to wait."""
    with sdk(stack, stack.client("limited", requests_per_minute=1)) as client:
        reply = client.responses.with_raw_response.create(model=MODELS[0], input="x", background=True)
        assert reply.headers["x-ratelimit-limit-requests"] == "1"
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
        with suppress(openai.RateLimitError):  # or not, if a minute ends here
            client.responses.create(model=MODELS[0], input="x", background=True)
        with pytest.raises(openai.RateLimitError) as raised:
            client.responses.create(model=MODELS[0], input="x", background=True)
        assert 0 < int(raised.value.response.headers["retry-after"]) <= 60


def test_the_catalogue_is_the_list_of_models(client: openai.OpenAI) -> None:
    names = {model.id for model in client.models.list()}
    assert {*MODELS, *EXTRA} <= names
    assert client.models.retrieve(MODELS[1]).owned_by == "anthropic"
