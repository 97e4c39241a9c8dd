"""Parameters that do not fit together are refused before anything is deployed, in words that say what to do."""

import json
import re

import pytest

from tests.template.resolved import ROOT, drop, parameter_extremes, put, refusals, shipped, source
from tests.template.test_interface import samconfig

EXTRA = json.dumps({"llama-3": {"provider": "openai"}})
BAD = {
    "BackgroundCallsNeedOpenAI": {"BackgroundCalls": "true", "OpenAIBaseUrl": "https://llm.example.com/v1"},
    "RunbookUrlNeedsSlackAlerts": {"RunbookUrl": "https://wiki.example.com/runbook"},
    "LoopbackWebhooksAreLocal": {"WebhookAllowLoopback": "true", "AlarmEmail": "ops@example.com"},
    "DefaultModelIsKnown": {"DefaultModel": "llama-3"},
    "SlackModelIsKnown": {"SlackModel": "llama-3"},
    "VersionsHaveReleases": {"DeploymentPreference": "AllAtOnce"},
    "SnapStartNeedsVersions": {"SnapStart": "PublishedVersions"},
}
"""A combination for each rule that only that rule refuses."""
GOOD = [
    {"BackgroundCalls": "true"},
    {"OpenAIBaseUrl": "https://llm.example.com/v1"},
    {"RunbookUrl": "https://wiki.example.com/runbook", "SlackAlertsChannel": "C0000OPS1"},
    {"WebhookAllowLoopback": "true"},
    {"AlarmEmail": "ops@example.com"},
    {"DefaultModel": "llama-3", "SlackModel": "llama-3", "ExtraModels": EXTRA},
    {"SlackModel": "claude-haiku-5-5"},
    {"DeploymentPreference": "Canary10Percent10Minutes", "Release": "v1.2.3-4-g5e6f7a8"},
    {"Release": "v1.2.3"},
    {"SnapStart": "PublishedVersions", "DeploymentPreference": "AllAtOnce", "Release": "v1.2.3"},
]


@pytest.mark.parametrize("rule", BAD)
def test_a_bad_combination_is_refused_with_what_to_do(rule: str) -> None:
    """By its rule alone; without the rule it would deploy."""
    [said] = refusals(shipped(**BAD[rule]))
    assert any(name in said for name in BAD[rule])
    assert re.search(r"[Ll]eave|[Gg]ive|must not", said)
    assert refusals(shipped(drop(f"Rules.{rule}"), **BAD[rule])) == []


def test_every_rule_is_tried() -> None:
    """None is there that nobody has seen refuse something."""
    assert source()["Rules"].keys() == BAD.keys()


@pytest.mark.parametrize("parameters", GOOD, ids=str)
def test_a_good_combination_is_not_refused(parameters: dict[str, str]) -> None:
    """A rule that refuses too much is worse than none."""
    assert refusals(shipped(**parameters)) == []


@pytest.mark.parametrize("environment", ["default", "prod", "local"])
def test_no_environment_of_samconfig_is_refused(environment: str) -> None:
    """As they are shipped."""
    words = samconfig().get(environment, {}).get("deploy", {}).get("parameters", {}).get("parameter_overrides", [])
    parameters = dict(word.split("=", 1) for word in words)
    assert refusals(shipped(**parameters | ({"ExtraModels": EXTRA} if environment == "local" else {}))) == []


def test_the_rules_know_the_catalogue() -> None:
    """No model that is shipped is refused, and none that is not gets through."""
    catalogue = json.loads((ROOT / "layers" / "shared" / "backburner" / "catalogue.json").read_text())
    [assertion] = source()["Rules"]["DefaultModelIsKnown"]["Assertions"]
    assert assertion["Assert"]["Fn::Contains"][0] == list(catalogue["models"])


ADDRESSES = ("OpenAIBaseUrl", "AnthropicBaseUrl", "RunbookUrl", "AlarmEmail")


@pytest.mark.parametrize("name", ADDRESSES)
def test_an_address_that_is_none_is_refused(name: str) -> None:
    """Before a worker, or an alarm, finds out."""
    parameter = source()["Parameters"][name]
    good = "ops@example.com" if name == "AlarmEmail" else "http://127.0.0.1:8080/v1"
    for text, accepted in (
        ("", True),
        (good, True),
        ("example", False),
        (f"{good} ", False),
        ("ftp://x.example", False),
    ):
        assert bool(re.fullmatch(parameter["AllowedPattern"], text)) is accepted, text
    assert parameter["ConstraintDescription"].endswith("or empty.")


def test_a_single_parameter_at_its_edge_is_refused_only_for_good_reason() -> None:
    """Rules are about combinations; only versions need a release's name, and SnapStart versions."""
    refused = [parameters for parameters in parameter_extremes(source()) if refusals(shipped(**parameters))]
    assert all(parameters.keys() <= {"DeploymentPreference", "SnapStart"} for parameters in refused)
    assert "None" not in {value for parameters in refused for value in parameters.values()}
    assert refusals(shipped(put("Parameters.RunbookUrl.Default", "https://wiki.example.com"))) != []
