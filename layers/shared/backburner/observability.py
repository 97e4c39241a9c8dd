"""Structured logs and metrics by Powertools. Fields never hold prompts, answers, keys or signatures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import cache
from itertools import groupby
from typing import Any, Final, Self

from aws_lambda_powertools import Logger
from aws_lambda_powertools.metrics import EphemeralMetrics, MetricUnit

from backburner.errors import (
    Authentication,
    BudgetUsedUp,
    ConnectionLost,
    Overloaded,
    ProviderFault,
    ProviderTimeout,
    QuotaExhausted,
    RateLimited,
    SpendLimit,
)
from backburner.models import DIMENSIONS, WEBSOCKET, JobStatus

OTHER_CLIENTS: Final = "other"
"""All clients that the deployment does not name as measured: each name costs a series of every metric by client."""
FAULTS: Final = frozenset(
    error.code
    for error in (
        Overloaded, ProviderFault, ProviderTimeout, ConnectionLost, Authentication, QuotaExhausted, SpendLimit,
    )
)  # fmt: skip
"""Outcomes of a call that are the provider's trouble, or ours with it, whatever was asked."""
SLOT_PERCENT_MICROS: Final = 600_000
"""Microseconds of a limit's minute in one percent of it."""

COUNT, PERCENT, DOLLARS = MetricUnit.Count, MetricUnit.Percent, MetricUnit.NoUnit
SECONDS, MILLISECONDS = MetricUnit.Seconds, MetricUnit.Milliseconds


class Metric(StrEnum):
    """All metrics of ours: name, unit, the functions that emit it, and the sets of dimensions it is emitted by.

    Each is also emitted by `service` alone, which is the function's name: the total. What each means, and what all of
    them cost, is in docs/metrics.md.
    """

    unit: MetricUnit
    functions: tuple[str, ...]
    by: tuple[str, ...]
    """Sets of dimensions, each spelled with commas between its names."""

    def __new__(cls, name: str, unit: MetricUnit, functions: str, *by: str) -> Self:
        """The member for a line below; functions with spaces between."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.unit, member.functions, member.by = unit, tuple(functions.split()), by
        return member

    JOBS_ACCEPTED = "JobsAccepted", COUNT, "ingest slack", "lane", "client"
    JOBS_REFUSED = "JobsRefused", COUNT, "ingest slack", "code"
    JOBS_COMPLETED = "JobsCompleted", COUNT, "worker", "lane", "model", "client"
    JOBS_FAILED = "JobsFailed", COUNT, "worker repair", "lane", "code", "model", "client"
    JOBS_CANCELLED = "JobsCancelled", COUNT, "status slack", "lane", "client"
    JOBS_EXPIRED = "JobsExpired", COUNT, "worker repair", "lane", "client"
    FAILURE_RATE = "FailureRate", PERCENT, "worker repair", "lane"
    QUEUE_WAIT = "QueueWait", SECONDS, "worker", "lane"
    TOTAL_DURATION = "TotalDuration", SECONDS, "worker repair", "lane"
    OLDEST_WAITING = "OldestWaitingJob", SECONDS, "repair", "lane"
    OLDEST_LETTER = "OldestDeadLetter", SECONDS, "repair"

    CALLS = "Calls", COUNT, "worker", "model"
    CALLS_REFUSED = "CallsRefused", PERCENT, "worker", "model"
    CALL_FAULTS = "CallFaults", PERCENT, "worker", "provider"
    CALL_DURATION = "CallDuration", MILLISECONDS, "worker", "model"
    TIME_TO_FIRST_TOKEN = "TimeToFirstToken", MILLISECONDS, "worker", "model"
    INPUT_TOKENS = "InputTokens", COUNT, "worker", "model", "client"
    OUTPUT_TOKENS = "OutputTokens", COUNT, "worker", "model", "client"
    CACHED_TOKENS = "CachedTokens", COUNT, "worker", "model"
    COST = "CostUsd", DOLLARS, "worker", "model", "client"
    SLOT_WAIT = "SlotWait", MILLISECONDS, "worker", "model"
    LIMIT_USED = "LimitUsed", PERCENT, "worker", "model,dimension"
    PROVIDER_LIMIT = "ProviderLimit", COUNT, "worker", "model,dimension"
    CONFIGURED_LIMIT = "ConfiguredLimit", COUNT, "worker", "model,dimension"

    BUDGETS_NEARLY_USED = "BudgetsNearlyUsed", COUNT, "ingest slack", "client"
    BUDGET_REFUSALS = "BudgetRefusals", COUNT, "ingest slack", "client"

    DELIVERIES = "Deliveries", COUNT, "notifier worker", "channel,outcome"
    TELLING_DELAY = "TellingDelay", MILLISECONDS, "notifier worker", "channel"
    FAULTS = "Faults", COUNT, "ingest status slack websocket worker notifier", "scope"
    REPAIRS = "Repairs", COUNT, "repair worker", "kind"
    REPAIR_RUNS = "RepairRuns", COUNT, "repair"


type Values = dict[Metric, float]


@cache
def logger() -> Logger:
    """The function's logger; service and level come from POWERTOOLS_SERVICE_NAME and POWERTOOLS_LOG_LEVEL."""
    return Logger(utc=True, location=None)  # a line in this file says nothing


_subject: ContextVar[Mapping[str, Any]] = ContextVar("subject", default={})  # noqa: B039  never changed, only replaced
_lines = threading.RLock()  # re-entered where SIGTERM interrupts a note
"""A worker's threads write one line at a time: two in one are none to CloudWatch."""


class Logbook:
    """The journal, as ports.Journal: one JSON line an event, and a line of metrics where the event is measured.

    measured: the clients that metrics name; all others are OTHER_CLIENTS. release: what is deployed, if it has a name.
    The namespace of the metrics comes from POWERTOOLS_METRICS_NAMESPACE, their service from POWERTOOLS_SERVICE_NAME.
    """

    def __init__(self, measured: frozenset[str] = frozenset(), release: str = "") -> None:
        self._measured = measured
        self._release = {"release": release} if release else {}
        powertools = EphemeralMetrics()
        self._namespace, self._service = powertools.namespace, powertools.service

    @contextmanager
    def about(self, **fields: Any) -> Iterator[None]:
        """Add the fields to whatever this thread notes within the block."""
        token = _subject.set({**_subject.get(), **fields})
        try:
            yield
        finally:
            _subject.reset(token)

    def note(self, event: str, **fields: Any) -> None:
        """Log `noun_verb` with the fields that have a value, and measure what is to be measured of it."""
        all_fields = {**self._release, **_subject.get(), **fields}
        given = {name: value for name, value in all_fields.items() if value is not None}
        with _lines:
            logger().info(event, extra=given)
            for about, values in _EVENTS[event](given) if event in _EVENTS else ():
                self._emit({**given, **about}, values)

    def _emit(self, fields: Mapping[str, Any], values: Values) -> None:
        """One line in CloudWatch's embedded metric format for the metrics that have their dimensions in common."""
        for by, names in groupby(sorted(values, key=lambda metric: metric.by), key=lambda metric: metric.by):
            metrics = EphemeralMetrics(namespace=self._namespace, service=self._service)
            for dimensions in by:
                metrics.add_dimensions(**{name: self._dimension(name, fields) for name in dimensions.split(",")})
            for name in names:
                metrics.add_metric(name, name.unit, values[name])
            metrics.flush_metrics()

    def _dimension(self, name: str, fields: Mapping[str, Any]) -> str:
        if name == "client":
            client_id = str(fields["client_id"])
            return client_id if client_id in self._measured else OTHER_CLIENTS
        return str(fields.get(name) or "unknown")


type _Measured = list[tuple[dict[str, Any], Values]]
"""What is measured of an event, with the dimensions that its fields do not spell out."""


def _of_call(call: Mapping[str, Any]) -> Values:
    """CallFaults and CallsRefused are 0 or 100 of each call, so that their average is the share of all."""
    outcome = call.get("outcome")
    values: Values = {
        Metric.CALLS: 1,
        Metric.CALLS_REFUSED: 100 * (outcome == RateLimited.code),
        Metric.CALL_FAULTS: 100 * (outcome in FAULTS),
        Metric.CALL_DURATION: call["call_ms"],
        Metric.SLOT_WAIT: call.get("slot_wait_ms", 0),
    }
    known = {
        Metric.TIME_TO_FIRST_TOKEN: "first_token_ms",
        Metric.INPUT_TOKENS: "input_tokens",
        Metric.OUTPUT_TOKENS: "output_tokens",
        Metric.CACHED_TOKENS: "cached_tokens",
    }
    cost: Values = {Metric.COST: call["cost_micro_usd"] / 1e6} if "cost_micro_usd" in call else {}
    return values | cost | {metric: call[field] for metric, field in known.items() if field in call}


_ENDS: Final = {
    JobStatus.COMPLETED: Metric.JOBS_COMPLETED,
    JobStatus.FAILED: Metric.JOBS_FAILED,
    JobStatus.CANCELLED: Metric.JOBS_CANCELLED,
    JobStatus.EXPIRED: Metric.JOBS_EXPIRED,
}


def _of_end(end: Mapping[str, Any]) -> Values:
    status = JobStatus(end["status"])
    worked = status in (JobStatus.COMPLETED, JobStatus.FAILED)
    rate = 100 * (status is JobStatus.FAILED and "dead" in end)  # what only its caller can mend is no fault of ours
    worked_off: Values = {Metric.TOTAL_DURATION: end["total_ms"] / 1000, Metric.FAILURE_RATE: rate}
    return {_ENDS[status]: 1} | (worked_off if worked else {})


def _one(values: Values, **about: str) -> _Measured:
    return [(about, values)]


def _call(fields: Mapping[str, Any]) -> _Measured:
    shares = {name: fields.get("limit_micros", {}).get(name) for name in DIMENSIONS}
    used = [({"dimension": name}, {Metric.LIMIT_USED: n / SLOT_PERCENT_MICROS}) for name, n in shares.items() if n]
    return [({}, _of_call(fields)), *used]


def _refusal(fields: Mapping[str, Any]) -> _Measured:
    by_budget: Values = {Metric.BUDGET_REFUSALS: 1} if fields["code"] == BudgetUsedUp.code else {}
    return _one({Metric.JOBS_REFUSED: 1, **by_budget})


def _told(fields: Mapping[str, Any]) -> _Measured:
    """Listeners know before it is noted that all of them do: see `listeners_told`."""
    delay: Values = {} if fields["target"] == WEBSOCKET else {Metric.TELLING_DELAY: fields["told_ms"]}
    return _one({Metric.DELIVERIES: 1, **delay}, channel=fields["target"], outcome="delivered")


def _untold(fields: Mapping[str, Any]) -> _Measured:
    outcome = "put_off" if fields["again"] else "given_up"
    return _one({Metric.DELIVERIES: 1}, channel=fields["target"], outcome=outcome)


def _limits(fields: Mapping[str, Any]) -> _Measured:
    return _one({Metric.PROVIDER_LIMIT: fields["provider_limit"], Metric.CONFIGURED_LIMIT: fields["configured"]})


def _fault(_: Mapping[str, Any]) -> _Measured:
    """An alarm watches one series, so there is one of all functions."""
    return _one({Metric.FAULTS: 1}, scope="all")


_EVENTS: Final[Mapping[str, Callable[[Mapping[str, Any]], _Measured]]] = {
    "job_accepted": lambda _: _one({Metric.JOBS_ACCEPTED: 1}),
    "job_refused": _refusal,
    "job_claimed": lambda fields: _one({Metric.QUEUE_WAIT: fields["wait_ms"] / 1000}),
    "job_ended": lambda fields: _one(_of_end(fields)),
    "call_ended": _call,
    "limit_differs": _limits,
    "budget_nearly_used": lambda _: _one({Metric.BUDGETS_NEARLY_USED: 1}),
    "target_told": _told,
    "listeners_told": lambda fields: _one({Metric.TELLING_DELAY: fields["told_ms"]}, channel=WEBSOCKET),
    "target_untold": _untold,
    "request_faulted": _fault,
    "socket_faulted": _fault,
    "job_faulted": _fault,
    "telling_faulted": _fault,
    "job_repaired": lambda _: _one({Metric.REPAIRS: 1}),
    "lane_seen": lambda fields: _one({Metric.OLDEST_WAITING: fields["oldest_seconds"]}),
    "letters_seen": lambda fields: _one({Metric.OLDEST_LETTER: fields["oldest_seconds"]}),
    "repair_ran": lambda _: _one({Metric.REPAIR_RUNS: 1}),
}
"""Events that are measured; all others are log lines only."""
