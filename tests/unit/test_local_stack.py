"""What the environment tells the local stack reaches the template's parameters and the secret."""

from __future__ import annotations

import pytest

from local import template
from local.stack import _parameters, providers_from_environment


def test_what_is_given_for_slack_gets_to_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and switches are parameters that the template knows, secrets go into the secret."""
    for name in ("API_BASE_URL", "ALERTS_CHANNEL", "SIGNING_SECRET", "BOT_TOKEN"):
        monkeypatch.setenv(f"SLACK_{name}", name.lower())
    monkeypatch.setenv("SLACK_STREAMING", "true")
    providers = providers_from_environment()
    parameters = _parameters(providers, 1)
    assert parameters.keys() <= template.parameter_defaults().keys()
    given = {name: value for name, value in parameters.items() if name.startswith("Slack")}
    assert given == {
        "SlackApiBaseUrl": "api_base_url", "SlackAlertsChannel": "alerts_channel", "SlackStreaming": "true",
    }  # fmt: skip
    assert providers.secret["slack_signing_secret"] == "signing_secret"
    assert providers.secret["slack_bot_token"] == "bot_token"


def test_what_is_not_given_is_as_the_template_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that was given for the last deployment does not stay."""
    for name in ("API_BASE_URL", "ALERTS_CHANNEL", "SIGNING_SECRET", "BOT_TOKEN", "STREAMING"):
        monkeypatch.delenv(f"SLACK_{name}", raising=False)
    defaults = template.parameter_defaults()
    parameters = _parameters(providers_from_environment(), 1)
    slack = [name for name in parameters if name.startswith("Slack")]
    assert {name: parameters[name] for name in slack} == {name: defaults[name] for name in slack}
