"""The dashboard: every widget shows something that there is, of this stack."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from backburner.observability import Metric
from tests.template.resolved import Edit, Template, functions, of_type, put, referred, source, transformed

METRICS = {metric.value: metric for metric in Metric}
OURS = "Backburner/<AWS::StackName>"
AWS_METRICS = {
    "AWS/SQS": {
        "ApproximateNumberOfMessagesVisible", "ApproximateNumberOfMessagesNotVisible",
        "ApproximateNumberOfMessagesDelayed", "ApproximateAgeOfOldestMessage",
    },
    "AWS/Lambda": {"Errors", "Throttles", "Duration", "ConcurrentExecutions", "Invocations"},
    "AWS/ApiGateway": {"5XXError", "4XXError", "Count", "Latency"},
}  # fmt: skip
"""Those that widgets may show. Source: each service's page of CloudWatch metrics."""
RESOURCES = {
    "QueueName": (r"<(\w+)\.QueueName>", "AWS::SQS::Queue"),
    "FunctionName": (r"<(\w+)>", "AWS::Lambda::Function"),
    "ApiName": (r"<(AWS::StackName)>", ""),
}
"""How AWS's dimensions name a resource of this template, never by a name of its own."""
VALUES = {"lane": {"interactive", "standard", "bulk"}, "provider": {"openai", "anthropic"}, "scope": {"all"}}
SEARCH = re.compile(r"SEARCH\('\{\"([^\"]+)\",([\w,]+)\} MetricName=\"(\w+)\"', '(\w+)', (\d+)\)")
ORDER = (
    "healthy", "deep", "old", "fast", "fails", "cost", "bottleneck", "cache", "Dead letters",
)  # fmt: skip
"""What an operator asks, in that order."""


def widgets(template: Template) -> list[dict[str, Any]]:
    """The dashboard as CloudWatch gets it; a reference stays as `<Resource>` or `<Resource.Attribute>`."""
    [body] = of_type(template, "AWS::CloudWatch::Dashboard").values()
    text, values = body["DashboardBody"]["Fn::Sub"]
    text = text.replace("${Composites}", values["Composites"]["Fn::If"][1]["Fn::Sub"])
    text = re.sub(r"(\"value\": )\$\{(\w+)\}", r'\1"<\2>"', text)
    return json.loads(re.sub(r"\$\{([^}]+)\}", r"<\1>", text))["widgets"]  # type: ignore[no-any-return]


def faults(template: Template) -> Iterator[str]:
    """What is wrong with the widgets, by title."""
    for widget in widgets(template):
        given = widget["properties"]
        title = given.get("title", "")
        if widget["type"] == "alarm":
            known = of_type(template, "AWS::CloudWatch::Alarm") | of_type(template, "AWS::CloudWatch::CompositeAlarm")
            shown = {arn.removeprefix("<").removesuffix(".Arn>") for arn in given["alarms"]}
            yield from (f"{title}: {name} is not shown, or no alarm" for name in sorted(shown ^ known.keys()))
        if widget["type"] != "metric":
            continue
        if given["region"] != "<AWS::Region>":
            yield f"{title}: of another region"
        for line in given.get("annotations", {}).get("horizontal", []):
            if not _watched_against(template, line["value"]):
                yield f"{title}: no alarm is at {line['value']}"
        ids = [entry[-1].get("id") for entry in given["metrics"] if isinstance(entry[-1], dict)]
        for entry in given["metrics"]:
            expression = entry[0].get("expression") if isinstance(entry[0], dict) else None
            problem = _series(template, entry) if expression is None else _expression(expression, ids)
            if problem:
                yield f"{title}: {problem}"


def _watched_against(template: Template, value: str) -> bool:
    """Whether an alarm has the parameter as its threshold."""
    alarms = of_type(source(), "AWS::CloudWatch::Alarm").values()
    parameter = value.removeprefix("<").removesuffix(">")
    return parameter in template["Parameters"] and any(referred(body["Threshold"]) == parameter for body in alarms)


def _series(template: Template, entry: list[Any]) -> str | None:
    namespace, name, dimension, value, _ = entry
    if namespace == OURS:
        metric = METRICS.get(name)
        if metric is None or dimension not in (*metric.by, "service"):
            return f"nothing emits {name} by {dimension}"
        allowed = set(metric.functions) if dimension == "service" else VALUES[dimension]
        return None if value in allowed else f"nothing emits {name} of {value}"
    if name not in AWS_METRICS.get(namespace, ()):
        return f"{namespace} has no {name}"
    pattern, kind = RESOURCES[dimension]
    found = re.fullmatch(pattern, value)
    resources = functions(template) if kind == "AWS::Lambda::Function" else of_type(template, kind) if kind else {}
    if not found or (kind and found[1] not in resources):
        return f"{value} is no {dimension} of this template"
    return None


def _expression(expression: str, ids: list[str | None]) -> str | None:
    search = SEARCH.fullmatch(expression)
    if search is None:
        unknown = set(re.findall(r"[a-z]\w*", expression)) - set(ids)
        return f"{expression} names {unknown}" if unknown else None
    namespace, by, name, _, _ = search.groups()
    metric = METRICS.get(name)
    return None if namespace == OURS and metric and by in metric.by else f"nothing is found by {expression}"


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_widget_shows_what_there_is() -> None:
    """Metrics that functions emit or AWS has, of this stack's resources; and all alarms."""
    assert list(faults(transformed())) == []


def test_the_dashboard_answers_in_the_order_in_which_an_operator_asks() -> None:
    """From health to dead letters; nothing overlaps."""
    found = sorted(widgets(transformed()), key=lambda widget: (widget["y"], widget["x"]))
    titles = [widget["properties"]["markdown"] for widget in found if widget["type"] == "text"]
    assert len(titles) == len(ORDER)
    assert all(word in title for word, title in zip(ORDER, titles, strict=True))
    cells = [
        (x, y) for w in found for x in range(w["x"], w["x"] + w["width"]) for y in range(w["y"], w["y"] + w["height"])
    ]
    assert len(cells) == len(set(cells))
    assert {x for x, _ in cells} == set(range(24))


def edited(old: str, new: str) -> Edit:
    """The dashboard's text with something else in it."""

    def edit(template: Template) -> None:
        body = template["Resources"]["Dashboard"]["Properties"]["DashboardBody"]
        text, values = body["Fn::Sub"]
        assert old in text
        body["Fn::Sub"] = [text.replace(old, new), values]

    return edit


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"OldestWaitingJob", "lane"', '"OldestJob", "lane"'),
        ('"OldestWaitingJob", "lane"', '"OldestWaitingJob", "model"'),
        ('"JobsCompleted", "service", "worker"', '"JobsCompleted", "service", "ingest"'),
        ("${BulkQueue.QueueName}", "bulk-queue"),
        ("${BulkQueue.QueueName}", "${BulkAgeAlarm.QueueName}"),
        ("${WorkerFunction}", "${WorkerLogs}"),
        ('"AWS/Lambda", "Errors"', '"AWS/Lambda", "Failures"'),
        ("Backburner/${AWS::StackName}", "Backburner"),
        (r"MetricName=\"CostUsd\"", r"MetricName=\"Cost\""),
        (r",channel,outcome}", r",channel}"),
        ("100 * cached / input", "100 * cached / inputs"),
        ('"${AWS::Region}"', '"eu-central-1"'),
        ('"${SpendAlarm.Arn}"', '"${BulkAgeAlarm.Arn}"'),
        ('"value": ${FailureAlarmPercent}', '"value": ${MaxAttempts}'),
        ('"${WorkerFunction}", {"label": "worker, throttled"', '"worker", {"label": "worker, throttled"'),
    ],
)
def test_a_widget_that_stays_empty_is_found(old: str, new: str) -> None:
    """A metric, dimension, resource or namespace that is not there."""
    assert list(faults(transformed(edited(old, new)))) != []


def test_an_alarm_that_the_dashboard_forgets_is_found() -> None:
    """A new alarm is to be shown with the others."""
    alarm = {"Type": "AWS::CloudWatch::Alarm", "Properties": {}}
    assert "Alarms: NewAlarm is not shown, or no alarm" in faults(transformed(put("Resources.NewAlarm", alarm)))
