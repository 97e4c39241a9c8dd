"""`backburner doctor`: what is wrong with a deployment's set-up, found by trying it."""

from __future__ import annotations

import json
import re
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError
from slack_sdk.signature import SignatureVerifier

from cli.deployment import NO_CREDENTIALS, NO_REGION, Deployment, Profile, Region, StackName
from cli.screen import AsJson, Refused, notes, show, table
from cli.secrets import NAMES, read_secret

MANIFEST = Path(__file__).parents[1] / "docs" / "slack-manifest.yaml"
SECONDS = 15
CONCURRENT = ("Interactive", "Standard", "Bulk", "Notifier")
"""What the template's parameters <name>Concurrency limit."""
ENDPOINTS_AT_ONCE = 2
"""The endpoints need a place beside the workers."""
SIGNING_SECRET = re.compile(r"[0-9a-f]{32}")
NO_SIGNING_SECRET = (
    (re.compile(r"xoxb-.*"), "a bot token"),
    (re.compile(r"xapp-.*"), "an app-level token"),
    (re.compile(r"xox.*"), "a token"),
    (re.compile(r"[0-9]+\.[0-9]+"), "the client id"),
    (re.compile(r"[A-Za-z0-9]{24}"), "the verification token"),
)
"""What else Slack shows there, by its form. The client secret has the signing secret's own."""
LAPSED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException",
     "SignatureDoesNotMatch"}
)  # fmt: skip
"""What AWS says to credentials that are none, or none any more."""
SCHEDULE = "RepairFunctionEveryMinute"
"""The rule that calls the repairer."""
OF_A_VERSION = (
    "CodeSha256", "Environment", "Layers", "MemorySize", "Timeout", "TracingConfig", "Runtime", "Architectures",
)  # fmt: skip
"""What a version has of its function as it was when it was published."""
DRIFT_LOOKS_MAX, DRIFT_PAUSE_SECONDS = 30, 2.0


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ok: None where there was nothing to look at, or what was seen may be right or wrong."""

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
    return [*_form(signing_secret), *_endpoint(signing_secret, api_url), *_token(token, slack_url)]


def _form(signing_secret: str) -> list[Finding]:
    """Whether it looks like a signing secret: the endpoint signs with whatever it is given, as this tool does."""
    what = "the signing secret's form"
    if not signing_secret:
        return []
    if SIGNING_SECRET.fullmatch(signing_secret):
        return [Finding(what, True, "32 hex digits, as Slack's have; so has the client secret")]
    for form, name in NO_SIGNING_SECRET:
        if form.fullmatch(signing_secret):
            return [Finding(what, False, f"that is {name}; Slack shows the signing secret under Basic Information")]
    return [Finding(what, None, "unlike Slack's, which are 32 hex digits in small letters; look whether it is whole")]


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


# ── AWS's side, the providers' side ───────────────────────────────────────────────────────────────────────────────────


def check_caller(at: Deployment) -> Sequence[Finding]:
    """Whose credentials these are."""
    return [Finding("AWS credentials", True, at.client("sts").get_caller_identity()["Arn"])]


def check_models(at: Deployment) -> Sequence[Finding]:
    """The models that jobs are asked of unless they say otherwise, where the deployment does not know them."""
    what = "the models"
    try:
        catalogue = at.catalogue
    except Refused as error:
        return [Finding(what, False, str(error))]
    chosen = at.parameters
    unasked = {
        "DefaultModel": "every job that names no model is refused",
        "SlackModel": "every question in Slack is refused",
        "FallbackModels": "no job falls back to it",
    }
    known = ", ".join(catalogue.names())
    named = [(parameter, name.strip()) for parameter in unasked for name in chosen.get(parameter, "").split(",")]
    return [
        Finding(
            what,
            False,
            f"{parameter} is {name!r}, which the catalogue lacks: {unasked[parameter]}; deploy with another, or with it"
            f" in ExtraModels. There are: {known}",
        )
        for parameter, name in named
        if name and catalogue.find(name) is None
    ]


def check_schedule(at: Deployment) -> Sequence[Finding]:
    """Whether the repairer is called. A rule that was disabled by hand stays so whatever is deployed."""
    what = "the repairer's schedule"
    seen = at.client("cloudformation").describe_stack_resource(StackName=at.name, LogicalResourceId=SCHEDULE)
    rule = seen["StackResourceDetail"]["PhysicalResourceId"]
    if at.client("events").describe_rule(Name=rule)["State"].startswith("ENABLED"):
        return [Finding(what, True, "on, every minute")]
    return [Finding(what, False, f"off, so what is lost stays lost: `aws events enable-rule --name {rule}`")]


def check_secret(secret: Mapping[str, str]) -> Sequence[Finding]:
    """Whether the deployment's secret holds what it should, without a slip of the hand."""
    unknown = sorted(secret.keys() - set(NAMES))
    padded = sorted(name for name, value in secret.items() if value != value.strip())
    found = []
    if unknown:
        found.append(Finding("the secret", False, f"nobody reads {', '.join(unknown)}; there are: {', '.join(NAMES)}"))
    if padded:
        found.append(Finding("the secret", False, f"spaces around {', '.join(padded)}; set it again"))
    held = ", ".join(name for name in NAMES if secret.get(name, "").strip()) or "nothing"
    return found or [Finding("the secret", True, f"it holds {held}")]


def check_providers(secret: Mapping[str, str], urls: Mapping[str, str], needed: str) -> Sequence[Finding]:
    """Whether the providers can be reached from here with the deployment's keys.

    urls: what stands for a provider, by its name; empty for the provider itself. needed: the default model's provider.
    """
    found = []
    for name, lister in (("openai", _openai_models), ("anthropic", _anthropic_models)):
        key = secret.get(f"{name}_api_key", "").strip()
        if not key:
            detail = f"{name}_api_key is empty: jobs for its models fail; `backburner secrets set {name}_api_key`"
            found.append(Finding(name, False if name == needed else None, detail))
            continue
        try:
            lister(key, urls.get(name, ""))
        except Exception as error:  # noqa: BLE001  whatever it is, it is what was looked for
            found.append(_unreached(name, error))
        else:
            found.append(Finding(name, True, "it takes the key"))
    return found


def _openai_models(key: str, url: str) -> None:
    import openai

    openai.OpenAI(api_key=key, base_url=url or None, max_retries=0, timeout=SECONDS).models.list()


def _anthropic_models(key: str, url: str) -> None:
    import anthropic

    anthropic.Anthropic(api_key=key, base_url=url or None, max_retries=0, timeout=SECONDS).models.list()


def _unreached(name: str, error: Exception) -> Finding:
    status = getattr(error, "status_code", None)
    if status in (401, 403):
        return Finding(name, False, f"it refuses the key ({status}); `backburner secrets set {name}_api_key`")
    if status in (404, 405, 418):  # a compatible server need not list its models
        return Finding(name, True, "it can be reached, but lists no models, so the key was not tried")
    if status is not None:
        return Finding(name, False, f"it answers {status}")
    return Finding(name, False, f"it cannot be reached: {type(error).__name__}")


def check_api(api_url: str) -> Sequence[Finding]:
    """Whether the endpoint answers, and not to everybody."""
    what = "the API"
    try:
        with urllib.request.urlopen(f"{api_url}/jobs/no-such-job", timeout=SECONDS) as reply:
            return [Finding(what, False, f"it answers {reply.status} to a request without a key")]
    except urllib.error.HTTPError as error:
        return [Finding(what, error.code == 401, f"{api_url} answers {error.code} to a request without a key")]
    except OSError as error:
        return [Finding(what, False, f"{api_url} cannot be reached: {error}")]


def check_quota(at: Deployment) -> Sequence[Finding]:
    """Whether the account's concurrency holds all that the lanes may run at once."""
    limits = at.client("lambda").get_account_settings()["AccountLimit"]
    allowed = limits.get("UnreservedConcurrentExecutions", limits["ConcurrentExecutions"])
    lanes = {name: int(at.parameters.get(f"{name}Concurrency", "2")) for name in CONCURRENT}
    needed = sum(lanes.values()) + ENDPOINTS_AT_ONCE
    detail = f"{allowed} executions at once; the deployment may need {needed}"
    if needed > allowed:
        detail += ": raise the quota (Service Quotas, AWS Lambda, Concurrent executions) or lower the concurrencies"
    return [Finding("Lambda's quota", needed <= allowed, detail)]


def check_alarms(at: Deployment) -> Sequence[Finding]:
    """Whether anybody hears of alarms."""
    what = "alarms are told to"
    topic = at.outputs["AlarmTopicArn"]
    pages = at.client("sns").get_paginator("list_subscriptions_by_topic").paginate(TopicArn=topic)
    listeners = [each for page in pages for each in page["Subscriptions"]]
    if not listeners:
        return [Finding(what, False, "nobody: deploy with AlarmEmail or SlackAlertsChannel")]
    return [
        Finding(what, False, f"{each['Endpoint']} has not confirmed yet: there is a link in its mail")
        if each["SubscriptionArn"] in ("PendingConfirmation", "Deleted")
        else Finding(what, True, f"{each['Protocol']}: {each['Endpoint'].rpartition(':')[2]}")
        for each in listeners
    ]


def check_versions(at: Deployment) -> Sequence[Finding]:
    """Whether the aliases of a deployment with versions lead to what was deployed last."""
    if at.parameters.get("DeploymentPreference", "None") == "None":
        return []
    what, functions = "versions", at.client("lambda")
    pages = at.client("cloudformation").get_paginator("list_stack_resources").paginate(StackName=at.name)
    resources = [each for page in pages for each in page["StackResourceSummaries"]]
    found: list[Finding] = []
    for resource in resources:
        if resource["ResourceType"] != "AWS::Lambda::Alias":
            continue
        name, arn = resource["LogicalResourceId"], resource["PhysicalResourceId"]
        function, _, alias = arn.rpartition(":")
        leads = functions.get_alias(FunctionName=function, Name=alias)
        latest, led = (functions.get_function_configuration(FunctionName=each) for each in (function, arn))
        if weights := leads.get("RoutingConfig", {}).get("AdditionalVersionWeights"):
            shares = ", ".join(f"{share:.0%} to version {version}" for version, share in weights.items())
            found.append(Finding(what, None, f"{name} is being shifted, {shares}"))
        elif any(latest.get(part) != led.get(part) for part in OF_A_VERSION):
            told = f"{name} leads to version {leads['FunctionVersion']}, not to what was deployed last"
            found.append(Finding(what, False, f"{told}: deploy with a new Release"))
    return found or [Finding(what, True, "the aliases lead to what was deployed last")]


def check_drift(at: Deployment, sleep: Callable[[float], None] = time.sleep) -> Sequence[Finding]:
    """Whether resources were changed by hand since they were deployed."""
    what, cloudformation = "template drift", at.client("cloudformation")
    detection = cloudformation.detect_stack_drift(StackName=at.name)["StackDriftDetectionId"]
    for _ in range(DRIFT_LOOKS_MAX):
        seen = cloudformation.describe_stack_drift_detection_status(StackDriftDetectionId=detection)
        if seen["DetectionStatus"] != "DETECTION_IN_PROGRESS":
            break
        sleep(DRIFT_PAUSE_SECONDS)
    else:
        return [Finding(what, None, "CloudFormation is still looking; try again in a minute")]
    if seen["DetectionStatus"] != "DETECTION_COMPLETE":
        return [Finding(what, None, f"CloudFormation could not tell: {seen.get('DetectionStatusReason', '')}")]
    if seen["StackDriftStatus"] != "DRIFTED":
        return [Finding(what, True, "none: everything is as it was deployed")]
    drifted = cloudformation.describe_stack_resource_drifts(
        StackName=at.name, StackResourceDriftStatusFilters=["MODIFIED", "DELETED"]
    )["StackResourceDrifts"]
    names = ", ".join(f"{each['LogicalResourceId']} ({each['StackResourceDriftStatus'].lower()})" for each in drifted)
    advice = "change it back by hand, or put it into the template: a deployment without changes takes nothing back"
    return [Finding(what, False, f"changed by hand: {names}; {advice}")]


def examined(what: str, check: Callable[[], Sequence[Finding]]) -> Sequence[Finding]:
    """What a check finds; that it could not look, where AWS does not let it."""
    try:
        return check()
    except (Refused, BotoCoreError, ClientError) as error:
        return [_unseen(what, error)]


def _unseen(what: str, error: Exception) -> Finding:
    code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
    match error:
        case NoCredentialsError():
            return Finding(what, False, NO_CREDENTIALS)
        case NoRegionError():
            return Finding(what, False, NO_REGION)
        case PartialCredentialsError() | CredentialRetrievalError() | SSOError() | TokenRetrievalError():
            return Finding(what, False, f"there are no credentials to be had: {error}")
        case ClientError() if code in LAPSED:
            return Finding(what, False, f"AWS refuses the credentials ({code}); log in again")
        case Refused():
            return Finding(what, False, str(error))
    return Finding(what, None, f"cannot be looked at: {code or error}")


def examine(at: Deployment, say: Callable[[str], None] = lambda _what: None) -> list[Finding]:
    """All that can be looked at, in order; nothing more once credentials or stack are not there.

    say: told what is looked at, before it is.
    """

    def looked_at(what: str, check: Callable[[], Sequence[Finding]]) -> Sequence[Finding]:
        say(what)
        return examined(what, check)

    found = [*looked_at("AWS credentials", lambda: check_caller(at))]
    if any(finding.ok is False for finding in found):
        return found
    say("the stack")
    try:
        chosen, api_url = at.parameters, at.outputs["ApiUrl"]
    except Refused as error:
        return [*found, Finding("the stack", False, str(error))]
    models = check_models(at)
    urls = {"openai": chosen.get("OpenAIBaseUrl", ""), "anthropic": chosen.get("AnthropicBaseUrl", "")}

    def keys() -> Sequence[Finding]:
        secret = read_secret(at)
        say("the providers")
        providers = check_providers(secret, urls, _needed(at))
        say("Slack")
        slack = check_slack(secret, api_url, chosen.get("SlackApiBaseUrl", ""))
        return [*check_secret(secret), *providers, *slack]

    say("the API")
    api = check_api(api_url)

    return [
        *found,
        *models,
        *api,
        *looked_at("the secret", keys),
        *looked_at("Lambda's quota", lambda: check_quota(at)),
        *looked_at("alarms", lambda: check_alarms(at)),
        *looked_at("versions", lambda: check_versions(at)),
        *([] if at.local is not None else _by_hand(at, looked_at)),
    ]


def _needed(at: Deployment) -> str:
    """The default model's provider; empty where the model is not known."""
    try:
        model = at.catalogue.find(at.parameters.get("DefaultModel", ""))
    except Refused:
        return ""
    return "" if model is None else model.provider


def _by_hand(at: Deployment, looked_at: Callable[..., Sequence[Finding]]) -> list[Finding]:
    """What somebody may have changed since it was deployed; the local stack's emulator knows nothing of it."""
    return [
        *looked_at("the repairer's schedule", lambda: check_schedule(at)),
        *looked_at("template drift", lambda: check_drift(at)),
    ]


def _shown_at_work(at: Deployment) -> list[Finding]:
    """What is found; while it is looked for, what is looked at is shown."""
    with notes.status("") as line:
        return examine(at, lambda what: line.update(f"Looking at {what}"))


def doctor(stack: StackName = None, profile: Profile = None, region: Region = None, as_json: AsJson = False) -> None:
    """Try out how a deployment is set up, and say what is wrong. Ends with 1 if anything is.

    Looks at credentials, models, API, keys, providers, Slack, quotas, who is told of alarms, and what was changed by
    hand.
    """
    at = Deployment.find(stack, profile, region)
    findings = examine(at) if as_json else _shown_at_work(at)
    grid = table("", "!what", "")
    for finding in findings:
        grid.add_row({True: "ok", False: "WRONG", None: "-"}[finding.ok], finding.what, finding.detail)
    show(findings, grid, as_json=as_json)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)
