"""The operator's tool as a whole: which deployment it is about, how it ends, what every command has in common."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from botocore.exceptions import ClientError
from typer.testing import CliRunner

from backburner.errors import PortUnavailable
from cli import deployment
from cli.__main__ import app
from cli.deployment import Deployment
from cli.durations import in_words, seconds_of
from cli.screen import Refused

LOCAL = {
    "stack_name": "backburner-local",
    "endpoint_url": "http://127.0.0.1:1",
    "api_url": "http://127.0.0.1:1/api",
    "api_key": "bb_local",
}
NO_STACK = {"size"}
"""It is about a load, not a deployment."""

ASKS = {
    "jobs retry", "jobs cancel", "dlq retry", "dlq discard", "clients disable", "pause", "drain", "load",
    "secrets rotate-sealing-key", "secrets set", "clients webhook-secret rotate",
}  # fmt: skip
"""What destroys or costs something."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All commands, with their names as they are typed."""
    for name, command in getattr(group, "commands", {}).items():
        if getattr(command, "commands", None):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local stack runs, and AWS is somewhere else."""
    monkeypatch.setattr(deployment, "_running_locally", lambda: LOCAL)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")


@pytest.mark.usefixtures("running")
def test_the_local_stack_is_found_by_itself_and_never_taken_for_another() -> None:
    """A stack that is named, a profile and a region mean AWS."""
    for stack in (None, "backburner-local"):
        found = Deployment.find(stack, None)
        assert (found.name, found.local) == ("backburner-local", LOCAL)
        assert found.client("sqs").meta.endpoint_url == "http://127.0.0.1:1"
    named = Deployment.find("backburner-prod", None)
    assert (named.name, named.local) == ("backburner-prod", None)
    assert "amazonaws.com" in named.client("sqs").meta.endpoint_url
    elsewhere = Deployment.find(None, None, "us-west-2")
    assert (elsewhere.name, elsewhere.local) == ("backburner", None)
    assert "us-west-2.amazonaws.com" in elsewhere.client("sqs").meta.endpoint_url


def test_without_a_local_stack_it_is_the_one_on_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that README.md deploys."""
    monkeypatch.setattr(deployment, "_running_locally", lambda: None)
    found = Deployment.find(None, None)
    assert (found.name, found.local) == ("backburner", None)


def test_all_commands_are_there() -> None:
    """As the runbook names them."""
    expected = (
        "status", "jobs list", "jobs show", "jobs retry", "jobs tell", "jobs cancel", "dlq list", "dlq show",
        "dlq retry",
        "dlq discard", "clients create", "clients list", "clients rotate", "clients limits", "clients disable",
        "clients webhook-secret rotate", "limits show", "limits set", "secrets set", "secrets rotate-sealing-key",
        "webhooks resend", "doctor", "size", "load", "tail", "submit", "pause", "resume", "drain",
    )  # fmt: skip
    assert sorted(COMMANDS) == sorted(expected)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself_and_takes_the_common_options(name: str) -> None:
    """JSON on everything; a stack and a profile where there is one to choose; what destroys takes --yes."""
    command = COMMANDS[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert command.help
    assert "--json" in options
    if name not in NO_STACK:
        assert {"--stack", "--profile", "--region"} <= options
    assert (name in ASKS) == ("--yes" in options)
    assert CliRunner().invoke(app, [*name.split(), "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (Refused("no such thing"), 2, "no such thing"),
        (PortUnavailable("DynamoDB did not answer"), 1, "DynamoDB did not answer"),
        (ClientError({"Error": {"Code": "AccessDenied", "Message": "not you"}}, "Scan"), 1, "not you"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, said: str
) -> None:
    """On stderr, so that a pipe gets results only."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Deployment, "find", fail)
    done = CliRunner().invoke(app, ["clients", "list", "--json"])
    assert (done.exit_code, done.stdout) == (status, "")
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def described(monkeypatch: pytest.MonkeyPatch, status: str, outputs: dict[str, str], **parameters: str) -> None:
    """Have CloudFormation describe the stack so; nothing else of AWS answers."""
    found = Deployment("backburner", None)  # type: ignore[arg-type]
    found.__dict__["_described"] = {
        "StackStatus": status,
        "Outputs": [{"OutputKey": key, "OutputValue": value} for key, value in outputs.items()],
        "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
    }
    monkeypatch.setattr(found, "client", dict.fromkeys(("dynamodb", "lambda", "sqs")).get)
    monkeypatch.setattr(Deployment, "find", lambda *_: found)


LOOKS = ("status", "jobs list", "dlq list", "limits show", "clients list", "secrets set openai_api_key", "drain bulk")


@pytest.mark.parametrize("command", LOOKS)
@pytest.mark.parametrize(
    ("status", "outputs", "said"),
    [
        ("ROLLBACK_COMPLETE", {}, "never deployed to the end"),
        ("CREATE_COMPLETE", {"Website": "https://example.com"}, "it is no Backburner"),
    ],
)
def test_a_stack_that_is_no_deployment_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, command: str, status: str, outputs: dict[str, str], said: str
) -> None:
    """A creation that was rolled back, and another application's; whatever was to be done with it."""
    described(monkeypatch, status, outputs)
    done = CliRunner().invoke(app, [*command.split(), "--json"])
    assert (done.exit_code, done.stdout, len(done.stderr.strip().splitlines())) == (2, "", 1)
    assert status in done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("command", ["status", "jobs list", "limits show", "limits set m --requests 1"])
@pytest.mark.parametrize(
    ("models", "said"), [("{", "Invalid JSON"), ('{"m": {"provider": "openai"}}', "m.context_tokens: Field required")]
)
def test_extra_models_that_cannot_be_read_are_one_line_that_names_the_parameter(
    monkeypatch: pytest.MonkeyPatch, command: str, models: str, said: str
) -> None:
    """And the first field that is wrong in it."""
    outputs = {"StatusFunctionName": "status", "LimitsTableName": "limits"}
    described(monkeypatch, "UPDATE_COMPLETE", outputs, ExtraModels=models)
    done = CliRunner().invoke(app, [*command.split(), "--json"])
    assert (done.exit_code, done.stdout, len(done.stderr.strip().splitlines())) == (2, "", 1)
    assert "ExtraModels" in done.stderr
    assert said in done.stderr


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is logged in, and no region is set."""
    monkeypatch.setattr(deployment, "_running_locally", lambda: None)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": "/dev/null", "SHARED_CREDENTIALS_FILE": "/dev/null",
                        "EC2_METADATA_DISABLED": "true"}.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize(
    ("options", "said"), [(["--region", "eu-central-1"], "no AWS credentials"), ([], "No AWS region")]
)
def test_missing_credentials_are_what_is_said_and_not_a_missing_stack(options: list[str], said: str) -> None:
    """By every command; the doctor finds them, as JSON too."""
    refused = CliRunner().invoke(app, ["clients", "list", *options])
    assert (refused.exit_code, said in refused.stderr, "no stack" in refused.stderr) == (2, True, False)
    found = CliRunner().invoke(app, ["doctor", "--json", *options])
    [finding] = json.loads(found.stdout)
    assert (found.exit_code, finding["what"], finding["ok"]) == (1, "AWS credentials", False)
    assert "no AWS credentials" in finding["detail"]
    assert "WRONG" in CliRunner().invoke(app, ["doctor", *options]).stdout


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7_200), ("1d", 86_400)])
def test_durations(text: str, seconds: float) -> None:
    """As people write them."""
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5s", "5 weeks", "1h30m"])
def test_what_is_no_duration(text: str) -> None:
    """Is refused, not guessed."""
    with pytest.raises(typer.BadParameter):
        seconds_of(text)


def test_durations_in_words() -> None:
    """With one unit."""
    assert [in_words(seconds) for seconds in (0, 59.4, 60, 7_199, 7_200, 200_000)] == [
        "0 s", "59 s", "1 min", "1 h", "2 h", "2 d",
    ]  # fmt: skip
