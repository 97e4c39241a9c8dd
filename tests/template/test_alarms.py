"""SAM-05: alarms that fire. A wrong metric, statistic or dimension makes an alarm that is silent for ever."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from backburner.models import SLACK, WEBHOOK, WEBSOCKET, Lane
from backburner.observability import Metric
from tests.template.resolved import (
    ROOT,
    Edit,
    Template,
    dead_letter_queues,
    drop,
    environment,
    functions,
    mentioned,
    of_type,
    put,
    referred,
    shipped,
    source,
)

ALARM_TYPE, COMPOSITE = "AWS::CloudWatch::Alarm", "AWS::CloudWatch::CompositeAlarm"
DEPTH = "ApproximateNumberOfMessagesVisible"
AGE = "ApproximateAgeOfOldestMessage"
RUNBOOK = ROOT / "docs" / "runbook.md"
METRICS = {metric.value: metric for metric in Metric}
PROVIDERS = {"openai", "anthropic"}
STATISTICS = {
    Metric.OLDEST_WAITING: "Maximum",
    Metric.OLDEST_LETTER: "Maximum",
    Metric.FAILURE_RATE: "Average",
    Metric.CALL_FAULTS: "Average",
    Metric.CALLS_REFUSED: "Average",
    Metric.TOTAL_DURATION: "p95",
    Metric.QUEUE_WAIT: "p95",
}
"""What tells something of a gauge, of a share, of durations; the sum does of anything else."""
AWS_METRICS = {
    ("AWS/SQS", DEPTH): ("QueueName", ("Maximum",)),
    ("AWS/SQS", AGE): ("QueueName", ("Maximum",)),
    ("AWS/Lambda", "Errors"): ("FunctionName", ("Sum",)),
    ("AWS/ApiGateway", "5XXError"): ("ApiName", ("Sum", "Average")),
}
"""AWS's own metrics that alarms may watch, by which dimension, with which statistics."""
FIXED_THRESHOLDS = {
    "DeadLetterDepthAlarm": "the first letter",
    "NotificationsDeadLetterDepthAlarm": "the first letter",
    "DeadLetterAgeAlarm": "a day, of the fourteen that a letter is kept",
    "NotificationsDeadLetterAgeAlarm": "a day, as above",
    "InteractiveAgeAlarm": "follows from the longest delay of a message and the longest call",
    "StandardAgeAlarm": "as above",
    "NotificationsAgeAlarm": "follows from the longest delay of a message",
    "RepairHeartbeatAlarm": "any run",
    **{
        f"{name}ErrorsAlarm": "any crash"
        for name in ("Ingest", "Status", "Websocket", "Slack", "Worker", "Notifier", "Repair", "Alerts")
    },
}
"""Alarms whose threshold nobody needs to choose, and why."""

# ── Rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def alarms(template: Template) -> list[str]:
    """Every alarm watches a series that something emits, with a statistic that tells something of it."""
    return [
        f"{name}: {fault}" for name, body in of_type(template, ALARM_TYPE).items() for fault in _faults(template, body)
    ]


def _faults(template: Template, body: dict[str, Any]) -> list[str]:
    silent = str(body.get("ComparisonOperator")).startswith("LessThan")
    treated = "breaching" if silent else "notBreaching"
    watched = f"{_namespace(body)} {body.get('MetricName')} {_dimensions(body)}"
    statistic = body.get("Statistic") or body.get("ExtendedStatistic")
    wanted = _telling_statistics(template, body)
    checks = {
        f"nothing emits {watched}": bool(wanted),
        f"Statistic is {statistic}, which tells nothing of {watched}": not wanted or statistic in wanted,
        f"missing data must be {treated}": body.get("TreatMissingData") == treated,
        "waits for more points than it looks at": body.get("DatapointsToAlarm", 1) <= body["EvaluationPeriods"],
        "looks at more than a day": body["Period"] * body["EvaluationPeriods"] <= 86_400,
    }
    return [fault for fault, sound in checks.items() if not sound]


def _telling_statistics(template: Template, body: dict[str, Any]) -> tuple[str, ...]:
    """The statistics to watch the alarm's series with; none if there is no such series."""
    namespace, name, dimensions = _namespace(body), str(body.get("MetricName")), _dimensions(body)
    if namespace == f"Backburner/{_stack_name(template)}":
        metric = METRICS.get(name)
        return (STATISTICS.get(metric, "Sum"),) if metric and _is_emitted(template, metric, dimensions) else ()
    known = AWS_METRICS.get((namespace, name))
    if known is None or list(dimensions) != [known[0]]:
        return ()
    value, (dimension, statistics) = dimensions[known[0]], known
    exists = {
        "QueueName": referred(value, "QueueName") in of_type(template, "AWS::SQS::Queue"),
        "FunctionName": referred(value) in functions(template),
        "ApiName": value == _stack_name(template),  # as SAM titles an API
    }
    return statistics if exists[dimension] else ()


def _is_emitted(template: Template, metric: Metric, dimensions: dict[str, Any]) -> bool:
    """Whether a deployed function emits the metric with just these dimensions. What each emits is seen in
    tests/integration/test_metrics.py.
    """
    deployed = {environment(template, name)["POWERTOOLS_SERVICE_NAME"] for name in functions(template)}
    values: dict[str, set[Any]] = {
        "lane": set(Lane),
        "provider": PROVIDERS,
        "service": deployed & set(metric.functions),
        "channel": {SLACK, WEBHOOK, WEBSOCKET},
        "outcome": {"delivered", "put_off", "given_up"},
    }
    sets = {frozenset(by.split(",")) for by in metric.by} | {frozenset({"service"})}
    fits = frozenset(dimensions) in sets
    return fits and all(dimensions[name] in values.get(name, {dimensions[name]}) for name in dimensions)


def _namespace(body: dict[str, Any]) -> str:
    given = body.get("Namespace")
    return str(given["Fn::Sub"] if isinstance(given, dict) else given)


def _stack_name(template: Template) -> str:
    """As `shipped` fills it in."""
    return next(iter(of_type(template, "AWS::ApiGateway::RestApi").values()))["Body"]["info"]["title"]  # type: ignore[no-any-return]


def _dimensions(body: dict[str, Any]) -> dict[str, Any]:
    return {entry["Name"]: entry["Value"] for entry in body.get("Dimensions", [])}


def actions(template: Template) -> list[str]:
    """Every alarm tells the topic of its begin and of its end."""
    topics = of_type(template, "AWS::SNS::Topic")
    return [
        f"{name}: {kind} tells no topic of the template"
        for name, body in _all(template).items()
        for kind in ("AlarmActions", "OKActions")
        if body.get("ActionsEnabled", True) is not True
        or not body.get(kind)
        or not all(referred(action) in topics for action in body[kind])
    ]


def descriptions(template: Template) -> list[str]:
    """Every alarm says in one sentence what it means, and which heading of the runbook says what to do."""
    headings = set(re.findall(r"^## (.+)$", RUNBOOK.read_text(), re.MULTILINE))
    problems = []
    for name, body in _all(template).items():
        said = re.fullmatch(r"[A-Z][^.]+\. Runbook: ([^.]+)\.", str(body.get("AlarmDescription")))
        if not said:
            problems.append(f"{name}: not one sentence and a heading")
        elif said[1] not in headings:
            problems.append(f"{name}: the runbook has no heading {said[1]!r}")
    return problems


def _given_up_by(channel: str) -> Callable[[dict[str, Any]], bool]:
    return lambda body: _dimensions(body) == {"channel": channel, "outcome": "given_up"}


def coverage(template: Template) -> list[str]:
    """Every queue, lane, function and provider has the alarms that it needs, each on itself."""
    dead = dead_letter_queues(template)
    looked_at = {"DeadLetterQueue"}  # what was received three times has no age to SQS, and the repairer looks
    wanted: list[tuple[str, str, Callable[[dict[str, Any]], bool]]] = []
    for queue in of_type(template, "AWS::SQS::Queue"):
        seen = (DEPTH,) if queue in looked_at else (DEPTH, AGE)
        wanted += [(queue, metric, _on("QueueName", queue, "QueueName")) for metric in seen]
    wanted += [(name, "Errors", _on("FunctionName", name)) for name in functions(template)]
    for lane in Lane:
        wanted += [(lane, str(metric), _at("lane", lane)) for metric in (Metric.OLDEST_WAITING, Metric.FAILURE_RATE)]
        if lane is not Lane.BULK:  # a backlog takes as long as it takes
            wanted.append((lane, str(Metric.TOTAL_DURATION), _at("lane", lane)))
    wanted += [(name, str(Metric.CALL_FAULTS), _at("provider", name)) for name in PROVIDERS]
    wanted += [
        ("repair", str(Metric.REPAIR_RUNS), _at("service", "repair")),
        ("repair", str(Metric.OLDEST_LETTER), _at("service", "repair")),
        ("worker", str(Metric.COST), _at("service", "worker")),
        ("Api", "5XXError", lambda _: True),
    ]
    wanted += [(channel, str(Metric.DELIVERIES), _given_up_by(channel)) for channel in (WEBHOOK, SLACK)]
    known = of_type(template, ALARM_TYPE)
    problems = []
    for subject, metric, fits in wanted:
        found = {name: body for name, body in known.items() if body.get("MetricName") == metric and fits(body)}
        if not found:
            problems.append(f"{subject}: no alarm on {metric}")
        if subject in dead and metric == DEPTH and not any(_fires_at_the_first(body) for body in found.values()):
            problems.append(f"{subject}: no alarm at the first message")
    return problems


def _on(dimension: str, resource: str, attribute: str | None = None) -> Callable[[dict[str, Any]], bool]:
    return lambda body: referred(_dimensions(body).get(dimension), attribute) == resource


def _at(dimension: str, value: str) -> Callable[[dict[str, Any]], bool]:
    return lambda body: _dimensions(body).get(dimension) == value


def _fires_at_the_first(body: dict[str, Any]) -> bool:
    fires = (body.get("ComparisonOperator"), body.get("Threshold"))
    at_one = fires in (("GreaterThanOrEqualToThreshold", 1), ("GreaterThanThreshold", 0))
    return at_one and 1 in (body.get("EvaluationPeriods"), body.get("DatapointsToAlarm"))


def composites(template: Template) -> list[str]:
    """A composite alarm is made of alarms of the template, by name, and of nothing else."""
    known = of_type(template, ALARM_TYPE)
    problems = []
    for name, body in of_type(template, COMPOSITE).items():
        rule = str(body["AlarmRule"]["Fn::Sub"])
        states = re.findall(r'ALARM\("\$\{(\w+)\}"\)', rule)
        if len(states) < 2 or mentioned(body["AlarmRule"]) != set(states) or not set(states) <= known.keys():
            problems.append(f"{name}: {rule}")
        elif re.sub(r'ALARM\("[^"]+"\)|AND|OR|[()\s]', "", rule):
            problems.append(f"{name}: cannot be read: {rule}")
    return problems


def thresholds(template: Template) -> list[str]:
    """What is much or long for one deployment is not for another: thresholds are parameters."""
    return [
        f"{name}: a threshold of {body['Properties']['Threshold']} for all"
        for name, body in template["Resources"].items()
        if body["Type"] == ALARM_TYPE
        and referred(body["Properties"]["Threshold"]) not in template["Parameters"]
        and name not in FIXED_THRESHOLDS
    ]


def _all(template: Template) -> dict[str, dict[str, Any]]:
    return of_type(template, ALARM_TYPE) | of_type(template, COMPOSITE)


RULES = [alarms, actions, descriptions, coverage, composites]

# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", RULES)
def test_sam_05_the_shipped_alarms_fire(rule: Any) -> None:
    """The template as shipped keeps every rule."""
    assert rule(shipped()) == []


def test_thresholds_are_parameters() -> None:
    """But for those that follow from something else."""
    assert thresholds(source()) == []
    assert thresholds(source(put("Resources.StandardDepthAlarm.Properties.Threshold", 50))) != []
    assert source().get("Parameters", {})["DepthAlarmMessages"]["Default"] == "50"


def test_composite_alarms_are_there_unless_switched_off() -> None:
    """Both, by default."""
    assert of_type(shipped(), COMPOSITE).keys() == {"SaturatedAlarm", "ProviderTroubleAlarm"}
    assert of_type(shipped(CompositeAlarms="false"), COMPOSITE) == {}


DEAD = "Resources.DeadLetterDepthAlarm.Properties.{}".format
FAULTS = "Resources.OpenAIFaultsAlarm.Properties.{}".format
GIVEN_UP = "Resources.WebhooksGivenUpAlarm.Properties.{}".format
BEAT = "Resources.RepairHeartbeatAlarm.Properties.{}".format
SATURATED = "Resources.SaturatedAlarm.Properties.{}".format


@pytest.mark.parametrize(
    ("rule", "edit", "named"),
    [
        (alarms, put(DEAD("MetricName"), "NumberOfMessagesSent"), "nothing emits"),
        (alarms, put(DEAD("Statistic"), "Sum"), "Statistic"),
        (alarms, put(DEAD("Statistic"), "Average"), "Statistic"),
        (alarms, put(DEAD("Dimensions.0.Value"), {"Ref": "DeadLetterQueue"}), "nothing emits"),
        (alarms, put(DEAD("Dimensions.0.Name"), "Queue"), "nothing emits"),
        (alarms, put(DEAD("Namespace"), "AWS/Lambda"), "nothing emits"),
        (alarms, put(DEAD("TreatMissingData"), "breaching"), "missing data"),
        (alarms, drop(DEAD("TreatMissingData")), "missing data"),
        (alarms, put(DEAD("DatapointsToAlarm"), 4), "more points"),
        (alarms, put(FAULTS("MetricName"), "CallFault"), "nothing emits"),
        (alarms, put(FAULTS("Dimensions.0"), {"Name": "model", "Value": "gpt-5.4"}), "nothing emits"),
        (alarms, put(FAULTS("Dimensions.0.Value"), "azure"), "nothing emits"),
        (alarms, put(FAULTS("Namespace"), "Backburner"), "nothing emits"),
        (alarms, put(FAULTS("Statistic"), "Sum"), "Statistic"),
        (alarms, put(BEAT("Dimensions.0.Value"), "worker"), "nothing emits"),
        (alarms, put(BEAT("TreatMissingData"), "notBreaching"), "missing data"),
        (alarms, put("Resources.BulkOldestAlarm.Properties.Dimensions.0.Value", "slow"), "nothing emits"),
        (alarms, put("Resources.StandardDurationAlarm.Properties.ExtendedStatistic", "p50"), "Statistic"),
        (alarms, put("Resources.EndpointErrorsAlarm.Properties.Dimensions.0.Value", "Api"), "nothing emits"),
        (alarms, put("Resources.WorkerErrorsAlarm.Properties.Dimensions.0.Value", "worker"), "nothing emits"),
        (alarms, put("Resources.SpendAlarm.Properties.EvaluationPeriods", 2), "more than a day"),
        (coverage, put(DEAD("MetricName"), AGE), "DeadLetterQueue: no alarm on"),
        (coverage, drop("Resources.DeadLetterAgeAlarm"), "repair: no alarm on OldestDeadLetter"),
        (alarms, put("Resources.DeadLetterAgeAlarm.Properties.Dimensions.0.Value", "worker"), "nothing emits"),
        (coverage, put(DEAD("Dimensions.0.Value"), {"Fn::GetAtt": ["StandardQueue", "QueueName"]}), "DeadLetterQueue"),
        (coverage, put(DEAD("Threshold"), 2), "first message"),
        (coverage, put(DEAD("ComparisonOperator"), "GreaterThanThreshold"), "first message"),
        (coverage, put(DEAD("ComparisonOperator"), "LessThanThreshold"), "first message"),
        (coverage, put(DEAD("DatapointsToAlarm"), 3), "first message"),
        (coverage, drop("Resources.StandardAgeAlarm"), f"StandardQueue: no alarm on {AGE}"),
        (coverage, drop("Resources.BulkDepthAlarm"), f"BulkQueue: no alarm on {DEPTH}"),
        (coverage, drop("Resources.WorkerErrorsAlarm"), "WorkerFunction: no alarm on Errors"),
        (coverage, drop("Resources.BulkFailureAlarm"), "bulk: no alarm on FailureRate"),
        (coverage, drop("Resources.SpendAlarm"), "worker: no alarm on CostUsd"),
        (coverage, put(GIVEN_UP("Dimensions.1.Value"), "put_off"), "webhook: no alarm on Deliveries"),
        (coverage, drop("Resources.SlackGivenUpAlarm"), "slack: no alarm on Deliveries"),
        (alarms, drop(GIVEN_UP("Dimensions.1")), "nothing emits"),
        (alarms, put(GIVEN_UP("Dimensions.1.Value"), "lost"), "nothing emits"),
        (
            coverage,
            put("Resources.BulkOldestAlarm.Properties.Dimensions.0.Value", "standard"),
            "bulk: no alarm on OldestWaitingJob",
        ),
        (actions, drop(DEAD("AlarmActions")), "DeadLetterDepthAlarm"),
        (actions, put(DEAD("AlarmActions"), [{"Ref": "StandardQueue"}]), "DeadLetterDepthAlarm"),
        (actions, put(DEAD("OKActions"), []), "DeadLetterDepthAlarm"),
        (actions, put(DEAD("ActionsEnabled"), False), "DeadLetterDepthAlarm"),
        (actions, drop(SATURATED("AlarmActions")), "SaturatedAlarm"),
        (descriptions, put(DEAD("AlarmDescription"), "Dead. Runbook: Elsewhere."), "no heading 'Elsewhere'"),
        (descriptions, put(DEAD("AlarmDescription"), "Dead letters."), "not one sentence"),
        (descriptions, put(DEAD("AlarmDescription"), "One. Two. Runbook: Dead letters."), "not one sentence"),
        (composites, put(SATURATED("AlarmRule.Fn::Sub"), 'ALARM("${Gone}") AND ALARM("${BulkAgeAlarm}")'), "Saturated"),
        (composites, put(SATURATED("AlarmRule.Fn::Sub"), 'OK("${BulkAgeAlarm}")'), "Saturated"),
        (
            composites,
            put(SATURATED("AlarmRule.Fn::Sub"), 'ALARM("${BulkAgeAlarm}") NOR ALARM("${BulkDepthAlarm}")'),
            "Saturated",
        ),
    ],
)
def test_sam_05_an_alarm_that_never_fires_or_says_nothing_is_found(rule: Any, edit: Edit, named: str) -> None:
    """Each way of silencing an alarm is a problem, named."""
    assert any(named in problem for problem in rule(shipped(edit)))
