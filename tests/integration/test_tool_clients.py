"""`backburner clients` and `secrets`: what an operator does, as the deployed functions see it afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from backburner.adapters.dynamodb import ClientsTable
from backburner.http import CLIENT_CACHE_SECONDS
from backburner.models import Tally
from cli import secrets
from cli.clients import Used, used
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


def test_a_key_that_is_in_use_is_replaced_only_if_whoever_is_at_the_keyboard_says_so(
    tool: Any, secret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes by a pipe was decided before."""
    monkeypatch.setattr(secrets, "_is_asked", lambda: True)
    assert tool("secrets", "set", "openai_api_key", input="sk-1\n").exit_code == 0
    refused = tool("secrets", "set", "openai_api_key", input="n\nsk-2\n")
    assert (refused.exit_code, json.loads(secret())["openai_api_key"]) == (1, "sk-1")
    assert "is set already" in refused.stderr
    tool("secrets", "set", "openai_api_key", input="y\nsk-3\n")
    assert json.loads(secret())["openai_api_key"] == "sk-3"
    done = tool("secrets", "set", "openai_api_key", "--yes", input="sk-4\n")
    assert json.loads(secret())["openai_api_key"] == "sk-4"
    assert "Functions take it by themselves" in done.stdout


def test_a_clients_limits_are_shown_with_what_is_used_of_them(stack: Stack, tool: Any) -> None:
    """Nothing is changed by it; of a client without limits nothing is counted."""
    limits = ("--requests-per-minute", "9", "--usd-per-day", "20")
    key = json.loads(tool("clients", "create", "my-app", *limits, "--json").stdout)["api_key"]
    assert stack.post(key, {**PROMPT, "max_tokens": 100}).status == 202
    told = json.loads(tool("clients", "limits", "my-app", "--json").stdout)
    assert (told["requests_per_minute"], told["tokens_per_day"], told["micro_usd_per_day"]) == (9, None, 20_000_000)
    tally = stack.tally("my-app")
    assert (told["used"]["tokens"], told["used"]["micro_usd"]) == (tally["tokens"], tally["micro_usd"])
    assert told["used"]["tokens"] > 100
    shown = tool("clients", "limits", "my-app").stdout
    assert "9 requests a minute, $20 a day" in shown
    assert f"{tally['tokens']:,} tokens" in shown
    free = stack.client("free")
    assert stack.post(free, PROMPT).status == 202
    assert "not counted" in tool("clients", "limits", "free").stdout
    assert "no limit" in tool("clients", "limits", "slack").stdout
    assert tool("clients", "limits", "nobody").stderr == "there is no client 'nobody'\n"


def test_what_was_used_of_a_minute_or_day_that_is_over_counts_no_more() -> None:
    """Clocks differ, so a tally may be of a day that has not begun here."""
    day, now = "2027-01-15", 1_800_000_000_000  # 08:00 UTC
    assert used(None, now) == Used(day)
    tally = Tally(now // 60_000, 3, day, 40, 50)
    assert used(tally, now) == Used(day, 3, 40, 50)
    assert used(tally, now + 60_000) == Used(day, 0, 40, 50)
    assert used(tally, now + 86_400_000) == Used("2027-01-16")


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
