"""What functions read from their environment."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from backburner.settings import (
    EndpointSettings,
    NotifierSettings,
    RepairSettings,
    Settings,
    StatusSettings,
    WebsocketSettings,
    WorkerSettings,
)

COMMON = {
    "JOBS_TABLE": "jobs",
    "LIMITS_TABLE": "limits",
    "PAYLOADS_BUCKET": "payloads",
    "INTERACTIVE_QUEUE_URL": "https://sqs.test/interactive",
    "STANDARD_QUEUE_URL": "https://sqs.test/standard",
    "NOTIFICATIONS_QUEUE_URL": "https://sqs.test/notifications",
    "BULK_QUEUE_URL": "https://sqs.test/bulk",
    "DEAD_LETTER_QUEUE_URL": "https://sqs.test/dead",
    "RETENTION_DAYS": "14",
    "MAX_ATTEMPTS": "3",
    "ON_UNKNOWN_OUTCOME": "retry",
}
ENDPOINT = COMMON | {
    "CLIENTS_TABLE": "clients",
    "LANE_DEPTH_MAX": "10000",
    "DEFAULT_MODEL": "m-1",
    "DEFAULT_MAX_TOKENS": "1024",
    "DEFAULT_DEADLINE_SECONDS": "86400",
}
SOCKETS = {"CONNECTIONS_TABLE": "connections", "SOCKETS_URL": "https://sockets.test/api"}
STATUS = {
    **ENDPOINT,
    **SOCKETS,
    "LONG_POLL_SECONDS": "20",
    "INTERACTIVE_CONCURRENCY": "2",
    "STANDARD_CONCURRENCY": "3",
    "BULK_CONCURRENCY": "2",
}
WORKER = {
    **COMMON,
    **SOCKETS,
    "PROVIDER_SECRET_ARN": "arn:x",
    "DEFAULT_MODEL": "m-1",
    "DEFAULT_MAX_TOKENS": "1024",
    "CALL_TIMEOUT_SECONDS": "240",
}
WEBHOOKS = {"CLIENTS_TABLE": "clients", "WEBHOOK_KEY_SECRET_ARN": "arn:webhook-key", "WEBHOOK_PORTS": "443,8443"}
ALL: list[tuple[type[Settings], dict[str, str]]] = [
    (EndpointSettings, ENDPOINT),
    (StatusSettings, STATUS),
    (WebsocketSettings, ENDPOINT | SOCKETS),
    (WorkerSettings, WORKER),
    (NotifierSettings, COMMON | SOCKETS | WEBHOOKS | {"PROVIDER_SECRET_ARN": "arn:x"}),
    (RepairSettings, COMMON),
]


@pytest.mark.parametrize(("kind", "environment"), ALL)
def test_settings_are_read_from_variables_of_their_names(kind: type[Settings], environment: dict[str, str]) -> None:
    """Numbers as numbers; what else is in the environment is nobody's business."""
    settings = kind.from_environment(environment | {"PATH": "/bin", "AWS_REGION": "x", "EXTRA": "1"})
    for name, value in environment.items():
        assert str(getattr(settings, name.lower())) == value
    assert isinstance(settings.model_dump()["max_attempts"], int)


@pytest.mark.parametrize(
    ("kind", "environment", "missing"),
    [(kind, environment, name) for kind, environment in ALL for name in environment],
)
@pytest.mark.parametrize("empty", [True, False], ids=["empty", "absent"])
def test_a_missing_variable_is_named_when_the_function_starts(
    kind: type[Settings], environment: dict[str, str], missing: str, empty: bool
) -> None:
    """CloudFormation passes an empty parameter on as an empty text, which is as good as none."""
    changed = environment | {missing: ""} if empty else {k: v for k, v in environment.items() if k != missing}
    with pytest.raises(ValidationError, match=missing.lower()):
        kind.from_environment(changed)


def test_what_has_a_default_may_be_empty() -> None:
    """The providers' own addresses, the shipped catalogue."""
    settings = WorkerSettings.from_environment(WORKER | {"OPENAI_BASE_URL": "", "EXTRA_MODELS": ""})
    assert (settings.openai_base_url, settings.anthropic_base_url, settings.extra_models) == ("", "", "")
    assert EndpointSettings.from_environment(ENDPOINT).extra_models == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RETENTION_DAYS", "0"),
        ("RETENTION_DAYS", "366"),
        ("MAX_ATTEMPTS", "0"),
        ("MAX_ATTEMPTS", "11"),
        ("MAX_ATTEMPTS", "three"),
        ("DEFAULT_MAX_TOKENS", "0"),
        ("DEFAULT_MAX_TOKENS", "1.5"),
        ("CALL_TIMEOUT_SECONDS", "4"),
        ("CALL_TIMEOUT_SECONDS", "841"),
    ],
)
def test_a_value_out_of_its_range_is_refused_when_the_function_starts(name: str, value: str) -> None:
    """Not when the first job meets it."""
    with pytest.raises(ValidationError, match=name.lower()):
        WorkerSettings.from_environment(WORKER | {name: value})
