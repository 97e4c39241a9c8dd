"""`backburner clients` and `secrets`: what an operator does, as the deployed functions see it afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from backburner.adapters.dynamodb import ClientsTable
from backburner.http import CLIENT_CACHE_SECONDS
from cli.secrets import NAMES
from tests.integration.deployed import Deployed
from tests.integration.functions import Stack, sigterm_kept
from tests.integration.test_webhook_secrets import seals

PROMPT = {"prompt": "Name a river."}


@pytest.fixture
def stack(deployed: Deployed) -> Iterator[Stack]:
    """The functions, cold."""
    with sigterm_kept():
        yield Stack(deployed)


def test_a_created_client_may_submit_within_its_limits(stack: Stack, tool: Any) -> None:
    """Its key is printed once; its limits are in force."""
    made = tool("clients", "create", "my-app", "--requests-per-minute", "1", "--json")
    assert made.exit_code == 0, made.output
    key = json.loads(made.stdout)["api_key"]
    assert stack.post(key, PROMPT).status == 202
    assert stack.post(key, PROMPT).status == 429
    listed = tool("clients", "list")
    assert "my-app" in listed.stdout
    assert key not in listed.stdout + tool("clients", "list", "--json").stdout


@pytest.mark.parametrize("name", ["Upper", "-a", "a b", "slack", "x" * 64])
def test_a_name_that_no_client_may_have_is_refused(tool: Any, name: str) -> None:
    """In one line."""
    refused = tool("clients", "create", "--", name)
    assert refused.exit_code == 2
    assert len(refused.stderr.strip().splitlines()) == 1
    assert refused.stdout == ""


def test_a_rotated_key_may_do_what_the_old_one_might_which_is_then_disabled(stack: Stack, tool: Any) -> None:
    """The old one works until the operator ends it, which he is asked about."""
    old = json.loads(tool("clients", "create", "my-app", "--tokens-per-day", "900", "--no-background", "--json").stdout)
    new = json.loads(tool("clients", "rotate", "my-app", "--json").stdout)
    assert new["api_key"] != old["api_key"]
    assert stack.post(old["api_key"], {**PROMPT, "max_tokens": 9}).status == 202
    assert stack.post(new["api_key"], {**PROMPT, "max_tokens": 9}).status == 202
    assert stack.post(new["api_key"], {**PROMPT, "max_tokens": 1000}).json["code"] == "over_budget"
    refused = tool("clients", "disable", "my-app", "--old-keys", input="n\n")
    assert (refused.exit_code, Stack(stack.deployed).post(old["api_key"], PROMPT).status) == (1, 422)
    done = tool("clients", "disable", "my-app", "--old-keys", "--yes", "--json")
    assert json.loads(done.stdout) == {"client_id": "my-app", "disabled": 1}
    later = Stack(stack.deployed)  # a function remembers a key for CLIENT_CACHE_SECONDS
    assert CLIENT_CACHE_SECONDS <= 30
    assert later.post(old["api_key"], PROMPT).status == 401
    assert later.post(new["api_key"], {**PROMPT, "max_tokens": 9}).status == 202
    (shown,) = json.loads(tool("clients", "list", "--json").stdout)["clients"]
    assert (shown["keys"], shown["disabled_keys"], shown["background"]) == (1, 1, False)
    assert shown["limits"]["tokens_per_day"] == 900


def test_all_keys_of_a_client_can_be_disabled(stack: Stack, tool: Any) -> None:
    """A client that misbehaves is shut out."""
    key = stack.client("rogue")
    other = stack.client("good")
    assert json.loads(tool("clients", "disable", "rogue", "--yes", "--json").stdout)["disabled"] == 1
    assert stack.post(key, PROMPT).status == 401
    assert stack.post(other, PROMPT).status == 202


@pytest.mark.parametrize("command", [("rotate",), ("disable", "--yes"), ("limits", "--usd-per-day", "1")])
def test_a_client_that_does_not_exist_is_an_error_with_its_name(tool: Any, command: tuple[str, ...]) -> None:
    """Whatever was to be done with it."""
    refused = tool("clients", *command, "nobody")
    assert (refused.exit_code, refused.stderr) == (2, "there is no client 'nobody'\n")


def test_a_stack_that_does_not_exist_is_an_error_with_its_name(tool: Any) -> None:
    """And no traceback."""
    missing = tool("clients", "list", stack="no-such-stack")
    assert missing.exit_code == 2
    assert "There is no stack 'no-such-stack'" in missing.stderr


@pytest.fixture
def secret(deployed: Deployed) -> Iterator[Any]:
    """What the secret holds; as it was, for whoever comes next."""
    client: Any = boto3.client("secretsmanager")
    arn = deployed.names["ProviderSecret"]
    before = client.get_secret_value(SecretId=arn)["SecretString"]
    client.put_secret_value(SecretId=arn, SecretString=json.dumps(dict.fromkeys(NAMES, "")))
    yield lambda: client.get_secret_value(SecretId=arn)["SecretString"]
    client.put_secret_value(SecretId=arn, SecretString=before)


def test_one_key_is_set_and_the_others_stay(tool: Any, secret: Any) -> None:
    """It is read from stdin, and never printed."""
    tool("secrets", "set", "anthropic_api_key", input="sk-ant-1\n")
    done = tool("secrets", "set", "openai_api_key", input="  sk-2 \n")
    assert done.exit_code == 0, done.output
    assert "sk-2" not in done.output
    held = json.loads(secret())
    assert (held["openai_api_key"], held["anthropic_api_key"]) == ("sk-2", "sk-ant-1")
    assert set(held) == set(NAMES)


@pytest.mark.parametrize(("name", "value"), [("openai_key", "sk-1"), ("openai_api_key", ""), ("openai_api_key", "a b")])
def test_what_is_no_key_changes_nothing(tool: Any, secret: Any, name: str, value: str) -> None:
    """A misspelt name, nothing, or a sentence."""
    before = secret()
    assert tool("secrets", "set", name, input=value).exit_code == 2
    assert secret() == before


def test_the_sealing_key_is_rotated_and_what_was_sealed_still_opens(
    stack: Stack, tool: Any, deployed: Deployed
) -> None:
    """A client's webhooks go on; dropping old keys is asked about."""
    client: Any = boto3.client("secretsmanager")
    before = client.get_secret_value(SecretId=deployed.names["WebhookKeySecret"])["SecretString"]
    stack.client("my-app")
    given = json.loads(tool("clients", "webhook-secret", "rotate", "my-app", "--json").stdout)["webhook_secret"]
    try:
        assert json.loads(tool("secrets", "rotate-sealing-key", "--json").stdout) == {"keys": 2, "clients": 1}
        refused = tool("secrets", "rotate-sealing-key", "--keep", "0", input="n\n")
        assert refused.exit_code == 1
        done = tool("secrets", "rotate-sealing-key", "--keep", "0", "--yes", "--json")
        assert json.loads(done.stdout) == {"keys": 1, "clients": 1}
        table = ClientsTable(boto3.client("dynamodb"), deployed.names["ClientsTable"])
        assert [seals(deployed).open(token) for token in table.of("my-app", 0)] == [given]
    finally:
        client.put_secret_value(SecretId=deployed.names["WebhookKeySecret"], SecretString=before)
