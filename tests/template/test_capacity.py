"""SAM-03: the default parameters deploy, and work, on a fresh account."""

from typing import Any

import pytest

from tests.template.resolved import (
    Edit,
    Template,
    drop,
    environment,
    functions,
    parameter_extremes,
    put,
    queue_sources,
    shipped,
    source,
)

FRESH_ACCOUNT = 10
"""Concurrent executions of an AWS account whose limit was never raised; none of them may be reserved."""
LEFT_FREE = 2
"""For the endpoints and the repairer, which share what the queues' functions leave."""
CONCURRENCIES = {"InteractiveConcurrency", "StandardConcurrency", "BulkConcurrency"}
CONCURRENCY_MIN, CONCURRENCY_MAX = 2, 1000
"""What an event source accepts."""

# ── Rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def unreserved(template: Template) -> list[str]:
    """Nothing is reserved: a fresh account refuses any reservation, and the stack rolls back."""
    return [
        f"{name}: ReservedConcurrentExecutions"
        for name, body in functions(template).items()
        if "ReservedConcurrentExecutions" in body
    ]


def bounded(template: Template) -> list[str]:
    """Every queue source bounds its concurrency, within what AWS accepts."""
    bounds = {found.name: _bound(found.properties) for found in queue_sources(template)}
    return [
        f"{name}: MaximumConcurrency {bound}"
        for name, bound in bounds.items()
        if bound is None or not CONCURRENCY_MIN <= bound <= CONCURRENCY_MAX
    ]


def leaves_room(template: Template, account: int = FRESH_ACCOUNT) -> list[str]:
    """With all queues at their bounds, the account still has room for those who call the endpoints."""
    total = sum(_bound(found.properties) or account for found in queue_sources(template))
    free = account - total
    return [f"{total} concurrent workers leave {free} of {account}"] if free < LEFT_FREE else []


def waits_for_nothing(template: Template) -> list[str]:
    """No request may wait for its job: each would hold one of the few executions that the job itself needs."""
    seconds = {name: environment(template, name).get("LONG_POLL_SECONDS", "0") for name in functions(template)}
    return [f"{name}: LONG_POLL_SECONDS {given}" for name, given in seconds.items() if given != "0"]


def _bound(properties: dict[str, Any]) -> int | None:
    bound: int | None = properties.get("ScalingConfig", {}).get("MaximumConcurrency")
    return bound


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", [unreserved, bounded, leaves_room, waits_for_nothing])
def test_sam_03_the_defaults_deploy_on_a_fresh_account(rule: Any) -> None:
    """The template as shipped, with its defaults, needs no raised limit."""
    assert rule(shipped()) == []


@pytest.mark.parametrize("parameters", [p for p in parameter_extremes(source()) if CONCURRENCIES & p.keys()], ids=str)
def test_sam_03_the_parameter_allows_only_what_aws_accepts(parameters: dict[str, int]) -> None:
    """No value that CloudFormation lets through fails at the event source, half-way through a deployment."""
    assert bounded(shipped(**parameters)) == []


EVENT = "Resources.WorkerFunctionStandard.Properties.{}".format


@pytest.mark.parametrize(
    ("rule", "edit"),
    [
        (unreserved, put("Resources.WorkerFunction.Properties.ReservedConcurrentExecutions", 5)),
        (unreserved, put("Globals.Function.ReservedConcurrentExecutions", 1)),
        (bounded, drop(EVENT("ScalingConfig"))),
        (bounded, put(EVENT("ScalingConfig.MaximumConcurrency"), 1)),
        (bounded, put("Parameters.BulkConcurrency.Default", 1001)),
        (leaves_room, put("Parameters.StandardConcurrency.Default", 5)),
        (leaves_room, drop(EVENT("ScalingConfig"))),
        (waits_for_nothing, put("Parameters.LongPollSeconds.Default", 20)),
    ],
    ids=["reserved", "reserved-for-all", "unbounded", "one", "too-many", "greedy", "unbounded-greed", "long-polls"],
)
def test_sam_03_what_a_fresh_account_cannot_bear_is_found(rule: Any, edit: Edit) -> None:
    """Each assumption about the account's limits is a problem to its rule."""
    assert rule(shipped(edit)) != []


def test_sam_03_the_bounds_of_the_parameter_are_declared() -> None:
    """The test of the parameter's edges has edges to test."""
    edges = [(name, p[name]) for p in parameter_extremes(source()) for name in sorted(CONCURRENCIES & p.keys())]
    assert sorted(edges) == sorted(
        (name, edge) for name in CONCURRENCIES for edge in (CONCURRENCY_MIN, CONCURRENCY_MAX)
    )
