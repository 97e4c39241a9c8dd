"""Metrics of provider calls, as CloudWatch reads them from the log."""

import json
from typing import Any

import pytest

from backburner.observability import NAMESPACE, Logbook, Metric

CALL: dict[str, Any] = {
    "job_id": "job_1",
    "client_id": "alice",
    "model": "claude-haiku-4-5",
    "call_ms": 8_000,
    "slot_wait_ms": 250,
    "first_token_ms": 700,
    "input_tokens": 1_000,
    "output_tokens": 20,
    "cached_tokens": 750,
    "cost_micro_usd": 425,
}

LIMITS = {Metric.PROVIDER_LIMIT, Metric.CONFIGURED_LIMIT}
BUDGETS = {Metric.BUDGETS_NEARLY_USED, Metric.BUDGET_REFUSALS}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's variables."""
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", "worker")


def emitted(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The lines in embedded metric format."""
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return [line for line in lines if "_aws" in line]


@pytest.mark.usefixtures("service")
def test_a_call_is_measured_by_model_and_by_client(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens, cost, times and the share of the input that came from the provider's cache."""
    Logbook().note("call_ended", **CALL)
    [line] = emitted(capsys)
    [described] = line["_aws"]["CloudWatchMetrics"]
    assert described["Namespace"] == NAMESPACE
    assert any("model" in dimensions for dimensions in described["Dimensions"])
    assert any("client" in dimensions for dimensions in described["Dimensions"])
    assert {entry["Name"] for entry in described["Metrics"]} == set(Metric) - LIMITS - BUDGETS
    assert line[Metric.SLOT_WAIT] == [250.0]
    assert line[Metric.CACHE_HIT_RATIO] == [75.0]
    assert line[Metric.COST] == [425.0]
    assert (line["model"], line["client"], line["job_id"]) == ("claude-haiku-4-5", "alice", "job_1")


@pytest.mark.usefixtures("service")
def test_a_call_without_an_answer_is_counted_with_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """No usage, no cost, no ratio."""
    Logbook().note("call_ended", job_id="job_1", client_id="alice", model="m-1", call_ms=5, input_tokens=None)
    [line] = emitted(capsys)
    assert {entry["Name"] for entry in line["_aws"]["CloudWatchMetrics"][0]["Metrics"]} == {
        "Calls",
        "CallDuration",
        "SlotWait",
    }


@pytest.mark.usefixtures("service")
def test_a_limit_that_differs_from_the_providers_word_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Both figures, by model and dimension."""
    noted = {"model": "m-1", "dimension": "requests", "configured": 60, "provider_limit": 30}
    Logbook().note("limit_differs", **noted)
    [line] = emitted(capsys)
    [described] = line["_aws"]["CloudWatchMetrics"]
    assert {entry["Name"] for entry in described["Metrics"]} == LIMITS
    assert described["Dimensions"] == [["model", "dimension", "service"]]
    assert (line[Metric.PROVIDER_LIMIT], line[Metric.CONFIGURED_LIMIT]) == ([30.0], [60.0])


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize(
    ("event", "metric"),
    [("budget_nearly_used", Metric.BUDGETS_NEARLY_USED), ("budget_used_up", Metric.BUDGET_REFUSALS)],
)
def test_a_budget_near_its_end_is_counted_by_client(
    capsys: pytest.CaptureFixture[str], event: str, metric: Metric
) -> None:
    """At four fifths once, and then each request that is refused for it."""
    Logbook().note(event, client_id="alice", percent=80)
    [line] = emitted(capsys)
    [described] = line["_aws"]["CloudWatchMetrics"]
    assert described["Namespace"] == NAMESPACE
    assert ["client"] in described["Dimensions"]
    assert [entry["Name"] for entry in described["Metrics"]] == [metric]
    assert (line[metric], line["client"]) == ([1.0], "alice")


@pytest.mark.usefixtures("service")
def test_other_events_are_no_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    """They are log lines only."""
    Logbook().note("job_accepted", job_id="job_1")
    assert emitted(capsys) == []
