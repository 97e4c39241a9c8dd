"""`backburner doctor` finds what is wrong with Slack's set-up by trying it."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError, NoCredentialsError
from rich.console import Console
from typer.testing import CliRunner

from cli import doctor
from cli.__main__ import app
from cli.clients import create_client
from cli.deployment import Deployment
from cli.doctor import (
    MANIFEST,
    SCHEDULE,
    Finding,
    check_alarms,
    check_api,
    check_caller,
    check_drift,
    check_models,
    check_providers,
    check_quota,
    check_schedule,
    check_secret,
    check_slack,
    check_versions,
    examine,
    examined,
    manifest_scopes,
)
from tests.fakes.slack import SIGNING_SECRET, FakeSlack, needed_scope
from tests.unit.test_slack_events import Desk

SECRET = {"slack_signing_secret": SIGNING_SECRET, "slack_bot_token": "xoxb-fake-slack-token"}


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    with FakeSlack() as server:
        yield server


@pytest.fixture
def api_url() -> Iterator[str]:
    """A deployed endpoint with the right secret."""
    desk = Desk()

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            desk.house.clock.time = time.time_ns() // 1_000_000
            event = {"path": self.path, "headers": dict(self.headers.items()), "body": body}
            reply = desk.desk.handle(event, None)
            self.send_response(reply["statusCode"])
            self.end_headers()
            self.wfile.write(reply["body"].encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def wrong(findings: object) -> dict[str, str]:
    assert isinstance(findings, list)
    return {finding.what: finding.detail for finding in findings if finding.ok is False}


def test_all_is_well(slack: FakeSlack, api_url: str) -> None:
    """Secret, token and scopes; that the fake's secret has not the form of Slack's is said, and is no fault."""
    found = check_slack(SECRET, api_url, slack.base_url)
    assert [finding.ok for finding in found] == [None, True, True, True]


@pytest.mark.parametrize(
    ("signing_secret", "ok", "said"),
    [
        ("0123456789abcdef" * 2, True, "so has the client secret"),
        ("xoxb-17-42-abc", False, "a bot token"),
        ("xoxp-17-42-abc", False, "a token"),
        ("xoxe.xoxb-1-abc", False, "a token"),
        ("xapp-1-A1-42-abc", False, "an app-level token"),
        ("1234567890.9876543210", False, "the client id"),
        ("abcDEF0123456789abcDEF01", False, "the verification token"),
        ("0123456789ABCDEF" * 2, None, "unlike Slack's"),
        ("0123456789abcdef" * 2 + "0", None, "unlike Slack's"),
        ("0123456789abcdef", None, "unlike Slack's"),
    ],
)
def test_what_is_no_signing_secret_is_told_by_its_form(signing_secret: str, ok: bool | None, said: str) -> None:
    """Endpoint and tool would agree on anything. What else Slack shows is named, and not shown again."""
    secret = {"slack_signing_secret": signing_secret}
    found = {finding.what: finding for finding in check_slack(secret, "http://127.0.0.1:9")}
    form = found["the signing secret's form"]
    assert (form.ok, said in form.detail, signing_secret in form.detail) == (ok, True, False)


def test_a_deployment_without_slack_is_not_wrong(api_url: str) -> None:
    """There is nothing to look at."""
    (finding,) = check_slack({"openai_api_key": "x"}, api_url)
    assert finding.ok is None


@pytest.mark.parametrize(
    ("change", "what", "word"),
    [
        ({"slack_signing_secret": ""}, "Slack's signing secret", "empty"),
        ({"slack_signing_secret": "another"}, "Slack's signing secret", "401"),
        ({"slack_bot_token": ""}, "Slack's bot token", "empty"),
        ({"slack_bot_token": "xoxb-other"}, "Slack's bot token", "invalid_auth"),
    ],
)
def test_a_wrong_secret_is_found(slack: FakeSlack, api_url: str, change: dict[str, str], what: str, word: str) -> None:
    """And nothing of it is shown."""
    found = wrong(check_slack({**SECRET, **change}, api_url, slack.base_url))
    assert list(found) == [what]
    assert word in found[what]
    assert not any(value and value in json.dumps(found) for value in ({**SECRET, **change}).values())


def test_missing_scopes_are_named(slack: FakeSlack, api_url: str) -> None:
    """More than needed is no fault, but said."""
    slack.configure(scopes="chat:write,app_mentions:read,files:read")
    found = wrong(check_slack(SECRET, api_url, slack.base_url))
    assert "im:history" in found["Slack's scopes"]
    slack.configure(scopes=",".join([*manifest_scopes(), "files:read"]))
    assert check_slack(SECRET, api_url, slack.base_url)[-1] == Finding(
        "Slack's scopes", True, "as docs/slack-manifest.yaml has them, and more: files:read"
    )


def test_what_cannot_be_reached_is_said(slack: FakeSlack) -> None:
    """The endpoint, and Slack."""
    found = wrong(check_slack(SECRET, "http://127.0.0.1:9", "http://127.0.0.1:9/api/"))
    assert set(found) == {"Slack's signing secret", "Slack's bot token"}


def test_the_manifest_asks_for_what_is_used() -> None:
    """Its events are those that are taken, its addresses those that are deployed, its scopes those that they need."""
    manifest = yaml.safe_load(MANIFEST.read_text())
    settings = manifest["settings"]
    assert settings["event_subscriptions"]["bot_events"] == [
        "app_mention", "message.channels", "message.groups", "message.im",
    ]  # fmt: skip
    urls = [
        settings["event_subscriptions"]["request_url"],
        settings["interactivity"]["request_url"],
        *(command["url"] for command in manifest["features"]["slash_commands"]),
    ]
    assert urls == [f"API_URL/slack/{path}" for path in ("events", "interactions", "commands")]
    of_events = {"app_mentions:read", "channels:history", "groups:history", "im:history", "commands"}
    methods = {"chat.postMessage", "assistant.threads.setStatus", "reactions.add", "users.info"}
    of_methods = {needed_scope(method, {}) for method in methods}
    of_methods |= {needed_scope("conversations.info", {"channel": channel}) for channel in ("C1", "G1")}
    assert of_events | of_methods == manifest_scopes() == set(FakeSlack().config.scopes.split(","))


def test_no_client_takes_slacks_name() -> None:
    """It would see the questions of everybody in Slack."""
    with pytest.raises(ValueError, match="Slack"):
        create_client(None, "slack", "x", 0)


# ── AWS's side, the providers' side ──────────────────────────────────────────────────────────────────────────────────


class Aws:
    """A deployment whose AWS answers as told; what it was not told of, it denies."""

    name = "backburner"

    def __init__(self, **replies: object) -> None:
        self.replies = replies
        self.outputs = {"AlarmTopicArn": "arn:topic", "ApiUrl": "http://127.0.0.1:1"}
        self.parameters = {"StandardConcurrency": "20", "DeploymentPreference": "AllAtOnce"}

    def client(self, _service: str) -> Aws:
        return self

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        reply = self.replies.get(operation)
        if reply is None:
            raise ClientError({"Error": {"Code": "AccessDenied"}}, operation)
        return lambda **_: reply.pop(0) if isinstance(reply, list) else reply

    def get_paginator(self, operation: str) -> Any:
        pages = [self.replies[operation]]
        return type("Pages", (), {"paginate": lambda _self, **_: pages})()


def looked(check: Callable[..., Any], **replies: object) -> list[tuple[bool | None, str]]:
    return [(finding.ok, finding.detail) for finding in examined("it", lambda: check(Aws(**replies)))]


def test_the_callers_identity_is_told_and_missing_credentials_are_wrong() -> None:
    """Before anything else is tried."""
    assert looked(check_caller, get_caller_identity={"Arn": "arn:aws:iam::1:user/eve"})[0] == (
        True,
        "arn:aws:iam::1:user/eve",
    )

    def nobody() -> Sequence[Finding]:
        raise NoCredentialsError

    assert [finding.ok for finding in examined("it", nobody)] == [False]


def test_what_may_not_be_looked_at_is_neither_right_nor_wrong() -> None:
    """An operator without a permission still gets the rest."""
    for check in (check_caller, check_quota, check_drift):
        assert looked(check) == [(None, "cannot be looked at: AccessDenied")]


def test_the_accounts_concurrency_must_hold_all_lanes() -> None:
    """2 + 20 + 2, the notifier's 2, and the endpoints."""
    settings = {"AccountLimit": {"ConcurrentExecutions": 1000, "UnreservedConcurrentExecutions": 28}}
    assert looked(check_quota, get_account_settings=settings)[0][0] is True
    settings["AccountLimit"]["UnreservedConcurrentExecutions"] = 27
    ((ok, detail),) = looked(check_quota, get_account_settings=settings)
    assert (ok, "raise the quota" in detail) == (False, True)


def test_alarms_that_nobody_hears_are_found() -> None:
    """No subscription, one that was never confirmed, and one that was."""

    def told(*subscriptions: tuple[str, str, str]) -> list[bool | None]:
        listed = [dict(zip(("Protocol", "Endpoint", "SubscriptionArn"), each, strict=True)) for each in subscriptions]
        return [ok for ok, _ in looked(check_alarms, list_subscriptions_by_topic={"Subscriptions": listed})]

    assert told() == [False]
    assert told(("email", "a@example.com", "PendingConfirmation"), ("lambda", "arn:x:alerts", "arn:s")) == [False, True]


def test_drift_is_waited_for_and_told_by_resource() -> None:
    """What was changed by hand goes with the next deployment."""

    def drift(*states: dict[str, str]) -> tuple[bool | None, str]:
        resource = {"LogicalResourceId": "BulkQueue", "StackResourceDriftStatus": "MODIFIED"}
        at: Any = Aws(
            detect_stack_drift={"StackDriftDetectionId": "d"},
            describe_stack_drift_detection_status=list(states),
            describe_stack_resource_drifts={"StackResourceDrifts": [resource]},
        )
        (finding,) = check_drift(at, sleep=lambda _: None)
        return finding.ok, finding.detail

    under_way, done = {"DetectionStatus": "DETECTION_IN_PROGRESS"}, "DETECTION_COMPLETE"
    assert drift(under_way, {"DetectionStatus": done, "StackDriftStatus": "IN_SYNC"})[0] is True
    ok, detail = drift(under_way, under_way, {"DetectionStatus": done, "StackDriftStatus": "DRIFTED"})
    assert (ok, "BulkQueue (modified)" in detail, "takes nothing back" in detail) == (False, True, True)
    assert drift(*[under_way] * 30)[0] is None
    assert drift({"DetectionStatus": "DETECTION_FAILED", "DetectionStatusReason": "no"})[0] is None


def described(status: str, outputs: dict[str, str], **parameters: str) -> Deployment:
    """A deployment of which CloudFormation says so."""
    at = Deployment("backburner", None)  # type: ignore[arg-type]
    at.__dict__["_described"] = {
        "StackStatus": status,
        "Outputs": [{"OutputKey": key, "OutputValue": value} for key, value in outputs.items()],
        "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
    }
    at._clients = dict.fromkeys(
        ("sts", "secretsmanager", "lambda", "sns", "cloudformation", "events"),
        Aws(get_caller_identity={"Arn": "arn:aws:iam::1:user/eve"}),
    )
    return at


def test_credentials_that_have_lapsed_are_wrong_and_the_rest_is_not_tried() -> None:
    """It would all be the same."""
    expired = ClientError({"Error": {"Code": "ExpiredToken"}}, "GetCallerIdentity")
    at = described("CREATE_COMPLETE", {})
    at._clients["sts"] = SimpleNamespace(get_caller_identity=raising(expired))
    [finding] = examine(at)
    assert (finding.what, finding.ok, "ExpiredToken" in finding.detail) == ("AWS credentials", False, True)


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_each_check_is_named_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal; whoever asks for JSON is shown nothing else."""
    at = described("CREATE_COMPLETE", {"ApiUrl": "http://127.0.0.1:1", "ProviderSecretArn": "arn:secret"})
    at._clients["secretsmanager"] = Aws(get_secret_value={"SecretString": "{}"})
    named: list[str] = []
    found = examine(at, named.append)
    assert named == [
        "AWS credentials", "the stack", "the API", "the secret", "the providers", "Slack", "Lambda's quota", "alarms",
        "versions", "the repairer's schedule", "template drift",
    ]  # fmt: skip
    drawn = io.StringIO()
    monkeypatch.setattr(doctor, "notes", Console(file=drawn, force_terminal=True, width=100))
    monkeypatch.setattr(Deployment, "find", lambda *_: at)
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert ([each["what"] for each in told], drawn.getvalue()) == ([finding.what for finding in found], "")
    shown = CliRunner().invoke(app, ["doctor"])
    assert ("template drift" in shown.stdout, "Looking at template drift" in drawn.getvalue()) == (True, True)


@pytest.mark.parametrize("outputs", [{}, {"Website": "https://example.com"}])
def test_a_stack_that_is_no_deployment_is_a_finding(outputs: dict[str, str]) -> None:
    """After whose credentials these are."""
    found = examine(described("ROLLBACK_COMPLETE", outputs))
    assert [(finding.what, finding.ok) for finding in found] == [("AWS credentials", True), ("the stack", False)]
    assert "ROLLBACK_COMPLETE" in found[1].detail


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"DefaultModel": "gpt-0"}, "DefaultModel is 'gpt-0'"),
        ({"DefaultModel": "gpt-5.4-mini", "SlackModel": "gpt-0"}, "SlackModel is 'gpt-0'"),
        ({"DefaultModel": "gpt-5.4-mini", "FallbackModels": "gpt-5.4, gpt-0"}, "FallbackModels is 'gpt-0'"),
        ({"DefaultModel": "gpt-5.4-mini", "ExtraModels": "{"}, "ExtraModels of backburner is wrong: Invalid JSON"),
    ],
)
def test_models_that_the_deployment_does_not_know_are_found(parameters: dict[str, str], said: str) -> None:
    """Its callers would be refused for what they did not write."""
    found = examine(described("CREATE_COMPLETE", {"ApiUrl": "http://127.0.0.1:1"}, **parameters))
    details = [finding.detail for finding in found if finding.what == "the models"]
    assert (len(details), said in details[0]) == (1, True)
    assert len(found) > 5  # the rest is looked at all the same


def test_models_of_the_deployments_own_are_known() -> None:
    """And an empty name is none."""
    own = '{"mine": {"provider": "openai", "context_tokens": 9000, "output_tokens_max": 900}}'
    at = described("CREATE_COMPLETE", {}, ExtraModels=own, DefaultModel="mine", SlackModel="", FallbackModels="")
    assert check_models(at) == []


def test_a_schedule_that_was_switched_off_is_found_with_the_command_that_switches_it_on() -> None:
    """A deployment would not."""
    rule = {"StackResourceDetail": {"PhysicalResourceId": "bb-RepairFunctionEveryMinute-1X"}}
    seen = {"describe_stack_resource": rule}
    assert looked(check_schedule, **seen, describe_rule={"State": "ENABLED"})[0][0] is True
    ((ok, detail),) = looked(check_schedule, **seen, describe_rule={"State": "DISABLED"})
    command = "aws events enable-rule --name bb-RepairFunctionEveryMinute-1X"
    assert (ok, command in detail) == (False, True)


def test_the_schedules_name_is_the_templates() -> None:
    """The command would name nothing."""
    template = Path(MANIFEST).parents[1] / "template.yaml"
    assert re.findall(r"^  (\w+):\n    Type: AWS::Events::Rule$", template.read_text(), re.MULTILINE) == [SCHEDULE]


def versions(latest: Mapping[str, object], led: Mapping[str, object], **alias: object) -> list[tuple[bool | None, str]]:
    """What is found of one alias, by the function's configuration and that of the version it leads to."""
    resources = [
        {
            "ResourceType": "AWS::Lambda::Alias",
            "LogicalResourceId": "WorkerAlias",
            "PhysicalResourceId": "arn:aws:lambda:eu-central-1:1:function:worker:live",
        },
        {"ResourceType": "AWS::Lambda::Function", "LogicalResourceId": "Worker", "PhysicalResourceId": "worker"},
    ]
    return looked(
        check_versions,
        list_stack_resources={"StackResourceSummaries": resources},
        get_alias={"FunctionVersion": "3", **alias},
        get_function_configuration=[latest, led],
    )


def test_an_alias_that_was_left_behind_is_found() -> None:
    """A deployment that changed parameters under an old release's name changes the function, and no version."""
    before: dict[str, object] = {"CodeSha256": "a", "Version": "3", "Environment": {"Variables": {"MAX_ATTEMPTS": "3"}}}
    after = before | {"Version": "$LATEST"}
    assert [ok for ok, _ in versions(after, before)] == [True]
    for part, value in (("CodeSha256", "b"), ("Environment", {}), ("Layers", [{"Arn": "arn:shared:2"}])):
        ((ok, detail),) = versions(after | {part: value}, before)
        assert (ok, "WorkerAlias leads to version 3" in detail, "new Release" in detail) == (False, True, True)


def test_a_shift_under_way_is_neither_right_nor_wrong() -> None:
    """The new version has its share already."""
    weights = {"RoutingConfig": {"AdditionalVersionWeights": {"4": 0.1}}}
    told = "WorkerAlias is being shifted, 10% to version 4"
    assert versions({"CodeSha256": "b"}, {"CodeSha256": "a"}, **weights) == [(None, told)]


def test_slips_of_the_hand_in_the_secret_are_found_and_no_key_is_shown() -> None:
    """A name that nobody reads, a newline at the end."""
    assert [finding.ok for finding in check_secret({"openai_api_key": "sk-1"})] == [True]
    for secret, name in (({"openai_key": "sk-1"}, "openai_key"), ({"openai_api_key": "sk-1\n"}, "openai_api_key")):
        found = check_secret(secret)
        assert [finding.ok for finding in found] == [False]
        assert name in found[0].detail
        assert "sk-1" not in found[0].detail


@contextmanager
def answering(status: int, body: object) -> Iterator[str]:
    """A server that answers everything so."""

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "ok", "said"),
    [
        (200, True, "takes the key"),
        (401, False, "refuses the key"),
        (404, True, "lists no models"),
        (500, False, "500"),
    ],
)
def test_a_provider_is_asked_with_the_deployments_key(status: int, ok: bool, said: str) -> None:
    """Through the official SDKs; the key is not shown."""
    with answering(status, {"data": [], "object": "list", "has_more": False}) as url:
        secret = {"openai_api_key": "sk-secret", "anthropic_api_key": "sk-ant-secret"}
        found = check_providers(secret, {"openai": f"{url}/v1", "anthropic": url}, "openai")
    assert [(finding.what, finding.ok) for finding in found] == [("openai", ok), ("anthropic", ok)]
    assert all(said in finding.detail for finding in found)
    assert "sk-" not in "".join(finding.detail for finding in found)


def test_a_provider_without_a_key_is_wrong_only_if_the_default_model_is_its() -> None:
    """A deployment need not use both."""
    found = check_providers({}, {}, "anthropic")
    assert [(finding.what, finding.ok) for finding in found] == [("openai", None), ("anthropic", False)]


def test_a_provider_that_cannot_be_reached_is_wrong() -> None:
    """Nobody listens there."""
    secret = {"openai_api_key": "sk-1", "anthropic_api_key": "sk-2"}
    found = check_providers(secret, {"openai": "http://127.0.0.1:1/v1", "anthropic": "http://127.0.0.1:1"}, "")
    assert [finding.ok for finding in found] == [False, False]


@pytest.mark.parametrize(("status", "ok"), [(401, True), (403, False), (200, False), (502, False)])
def test_the_api_must_answer_and_not_to_everybody(status: int, ok: bool) -> None:
    """401 is what a stranger gets."""
    with answering(status, {}) as url:
        assert [finding.ok for finding in check_api(url)] == [ok]
    assert [finding.ok for finding in check_api("http://127.0.0.1:1")] == [False]
