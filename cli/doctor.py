"""`backburner doctor`: what is wrong with a deployment's set-up, found by trying it."""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml
from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError
from slack_sdk.signature import SignatureVerifier

from cli.deployment import Deployment, Profile, StackName
from cli.screen import AsJson, show, table
from cli.secrets import read_secret

MANIFEST = Path(__file__).parents[1] / "docs" / "slack-manifest.yaml"
SECONDS = 15


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ok: None where there was nothing to look at."""

    what: str
    ok: bool | None
    detail: str


def manifest_scopes() -> frozenset[str]:
    """The scopes that the app needs, as docs/slack-manifest.yaml asks for them."""
    manifest = yaml.safe_load(MANIFEST.read_text())
    return frozenset(manifest["oauth_config"]["scopes"]["bot"])


def check_slack(secret: Mapping[str, str], api_url: str, slack_url: str = "") -> Sequence[Finding]:
    """Slack's side: signing secret, endpoint, token and scopes.

    secret: the deployment's. slack_url: what stands for Slack's Web API, with its /api/; empty for Slack itself.
    """
    signing_secret, token = secret.get("slack_signing_secret", "").strip(), secret.get("slack_bot_token", "").strip()
    if not signing_secret and not token:
        return [Finding("Slack", None, "not set up: the secret has neither slack_signing_secret nor slack_bot_token")]
    return [*_endpoint(signing_secret, api_url), *_token(token, slack_url)]


def _endpoint(signing_secret: str, api_url: str) -> list[Finding]:
    """Whether the deployed endpoint takes what is signed with the secret."""
    what = "Slack's signing secret"
    if not signing_secret:
        return [Finding(what, False, "slack_signing_secret is empty; Slack shows it under Basic Information")]
    challenge, stamp = secrets.token_hex(8), str(int(time.time()))
    body = json.dumps({"type": "url_verification", "challenge": challenge})
    signature = SignatureVerifier(signing_secret).generate_signature(timestamp=stamp, body=body) or ""
    request = urllib.request.Request(
        f"{api_url}/slack/events",
        data=body.encode(),
        headers={
            "Content-Type": "application/json",
            "X-Slack-Request-Timestamp": stamp,
            "X-Slack-Signature": signature,
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            answered = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return [Finding(what, False, f"the endpoint answers {error.code} to a request signed with it")]
    except (OSError, ValueError) as error:
        return [Finding(what, False, f"the endpoint cannot be reached: {error}")]
    if answered != {"challenge": challenge}:
        return [Finding(what, False, "the endpoint answers, but not what it was asked")]
    return [Finding(what, True, f"{request.full_url} takes what is signed with it")]


def _token(token: str, slack_url: str) -> list[Finding]:
    """Whose token it is, and what it may do."""
    what = "Slack's bot token"
    if not token:
        return [Finding(what, False, "slack_bot_token is empty; Slack shows it under Install App")]
    web = WebClient(token, base_url=slack_url or WebClient.BASE_URL, timeout=SECONDS, retry_handlers=[])
    try:
        reply = web.auth_test()
    except SlackApiError as error:
        return [Finding(what, False, f"Slack refuses it: {error.response.get('error')}")]
    except Exception as error:  # noqa: BLE001  whatever it is, it is what was looked for
        return [Finding(what, False, f"Slack cannot be reached: {type(error).__name__}")]
    found = [Finding(what, True, f"of {reply.get('user')} in {reply.get('team')}")]
    headers: Mapping[str, Any] = {name.lower(): value for name, value in reply.headers.items()}
    has = {scope.strip() for scope in str(headers.get("x-oauth-scopes", "")).split(",") if scope.strip()}
    missing, more = sorted(manifest_scopes() - has), sorted(has - manifest_scopes())
    if missing:
        detail = f"missing: {', '.join(missing)}; add them to the app and install it again"
    else:
        detail = "as docs/slack-manifest.yaml has them" + (f", and more: {', '.join(more)}" if more else "")
    return [*found, Finding("Slack's scopes", not missing, detail)]


def doctor(stack: StackName = None, profile: Profile = None, as_json: AsJson = False) -> None:
    """Try out how a deployment is set up, and say what is wrong. Ends with 1 if anything is."""
    at = Deployment.find(stack, profile)
    findings = check_slack(read_secret(at), at.outputs["ApiUrl"], at.parameters.get("SlackApiBaseUrl", ""))
    grid = table("", "what", "")
    for finding in findings:
        grid.add_row({True: "ok", False: "WRONG", None: "-"}[finding.ok], finding.what, finding.detail)
    show(findings, grid, as_json=as_json)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)
