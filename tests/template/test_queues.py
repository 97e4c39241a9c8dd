"""Queues: a message is answered on its own, and one that cannot be answered ends where somebody sees it."""

from typing import Any

import pytest

from backburner.models import Lane
from tests.template.resolved import (
    Edit,
    Template,
    dead_letter_queues,
    drop,
    of_type,
    put,
    queue_sources,
    referred,
    shipped,
)

RECEIVES_MAX = 3
LANES = [lane.capitalize() for lane in Lane]
BOUNDS = {"InteractiveConcurrency": 11, "StandardConcurrency": 12, "BulkConcurrency": 13}
"""Different ones, so that a mix-up shows."""

# ── Rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def partial_failures(template: Template) -> list[str]:
    """Every queue source reports failures for each message: else one failure runs the whole batch again."""
    return [
        f"{source.name}: no ReportBatchItemFailures"
        for source in queue_sources(template)
        if "ReportBatchItemFailures" not in source.properties.get("FunctionResponseTypes", [])
    ]


def redrive(template: Template) -> list[str]:
    """Every queue but a dead-letter queue gives a message up to one after three receives; none redrives in a circle."""
    dead = dead_letter_queues(template)
    problems = []
    for name, body in of_type(template, "AWS::SQS::Queue").items():
        policy = body.get("RedrivePolicy")
        if name in dead:
            problems += [f"{name}: a dead-letter queue with a RedrivePolicy"] if policy else []
        elif policy is None:
            problems.append(f"{name}: no RedrivePolicy")
        elif policy.get("maxReceiveCount") != RECEIVES_MAX:
            problems.append(f"{name}: maxReceiveCount is not {RECEIVES_MAX}")
        elif referred(policy.get("deadLetterTargetArn"), "Arn") not in of_type(template, "AWS::SQS::Queue"):
            problems.append(f"{name}: its dead letters go to no queue of the template")
    return problems


def encryption(template: Template) -> list[str]:
    """Every queue is encrypted at rest, whatever the account's default."""
    queues = of_type(template, "AWS::SQS::Queue").items()
    return [
        f"{name}: not encrypted"
        for name, body in queues
        if body.get("SqsManagedSseEnabled") is not True and "KmsMasterKeyId" not in body
    ]


def lanes(template: Template) -> list[str]:
    """Each lane has a queue of its own that calls the worker, bounded by a parameter of its own."""
    given = {
        source.queue: source.properties.get("ScalingConfig", {}).get("MaximumConcurrency")
        for source in queue_sources(template)
        if source.function == "WorkerFunction"
    }
    wanted = {f"{lane}Queue": BOUNDS[f"{lane}Concurrency"] for lane in LANES}
    return [f"the worker's pollers are {given}, not {wanted}"] if given != wanted else []


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", [partial_failures, redrive, encryption])
def test_the_shipped_queues_lose_nothing(rule: Any) -> None:
    """The template as shipped keeps every rule."""
    assert rule(shipped()) == []


LANE = "Resources.{}Queue.Properties.{}".format
SOURCE = "Resources.WorkerFunction{}.Properties.{}".format


@pytest.mark.parametrize(
    ("rule", "edit"),
    [
        (partial_failures, drop(SOURCE("Bulk", "FunctionResponseTypes"))),
        (redrive, drop(LANE("Interactive", "RedrivePolicy"))),
        (redrive, put(LANE("Standard", "RedrivePolicy.maxReceiveCount"), 1)),
        (
            redrive,
            put(LANE("Bulk", "RedrivePolicy.deadLetterTargetArn"), "arn:aws:sqs:us-east-1:123456789012:other"),
        ),
        (redrive, put("Resources.ForgottenQueue", {"Type": "AWS::SQS::Queue", "Properties": {}})),
        (redrive, put("Resources.DeadLetterQueue.Properties.RedrivePolicy", {"maxReceiveCount": 3})),
        (encryption, drop(LANE("Standard", "SqsManagedSseEnabled"))),
    ],
    ids=["whole-batches", "no-redrive", "one-receive", "foreign-queue", "second-queue", "circle", "plain"],
)
def test_a_queue_that_loses_messages_is_found(rule: Any, edit: Edit) -> None:
    """Each way of losing or repeating messages is a problem to its rule."""
    assert rule(shipped(edit)) != []


def test_each_lane_has_its_own_queue_and_bound() -> None:
    """A backlog in one lane takes no worker from another."""
    assert lanes(shipped(**BOUNDS)) == []


@pytest.mark.parametrize(
    "edit",
    [
        put(SOURCE("Bulk", "ScalingConfig.MaximumConcurrency"), {"Ref": "StandardConcurrency"}),
        drop(SOURCE("Interactive", "ScalingConfig")),
        put(SOURCE("Bulk", "EventSourceArn"), {"Fn::GetAtt": ["StandardQueue", "Arn"]}),
        drop("Resources.WorkerFunctionInteractive"),
    ],
    ids=["another-lanes-bound", "no-bound", "another-lanes-queue", "no-poller"],
)
def test_lanes_that_are_not_apart_are_found(edit: Edit) -> None:
    """Each way of mixing them up is a problem."""
    assert lanes(shipped(edit, **BOUNDS)) != []
