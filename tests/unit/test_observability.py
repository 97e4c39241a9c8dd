"""Metrics as CloudWatch reads them from the log, and what every line of the log says."""

import json
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backburner.models import Trail
from backburner.observability import OTHER_CLIENTS, Logbook, Metric, logger
from tests.fakes.house import House

NAMESPACE = "Backburner/a-stack"
METRICS = {metric.value: metric for metric in Metric}
DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
DIMENSION_VALUES = {"lane": 3, "model": 2, "client": 1, "provider": 2, "dimension": 3, "code": 6, "kind": 6}
"""As docs/metrics.md counts: a deployment that uses two models and measures no client by name."""
DIMENSION_VALUES |= {"channel": 3, "outcome": 3, "scope": 1}
USD_A_MONTH = 0.30
"""For each of the first 10,000 custom metrics. Source: aws.amazon.com/cloudwatch/pricing, us-east-1."""

CALL: dict[str, Any] = {
    "job_id": "job_1",
    "client_id": "alice",
    "provider": "anthropic",
    "model": "claude-haiku-4-5",
    "outcome": "completed",
    "call_ms": 8_000,
    "slot_wait_ms": 250,
    "first_token_ms": 700,
    "input_tokens": 1_000,
    "output_tokens": 20,
    "cached_tokens": 750,
    "cost_micro_usd": 425,
    "limit_micros": {"requests": 600_000, "input_tokens": 1_200_000, "probes": 9},
}
END = {"job_id": "job_1", "client_id": "alice", "lane": "bulk", "total_ms": 90}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's variables."""
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", "worker")
    monkeypatch.setenv("POWERTOOLS_METRICS_NAMESPACE", NAMESPACE)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def emitted(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], float]:
    """Values by metric and by its dimensions, spelled `lane=bulk`; each metric's total is checked on the way."""
    found: dict[tuple[str, str], float] = {}
    for line in lines(capsys):
        for described in line.get("_aws", {}).get("CloudWatchMetrics", ()):
            assert described["Namespace"] == NAMESPACE
            assert ["service"] in described["Dimensions"]
            for entry in described["Metrics"]:
                metric = METRICS[entry["Name"]]
                assert entry["Unit"] == metric.unit.value
                sets = [tuple(names) for names in described["Dimensions"] if names != ["service"]]
                assert sorted(sets) == sorted(tuple(by.split(",")) for by in metric.by)
                for names in [*sets, ("service",)]:
                    by = ",".join(f"{name}={line[name]}" for name in names)
                    assert (metric, by) not in found or by == "service=worker"
                    [found[metric.value, by]] = line[metric]
    return found


def test_a_call_is_measured_by_model_client_and_provider(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens, cost, times, and how much of the provider's limits it took."""
    Logbook(frozenset({"alice"})).note("call_ended", **CALL)
    found = {key: value for key, value in emitted(capsys).items() if key[1] != "service=worker"}
    model = "model=claude-haiku-4-5"
    assert found == {
        ("Calls", model): 1,
        ("CallsRefused", model): 0,
        ("CallFaults", "provider=anthropic"): 0,
        ("CallDuration", model): 8_000,
        ("SlotWait", model): 250,
        ("TimeToFirstToken", model): 700,
        ("InputTokens", model): 1_000,
        ("InputTokens", "client=alice"): 1_000,
        ("OutputTokens", model): 20,
        ("OutputTokens", "client=alice"): 20,
        ("CachedTokens", model): 750,
        ("CostUsd", model): 0.000425,
        ("CostUsd", "client=alice"): 0.000425,
        ("LimitUsed", f"{model},dimension=requests"): 1,
        ("LimitUsed", f"{model},dimension=input_tokens"): 2,
    }


def test_a_call_without_an_answer_is_measured_by_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """No usage, no cost, and no share of a limit."""
    Logbook().note("call_ended", client_id="a", model="m-1", call_ms=5, outcome="timeout", input_tokens=None)
    assert {name for name, _ in emitted(capsys)} == {
        "Calls", "CallsRefused", "CallFaults", "CallDuration", "SlotWait",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "fault", "refused"),
    [("overloaded", 100, 0), ("authentication", 100, 0), ("rate_limited", 0, 100), ("invalid_request", 0, 0)],
)
def test_a_providers_trouble_is_told_from_a_callers(
    capsys: pytest.CaptureFixture[str], outcome: str, fault: int, refused: int
) -> None:
    """And from a refusal for the rate, which waits and costs nothing."""
    Logbook().note("call_ended", **CALL | {"outcome": outcome})
    found = emitted(capsys)
    assert found["CallFaults", "provider=anthropic"] == fault
    assert found["CallsRefused", "model=claude-haiku-4-5"] == refused


@pytest.mark.parametrize(
    ("event", "fields", "expected"),
    [
        ("job_accepted", {"lane": "bulk", "client_id": "a"}, {("JobsAccepted", "lane=bulk"): 1}),
        ("job_claimed", {"lane": "bulk", "wait_ms": 7}, {("QueueWait", "lane=bulk"): 0.007}),
        ("job_refused", {"code": "lane_full", "client_id": "a"}, {("JobsRefused", "code=lane_full"): 1}),
        (
            "job_refused",
            {"code": "budget_used_up", "client_id": "a"},
            {("JobsRefused", "code=budget_used_up"): 1, ("BudgetRefusals", "client=other"): 1},
        ),
        ("budget_nearly_used", {"client_id": "alice", "percent": 80}, {("BudgetsNearlyUsed", "client=alice"): 1}),
        (
            "job_ended",
            {**END, "status": "completed"},
            {
                ("JobsCompleted", "lane=bulk"): 1,
                ("JobsCompleted", "model=unknown"): 1,
                ("JobsCompleted", "client=alice"): 1,
                ("TotalDuration", "lane=bulk"): 0.09,
                ("FailureRate", "lane=bulk"): 0,
            },
        ),
        (
            "job_ended",
            {**END, "status": "failed", "model": "m-1", "code": "timeout", "dead": True},
            {
                ("JobsFailed", "lane=bulk"): 1,
                ("JobsFailed", "model=m-1"): 1,
                ("JobsFailed", "client=alice"): 1,
                ("JobsFailed", "code=timeout"): 1,
                ("TotalDuration", "lane=bulk"): 0.09,
                ("FailureRate", "lane=bulk"): 100,
            },
        ),
        (
            "job_ended",
            {**END, "status": "failed", "model": "m-1", "code": "content_filtered", "dead": None},
            {
                ("JobsFailed", "lane=bulk"): 1,
                ("JobsFailed", "model=m-1"): 1,
                ("JobsFailed", "client=alice"): 1,
                ("JobsFailed", "code=content_filtered"): 1,
                ("TotalDuration", "lane=bulk"): 0.09,
                ("FailureRate", "lane=bulk"): 0,
            },
        ),
        (
            "job_ended",
            {**END, "status": "cancelled"},
            {("JobsCancelled", "lane=bulk"): 1, ("JobsCancelled", "client=alice"): 1},
        ),
        (
            "job_ended",
            {**END, "status": "expired"},
            {("JobsExpired", "lane=bulk"): 1, ("JobsExpired", "client=alice"): 1},
        ),
        (
            "target_told",
            {"target": "slack", "told_ms": 90},
            {("Deliveries", "channel=slack,outcome=delivered"): 1, ("TellingDelay", "channel=slack"): 90},
        ),
        (
            "target_told",
            {"target": "websocket", "told_ms": 90},
            {("Deliveries", "channel=websocket,outcome=delivered"): 1},
        ),
        ("listeners_told", {"count": 2, "told_ms": 30}, {("TellingDelay", "channel=websocket"): 30}),
        ("target_untold", {"target": "slack", "again": True}, {("Deliveries", "channel=slack,outcome=put_off"): 1}),
        ("target_untold", {"target": "slack", "again": False}, {("Deliveries", "channel=slack,outcome=given_up"): 1}),
        ("request_faulted", {"error": "KeyError"}, {("Faults", "scope=all"): 1}),
        ("socket_faulted", {"error": "KeyError"}, {("Faults", "scope=all"): 1}),
        ("job_faulted", {"error": "KeyError"}, {("Faults", "scope=all"): 1}),
        ("telling_faulted", {"error": "KeyError"}, {("Faults", "scope=all"): 1}),
        ("job_repaired", {"kind": "hint_resent"}, {("Repairs", "kind=hint_resent"): 1}),
        ("lane_seen", {"lane": "bulk", "oldest_seconds": 2.5}, {("OldestWaitingJob", "lane=bulk"): 2.5}),
        ("letters_seen", {"oldest_seconds": 90.5}, {("OldestDeadLetter", "service=worker"): 90.5}),
        ("repair_ran", {"seen": 0}, {("RepairRuns", "service=worker"): 1}),
        (
            "limit_differs",
            {"model": "m-1", "dimension": "requests", "configured": 60, "provider_limit": 30},
            {
                ("ProviderLimit", "model=m-1,dimension=requests"): 30,
                ("ConfiguredLimit", "model=m-1,dimension=requests"): 60,
            },
        ),
        ("hint_dropped", {"job_id": "job_1"}, {}),
    ],
)
def test_an_event_is_measured(
    capsys: pytest.CaptureFixture[str],
    event: str,
    fields: dict[str, Any],
    expected: dict[tuple[str, str], float],
) -> None:
    """By the dimensions that its metrics have, and in total."""
    Logbook(frozenset({"alice"})).note(event, **fields)
    found = emitted(capsys)
    assert {key: found.get(key) for key in expected} == expected
    assert {name for name, _ in found} == {name for name, _ in expected}


def test_lines_name_the_release_that_has_a_name(caplog: pytest.LogCaptureFixture) -> None:
    """While traffic is shifted, two of them write into one log."""
    Logbook(release="v2").note("hint_dropped", job_id="job_1")
    Logbook().note("hint_dropped", job_id="job_2")
    told = {record.__dict__["job_id"]: record.__dict__.get("release") for record in caplog.records}
    assert told == {"job_1": "v2", "job_2": None}


def test_clients_that_are_not_measured_share_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    """However many there are, they cost no more."""
    for number in range(50):
        Logbook(frozenset({"alice"})).note("job_accepted", lane="bulk", client_id=f"client-{number}")
    names = {line["client"] for line in lines(capsys) if "_aws" in line}
    assert names == {OTHER_CLIENTS}


def test_what_the_metrics_cost_is_written_down_as_it_is() -> None:
    """A metric more, or a dimension, is a line of the bill."""
    series = 0
    text = DOCUMENT.read_text()
    for metric in Metric:
        counts = [len(metric.functions)]
        for by in metric.by:
            values = 1
            for name in by.split(","):
                values *= DIMENSION_VALUES[name]
            counts.append(values)
        series += sum(counts)
        row = rf"\| `{metric}` \| {metric.unit.value} \| {', '.join(metric.functions)} \| "
        row += rf"{re.escape('; '.join(by.replace(',', ' and ') for by in metric.by) or '–')} \| {sum(counts)} \|"
        assert re.search(row, text), f"docs/metrics.md has no row {row}"
    assert f"**{series}**" in text
    assert f"${series * USD_A_MONTH:.0f} a month" in text


# ── Lines of the log ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def _logger_of_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that writes to the standard output of now."""
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", f"worker-{uuid.uuid4().hex}")
    logger.cache_clear()
    yield
    logger.cache_clear()


@pytest.mark.usefixtures("_logger_of_this_test")
def test_what_a_thread_notes_about_a_job_names_it_and_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Job, attempt and correlation id are in each line within the block, of this thread only."""
    book = Logbook()

    def elsewhere() -> None:
        book.note("lease_unrenewed")

    with book.about(job_id="job_1", attempt=2), book.about(correlation_id="req-1"):
        book.note("call_ended", **CALL | {"job_id": "job_1"})
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    book.note("repair_ran")
    said = {line["message"]: line for line in lines(capsys) if "message" in line}
    assert {said["call_ended"][name] for name in ("job_id", "attempt", "correlation_id")} == {"job_1", 2, "req-1"}
    assert "job_id" not in said["lease_unrenewed"]
    assert "correlation_id" not in said["repair_ran"]


def test_a_jobs_whole_road_is_noted_with_its_requests_id() -> None:
    """Accepted, claimed, called, ended, told: whoever has the id of the request finds them all."""
    house = House()
    trail = Trail("req-1", "Root=1-5759e988-bd862e3fe1be46a994272793;Sampled=1")
    job = house.accept(webhook={"url": "https://hooks.example.com/x", "secret": f"whsec_{'YWFh' * 8}"}, trail=trail)
    assert [sent.trace for sent in house.hints.sent] == [trail.trace]
    house.work()
    house.tell()
    about = {"job_id": job.job_id, "attempt": 1, "correlation_id": "req-1"}
    assert house.journal.named("job_accepted")[0].items() >= {**about, "attempt": 0}.items()
    assert house.journal.named("job_claimed")[0].items() >= about.items()
    assert house.journal.subjects == [about, about]  # the worker's, within which it calls and ends; the notifier's
    assert house.notices.traces == [trail.trace]


def test_the_runbooks_queries_ask_for_fields_that_lines_have() -> None:
    """By the names that the log has; Logs Insights shows nothing of others, and no error."""
    runbook = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text()
    queries = re.findall(r"^insights 'filter message = \"(\w+)\" \| stats (.+)'$", runbook, re.MULTILINE)
    known = {"call_ended": CALL, "job_ended": {**END, "status": "failed", "model": "m-1", "code": "timeout"}}
    assert {event for event, _ in queries} == known.keys()
    for event, stats in queries:
        asked = set(re.findall(r"[a-z_]+", stats)) - {"count", "sum", "pct", "by", "e"}
        assert asked <= known[event].keys(), f"{event} has no {asked - known[event].keys()}"
