"""SAM-05: alarms that fire. A wrong metric, statistic or dimension makes an alarm that is silent for ever."""

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import pytest

from backburner.models import SLACK, WEBHOOK, WEBSOCKET, Lane
from backburner.observability import Metric
from tests.template.resolved import (
    PSEUDO_PARAMETERS,
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
FUNCTIONS = ("Ingest", "Status", "Websocket", "Slack", "Worker", "Notifier", "Repair", "Alerts")
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
    "FaultsAlarm": "any fault of our own code",
    "DeadLetterDepthAlarm": "the first letter",
    "NotificationsDeadLetterDepthAlarm": "the first letter",
    "DeadLetterAgeAlarm": "a day, of the fourteen that a letter is kept",
    "NotificationsDeadLetterAgeAlarm": "a day, as above",
    "InteractiveAgeAlarm": "follows from the longest delay of a message and the longest call",
    "StandardAgeAlarm": "as above",
    "NotificationsAgeAlarm": "follows from the longest delay of a message",
    "RepairHeartbeatAlarm": "any run",
    **{f"{name}ErrorsAlarm": "any crash" for name in FUNCTIONS},
}
"""Alarms whose threshold nobody needs to choose, and why."""


class Watch(NamedTuple):
    """What an alarm watches, when it fires, and for how long that must last, in words."""

    statistic: str
    metric: str
    of: str
    """Values of the dimensions: a lane, provider or service, or a resource's logical id."""
    fires: str
    """The comparison with a number, or with a parameter."""
    held: str
    """Points that must fire, of how many that are looked at, each of how many seconds."""


WATCHES: dict[str, Watch] = {
    # A lane: more than so many could start, or one waits longer than so many seconds, for two minutes.
    "InteractiveDepthAlarm": Watch("Maximum", DEPTH, "InteractiveQueue", "> DepthAlarmMessages", "2 of 2 x 60 s"),
    "StandardDepthAlarm": Watch("Maximum", DEPTH, "StandardQueue", "> DepthAlarmMessages", "2 of 2 x 60 s"),
    "BulkDepthAlarm": Watch("Maximum", DEPTH, "BulkQueue", "> BulkDepthAlarmMessages", "2 of 2 x 60 s"),
    "InteractiveOldestAlarm":
        Watch("Maximum", Metric.OLDEST_WAITING, "interactive", "> InteractiveAgeAlarmSeconds", "2 of 2 x 60 s"),
    "StandardOldestAlarm": Watch("Maximum", Metric.OLDEST_WAITING, "standard", "> AgeAlarmSeconds", "2 of 2 x 60 s"),
    "BulkOldestAlarm": Watch("Maximum", Metric.OLDEST_WAITING, "bulk", "> BulkAgeAlarmSeconds", "2 of 2 x 60 s"),
    "InteractiveAgeAlarm": Watch("Maximum", AGE, "InteractiveQueue", "> 3600", "2 of 2 x 60 s"),
    "StandardAgeAlarm": Watch("Maximum", AGE, "StandardQueue", "> 3600", "2 of 2 x 60 s"),
    "BulkAgeAlarm": Watch("Maximum", AGE, "BulkQueue", "> BulkAgeAlarmSeconds", "2 of 2 x 60 s"),
    # Its jobs: too many fail or take too long, for ten of fifteen minutes. A backlog takes as long as it takes.
    **{
        f"{lane.title()}FailureAlarm":
            Watch("Average", Metric.FAILURE_RATE, lane, "> FailureAlarmPercent", "2 of 3 x 300 s")
        for lane in Lane
    },
    "InteractiveDurationAlarm":
        Watch("p95", Metric.TOTAL_DURATION, "interactive", "> InteractiveDurationAlarmSeconds", "2 of 3 x 300 s"),
    "StandardDurationAlarm":
        Watch("p95", Metric.TOTAL_DURATION, "standard", "> DurationAlarmSeconds", "2 of 3 x 300 s"),
    # Dead letters: the first one, at once, and one of a day. That of jobs lasts over looks that see a part or none.
    "DeadLetterDepthAlarm": Watch("Maximum", DEPTH, "DeadLetterQueue", ">= 1", "1 of 3 x 60 s"),
    "DeadLetterAgeAlarm": Watch("Maximum", Metric.OLDEST_LETTER, "repair", "> 86400", "1 of 6 x 300 s"),
    "NotificationsDeadLetterDepthAlarm":
        Watch("Maximum", DEPTH, "NotificationsDeadLetterQueue", ">= 1", "1 of 1 x 60 s"),
    "NotificationsDeadLetterAgeAlarm":
        Watch("Maximum", AGE, "NotificationsDeadLetterQueue", "> 86400", "1 of 1 x 300 s"),
    # Telling: as a lane, and what is given up within an hour.
    "NotificationsDepthAlarm": Watch("Maximum", DEPTH, "NotificationsQueue", "> DepthAlarmMessages", "2 of 2 x 60 s"),
    "NotificationsAgeAlarm": Watch("Maximum", AGE, "NotificationsQueue", "> 1800", "2 of 2 x 60 s"),
    "WebhooksGivenUpAlarm":
        Watch("Sum", Metric.DELIVERIES, "webhook given_up", "> GivenUpAlarmWebhooks", "1 of 1 x 3600 s"),
    "SlackGivenUpAlarm": Watch("Sum", Metric.DELIVERIES, "slack given_up", "> GivenUpAlarmSlack", "1 of 1 x 3600 s"),
    # What runs: the API, for two of five or ten of fifteen minutes; any function's crash, twice in three; the repairer.
    "EndpointErrorsAlarm": Watch("Sum", "5XXError", "AWS::StackName", "> EndpointErrorsAlarmCount", "2 of 5 x 60 s"),
    "EndpointErrorRateAlarm":
        Watch("Average", "5XXError", "AWS::StackName", "> EndpointErrorsAlarmPart", "2 of 3 x 300 s"),
    **{f"{name}ErrorsAlarm": Watch("Sum", "Errors", f"{name}Function", "> 0", "2 of 3 x 60 s") for name in FUNCTIONS},
    "FaultsAlarm": Watch("Sum", Metric.FAULTS, "all", "> 0", "1 of 1 x 60 s"),
    "RepairHeartbeatAlarm": Watch("Sum", Metric.REPAIR_RUNS, "repair", "< 1", "5 of 5 x 60 s"),
    # Providers: calls fail for ten minutes; and what a day costs.
    **{
        f"{name}FaultsAlarm":
            Watch("Average", Metric.CALL_FAULTS, name.lower(), "> ProviderFaultsAlarmPercent", "2 of 2 x 300 s")
        for name in ("OpenAI", "Anthropic")
    },
    "SpendAlarm": Watch("Sum", Metric.COST, "worker", "> SpendAlarmUsd", "1 of 1 x 86400 s"),
}  # fmt: skip
"""What each alarm is there for."""
DEFAULTS = {
    "DepthAlarmMessages": "50",
    "BulkDepthAlarmMessages": "5000",
    "InteractiveAgeAlarmSeconds": "60",
    "AgeAlarmSeconds": "600",
    "BulkAgeAlarmSeconds": "21600",
    "FailureAlarmPercent": "10",
    "InteractiveDurationAlarmSeconds": "60",
    "DurationAlarmSeconds": "900",
    "EndpointErrorsAlarmCount": "5",
    "EndpointErrorsAlarmPart": "0.2",
    "ProviderFaultsAlarmPercent": "50",
    "SpendAlarmUsd": "100",
    "GivenUpAlarmWebhooks": "10",
    "GivenUpAlarmSlack": "2",
}
"""What the parameters are in the template as shipped."""
MADE_OF = {
    "SaturatedAlarm": " OR ".join(f"({lane.title()}DepthAlarm AND {lane.title()}OldestAlarm)" for lane in Lane),
    "ProviderTroubleAlarm": "OpenAIFaultsAlarm OR AnthropicFaultsAlarm",
}
"""Of which alarms, by logical id, each composite alarm is made, and how."""

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
        "scope": {"all"},
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


def watches(template: Template) -> list[str]:
    """Every alarm is about what it is there for, and fires when it should.

    For the template as written, where thresholds are parameters, and as shipped, where they are the defaults of these.
    """
    known = of_type(template, ALARM_TYPE)
    problems = [f"{name}: only one of template and table has it" for name in sorted(known.keys() ^ WATCHES.keys())]
    for name in known.keys() & WATCHES.keys():
        for field, found, meant in zip(Watch._fields, _watch(known[name]), WATCHES[name], strict=True):
            if found not in {meant, _filled_in(meant)}:
                problems.append(f"{name}: {field} is {found!r}, not {meant!r}")
    return problems


def _watch(body: dict[str, Any]) -> Watch:
    periods, dimensions = body["EvaluationPeriods"], _dimensions(body)
    sign = {"GreaterThanThreshold": ">", "GreaterThanOrEqualToThreshold": ">=", "LessThanThreshold": "<"}
    return Watch(
        statistic=str(body.get("Statistic") or body.get("ExtendedStatistic")),
        metric=str(body.get("MetricName")),
        of=" ".join(_called(dimensions[name]) for name in sorted(dimensions)),
        fires=f"{sign.get(body['ComparisonOperator'], body['ComparisonOperator'])} {_called(body['Threshold'])}",
        held=f"{body.get('DatapointsToAlarm', periods)} of {periods} x {body['Period']} s",
    )


def _called(value: Any) -> str:
    return referred(value) or referred(value, "QueueName") or str(value)


def _filled_in(words: str) -> str:
    """With values for names, as in a template that `shipped` has filled in."""
    values = DEFAULTS | PSEUDO_PARAMETERS
    return " ".join(values.get(word, word) for word in words.split(" "))


def made_of(template: Template) -> list[str]:
    """Every composite alarm is made of the alarms that it is there for, in the way that it should."""
    known = {name: _made_of(body) for name, body in of_type(template, COMPOSITE).items()}
    return [
        f"{name}: is {known.get(name)!r}, not {MADE_OF.get(name)!r}"
        for name in sorted(known.keys() | MADE_OF.keys())
        if known.get(name) != MADE_OF.get(name)
    ]


def _made_of(body: dict[str, Any]) -> str:
    return " ".join(re.sub(r'ALARM\("\$\{(\w+)\}"\)', r"\1", str(body["AlarmRule"]["Fn::Sub"])).split())


def _all(template: Template) -> dict[str, dict[str, Any]]:
    return of_type(template, ALARM_TYPE) | of_type(template, COMPOSITE)


RULES = [alarms, actions, descriptions, coverage, composites, watches, made_of]

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


# ── Tests of what each alarm is there for ─────────────────────────────────────────────────────────────────────────────


def test_sam_05_the_table_has_each_alarm_of_the_template_and_no_other() -> None:
    """A new alarm says in the table what it is there for."""
    assert WATCHES.keys() == of_type(source(), ALARM_TYPE).keys()
    assert MADE_OF.keys() == of_type(source(), COMPOSITE).keys()


def test_sam_05_alarms_watch_what_they_are_there_for_as_written() -> None:
    """By the names of the parameters, of which two may have one default."""
    assert watches(source()) == []


def test_sam_05_thresholds_are_as_shipped() -> None:
    """Each parameter that is a threshold has the default of the table, and each of the table is a threshold."""
    parameters = source()["Parameters"]
    assert {watch.fires.split(" ")[1] for watch in WATCHES.values()} & parameters.keys() == DEFAULTS.keys()
    assert {name: str(parameters[name]["Default"]) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("name", "properties", "named"),
    [
        ("InteractiveDepthAlarm", {"Dimensions": "StandardDepthAlarm"}, "of is 'StandardQueue', not 'Interactive"),
        ("WorkerErrorsAlarm", {"Dimensions": "IngestErrorsAlarm"}, "of is 'IngestFunction', not 'WorkerFunction'"),
        ("BulkOldestAlarm", {"Dimensions": "StandardOldestAlarm"}, "of is 'standard', not 'bulk'"),
        ("BulkDepthAlarm", {"Threshold": {"Ref": "FailureAlarmPercent"}}, "fires is '> FailureAlarmPercent'"),
        ("BulkDepthAlarm", {"Threshold": {"Ref": "DepthAlarmMessages"}}, "fires is '> DepthAlarmMessages'"),
        ("InteractiveOldestAlarm", {"Threshold": {"Ref": "InteractiveDurationAlarmSeconds"}}, "fires is '> Interac"),
        ("StandardDepthAlarm", {"Threshold": 50000}, "fires is '> 50000', not '> DepthAlarmMessages'"),
        ("RepairHeartbeatAlarm", {"ComparisonOperator": "LessThanOrEqualToThreshold"}, "fires is 'LessThanOrEqualTo"),
        ("StandardDepthAlarm", {"EvaluationPeriods": 5}, "held is '5 of 5 x 60 s', not '2 of 2 x 60 s'"),
        ("StandardDepthAlarm", {"DatapointsToAlarm": 1}, "held is '1 of 2 x 60 s', not '2 of 2 x 60 s'"),
        ("StandardDepthAlarm", {"Period": 300}, "held is '2 of 2 x 300 s', not '2 of 2 x 60 s'"),
        ("EndpointErrorRateAlarm", {"Statistic": "Sum"}, "statistic is 'Sum', not 'Average'"),
        ("StandardAgeAlarm", {"MetricName": DEPTH}, f"metric is '{DEPTH}', not '{AGE}'"),
    ],
)
def test_sam_05_an_alarm_that_watches_something_else_is_found(
    name: str, properties: dict[str, Any], named: str
) -> None:
    """Each way of being about something else, or of firing at another time, is a problem, named."""
    template = source()
    if (other := properties.get("Dimensions")) is not None:
        properties = {"Dimensions": of_type(template, ALARM_TYPE)[other]["Dimensions"]}
    found = watches(_with(template, name, **properties))
    assert any(problem.startswith(f"{name}: {named}") for problem in found)


@pytest.mark.parametrize("load", [source, shipped])
def test_sam_05_no_two_alarms_can_be_about_each_others_subjects(load: Callable[[], Template]) -> None:
    """Whichever two have their dimensions swapped, both are named."""
    template = load()
    dimensions = {name: body["Dimensions"] for name, body in _in_both(template).items()}
    missed = []
    for one, other in combinations(dimensions, 2):
        swapped = _with(_with(template, one, Dimensions=dimensions[other]), other, Dimensions=dimensions[one])
        if dimensions[one] != dimensions[other] and not {one, other} <= _named(watches(swapped)):
            missed.append((one, other))
    assert missed == []


def test_sam_05_no_alarm_can_have_the_threshold_of_another() -> None:
    """Nor any other parameter, even one with the same default."""
    template = source()
    known = _in_both(template)
    others = [*(body["Threshold"] for body in known.values()), *({"Ref": name} for name in template["Parameters"])]
    assert [
        (name, other)
        for name, body in known.items()
        for other in others
        if other != body["Threshold"] and name not in _named(watches(_with(template, name, Threshold=other)))
    ] == []


def test_sam_05_no_alarm_can_fire_at_another_time() -> None:
    """Whatever of an alarm is changed, it is named."""
    template = shipped()
    missed = []
    for name, body in _in_both(template).items():
        periods, points = body["EvaluationPeriods"], body.get("DatapointsToAlarm", body["EvaluationPeriods"])
        changes: list[dict[str, Any]] = [
            {"Threshold": _thousandfold(body["Threshold"])},
            {"EvaluationPeriods": periods + 1},
            {"DatapointsToAlarm": points + 1},
            {"DatapointsToAlarm": points - 1},
            {"Period": body["Period"] * 2},
            {"Period": 10},
            {"ComparisonOperator": "GreaterThanUpperThreshold"},
            {"Statistic": "SampleCount"},
            {"MetricName": "Invocations"},
        ]
        changes += [{"EvaluationPeriods": periods - 1}] if periods > 1 else []
        changes += [{"DatapointsToAlarm": periods}] if points != periods else []
        missed += [(name, change) for change in changes if name not in _named(watches(_with(template, name, **change)))]
    assert missed == []


@pytest.mark.parametrize("parameter", DEFAULTS)
def test_sam_05_no_threshold_can_have_another_default(parameter: str) -> None:
    """The alarms whose parameter it is are named."""
    default = source()["Parameters"][parameter]["Default"]
    found = watches(shipped(put(f"Parameters.{parameter}.Default", _thousandfold(default))))
    having = {name for name, watch in WATCHES.items() if watch.fires == f"> {parameter}"}
    assert having
    assert having <= _named(found)


def test_sam_05_an_alarm_that_is_not_in_both_template_and_table_is_found() -> None:
    """What a new alarm is there for has to be said; and one that is gone is missed."""
    assert "SpendAlarm" in _named(watches(source(drop("Resources.SpendAlarm"))))
    assert "NewAlarm" in _named(watches(source(put("Resources.NewAlarm", source()["Resources"]["SpendAlarm"]))))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("SaturatedAlarm", " AND ", " OR "),
        ("SaturatedAlarm", " OR ", " AND "),
        ("SaturatedAlarm", "InteractiveDepthAlarm", "StandardDepthAlarm"),
        ("SaturatedAlarm", "StandardOldestAlarm", "StandardAgeAlarm"),
        ("SaturatedAlarm", ' OR (ALARM("${BulkDepthAlarm}") AND ALARM("${BulkOldestAlarm}"))', ""),
        ("SaturatedAlarm", ' AND ALARM("${BulkOldestAlarm}")', ""),
        ("SaturatedAlarm", "(", ""),
        ("ProviderTroubleAlarm", " OR ", " AND "),
        ("ProviderTroubleAlarm", "OpenAIFaultsAlarm", "AnthropicFaultsAlarm"),
        ("ProviderTroubleAlarm", "AnthropicFaultsAlarm", "WorkerErrorsAlarm"),
        ("ProviderTroubleAlarm", " OR ", " OR NOT "),
        ("ProviderTroubleAlarm", "ALARM(", "OK("),
        ("ProviderTroubleAlarm", "ALARM(", "INSUFFICIENT_DATA("),
    ],
)
def test_sam_05_a_composite_alarm_made_otherwise_is_found(name: str, old: str, new: str) -> None:
    """Of other alarms, of fewer, or joined by another word."""
    rule = of_type(shipped(), COMPOSITE)[name]["AlarmRule"]["Fn::Sub"]
    assert old in rule
    changed = _with(shipped(), name, AlarmRule={"Fn::Sub": rule.replace(old, new)})
    assert _named(made_of(changed)) == {name}


def test_sam_05_a_composite_alarm_too_few_or_too_many_is_found() -> None:
    """As for any alarm."""
    assert _named(made_of(source(drop("Resources.SaturatedAlarm")))) == {"SaturatedAlarm"}
    body = source()["Resources"]["SaturatedAlarm"]
    assert _named(made_of(source(put("Resources.NewAlarm", body)))) == {"NewAlarm"}


def _with(template: Template, name: str, **properties: Any) -> Template:
    """The template with properties of one resource set; it shares everything else with the one given."""
    body = template["Resources"][name]
    changed = body | {"Properties": body["Properties"] | properties}
    return template | {"Resources": template["Resources"] | {name: changed}}


def _in_both(template: Template) -> dict[str, dict[str, Any]]:
    """The alarms that template and table have."""
    return {name: body for name, body in of_type(template, ALARM_TYPE).items() if name in WATCHES}


def _named(problems: list[str]) -> set[str]:
    return {problem.split(":")[0] for problem in problems}


def _thousandfold(value: Any) -> Any:
    """A number, or text of one, that is far from what it was."""
    return type(value)(float(value) * 1000 + 1)
