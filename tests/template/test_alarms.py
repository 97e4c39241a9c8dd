"""SAM-05: alarms that fire. A wrong metric, statistic or dimension makes an alarm that is silent for ever."""

import pytest

from tests.template.resolved import Edit, Template, dead_letter_queues, drop, of_type, put, referred, shipped

DEPTH = "ApproximateNumberOfMessagesVisible"
AGE = "ApproximateAgeOfOldestMessage"

# ── The rule ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def queue_alarms(template: Template) -> list[str]:
    """Every queue has a sound alarm on its depth and one on the age of its oldest message.

    The one on a dead-letter queue's depth fires at the first message.
    """
    dead = dead_letter_queues(template)
    problems = []
    for queue in of_type(template, "AWS::SQS::Queue"):
        for metric in (DEPTH, AGE):
            alarms = _alarms_on(template, queue, metric)
            faults = {name: _faults(template, name, first=queue in dead and metric == DEPTH) for name in alarms}
            if not alarms:
                problems.append(f"{queue}: no alarm on {metric}")
            elif all(faults.values()):
                problems += [f"{name}: {fault}" for name, found in faults.items() for fault in found]
    return problems


def _alarms_on(template: Template, queue: str, metric: str) -> list[str]:
    return [
        name
        for name, body in of_type(template, "AWS::CloudWatch::Alarm").items()
        if body.get("Namespace") == "AWS/SQS"
        and body.get("MetricName") == metric
        and [(d["Name"], referred(d["Value"], "QueueName")) for d in body.get("Dimensions", [])]
        == [("QueueName", queue)]
    ]


def _faults(template: Template, alarm: str, *, first: bool) -> list[str]:
    body = of_type(template, "AWS::CloudWatch::Alarm")[alarm]
    topics = of_type(template, "AWS::SNS::Topic")
    told = [referred(action) for action in body.get("AlarmActions", [])]
    fires = (body.get("ComparisonOperator"), body.get("Threshold"))
    checks = {
        "Statistic is not Maximum; others misread a gauge": body.get("Statistic") == "Maximum",
        "missing data must not breach; an idle queue reports none": body.get("TreatMissingData") == "notBreaching",
        "tells no topic of the template": bool(told) and all(topic in topics for topic in told),
        "its actions are disabled": body.get("ActionsEnabled", True) is True,
        "does not fire above its threshold": str(fires[0]).startswith("GreaterThan"),
        "does not fire at the first message": not first
        or fires in (("GreaterThanOrEqualToThreshold", 1), ("GreaterThanThreshold", 0)),
        "waits for more than one period": not first
        or 1 in (body.get("EvaluationPeriods"), body.get("DatapointsToAlarm")),
    }
    return [fault for fault, sound in checks.items() if not sound]


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sam_05_every_queue_has_alarms_that_fire() -> None:
    """The template as shipped watches depth and age of every queue."""
    assert queue_alarms(shipped()) == []


ALARM = "Resources.DeadLetterDepthAlarm.Properties.{}".format


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (put(ALARM("MetricName"), "NumberOfMessagesSent"), "DeadLetterQueue: no alarm"),
        (put(ALARM("Statistic"), "Sum"), "Statistic"),
        (put(ALARM("Statistic"), "Average"), "Statistic"),
        (put(ALARM("Dimensions.0.Value"), {"Fn::GetAtt": ["StandardQueue", "QueueName"]}), "DeadLetterQueue: no alarm"),
        (put(ALARM("Dimensions.0.Value"), {"Ref": "DeadLetterQueue"}), "DeadLetterQueue: no alarm"),
        (put(ALARM("Dimensions.0.Name"), "Queue"), "DeadLetterQueue: no alarm"),
        (put(ALARM("Namespace"), "AWS/Lambda"), "DeadLetterQueue: no alarm"),
        (put(ALARM("Threshold"), 2), "first message"),
        (put(ALARM("ComparisonOperator"), "GreaterThanThreshold"), "first message"),
        (put(ALARM("ComparisonOperator"), "LessThanThreshold"), "above its threshold"),
        (put(ALARM("DatapointsToAlarm"), 3), "one period"),
        (put(ALARM("TreatMissingData"), "breaching"), "missing data"),
        (drop(ALARM("TreatMissingData")), "missing data"),
        (drop(ALARM("AlarmActions")), "no topic"),
        (put(ALARM("AlarmActions"), [{"Ref": "StandardQueue"}]), "no topic"),
        (put(ALARM("ActionsEnabled"), False), "disabled"),
        (drop("Resources.DeadLetterAgeAlarm"), f"DeadLetterQueue: no alarm on {AGE}"),
        (drop("Resources.StandardAgeAlarm"), f"StandardQueue: no alarm on {AGE}"),
        (drop("Resources.InteractiveDepthAlarm"), f"InteractiveQueue: no alarm on {DEPTH}"),
        (drop("Resources.BulkAgeAlarm"), f"BulkQueue: no alarm on {AGE}"),
        (drop("Resources.StandardDepthAlarm"), f"StandardQueue: no alarm on {DEPTH}"),
        (drop("Resources.StandardAgeAlarm.Properties.AlarmActions"), "StandardAgeAlarm"),
    ],
)
def test_sam_05_an_alarm_that_never_fires_is_found(edit: Edit, named: str) -> None:
    """Each way of silencing an alarm is a problem, named."""
    assert any(named in problem for problem in queue_alarms(shipped(edit)))
