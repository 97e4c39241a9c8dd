"""`backburner doctor` finds what is wrong with Slack's set-up by trying it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from cli.clients import create_client
from cli.doctor import MANIFEST, Finding, check_slack, manifest_scopes
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
    """Secret, token and scopes."""
    found = check_slack(SECRET, api_url, slack.base_url)
    assert [finding.ok for finding in found] == [True, True, True]


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
