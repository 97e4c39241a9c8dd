"""Structured logs and metrics by Powertools. Fields never hold prompts, answers, keys or signatures."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Any

from aws_lambda_powertools import Logger

NAMESPACE = "Backburner"


class Metric(StrEnum):
    """The metrics of a provider call, by model and by client; of a provider's limits, by model and dimension; and of a
    client's budgets.
    """

    CALLS = "Calls"
    CALL_DURATION = "CallDuration"
    TIME_TO_FIRST_TOKEN = "TimeToFirstToken"  # noqa: S105  not a password
    INPUT_TOKENS = "InputTokens"
    OUTPUT_TOKENS = "OutputTokens"
    CACHED_TOKENS = "CachedTokens"
    CACHE_HIT_RATIO = "CacheHitRatio"
    COST = "CostMicroUsd"
    SLOT_WAIT = "SlotWait"
    PROVIDER_LIMIT = "ProviderLimit"
    CONFIGURED_LIMIT = "ConfiguredLimit"
    BUDGETS_NEARLY_USED = "BudgetsNearlyUsed"
    BUDGET_REFUSALS = "BudgetRefusals"


@cache
def logger() -> Logger:
    """The function's logger; service and level come from POWERTOOLS_SERVICE_NAME and POWERTOOLS_LOG_LEVEL."""
    return Logger(utc=True)


class Logbook:
    """The journal, as ports.Journal: one JSON line an event, and metrics where the event is a provider call."""

    def note(self, event: str, **fields: Any) -> None:
        """Log `noun_verb` with the fields that have a value."""
        given = {name: value for name, value in fields.items() if value is not None}
        logger().info(event, extra=given)
        if event == "call_ended":
            _measure(given)
        elif event == "limit_differs":
            _measure_limit(given)
        elif event in _COUNTED:
            _count(_COUNTED[event], given)


_COUNTED = {"budget_nearly_used": Metric.BUDGETS_NEARLY_USED, "budget_used_up": Metric.BUDGET_REFUSALS}
"""Events of a client that are metrics as well: 80 % of a budget, once a day, and each request refused beyond 100 %."""


def _count(metric: Metric, event: dict[str, Any]) -> None:
    from aws_lambda_powertools.metrics import EphemeralMetrics, MetricUnit  # noqa: PLC0415  as below

    metrics = EphemeralMetrics(namespace=NAMESPACE)
    metrics.add_dimensions(client=str(event["client_id"]))
    metrics.add_metric(metric, MetricUnit.Count, 1)
    metrics.flush_metrics()


def _measure(call: dict[str, Any]) -> None:
    """One line in CloudWatch's embedded metric format; in the worker only, which alone makes calls."""
    from aws_lambda_powertools.metrics import EphemeralMetrics, MetricUnit  # noqa: PLC0415  30 ms that others need not pay

    metrics = EphemeralMetrics(namespace=NAMESPACE)
    metrics.add_dimension("model", str(call.get("model", "unknown")))
    metrics.add_dimensions(client=str(call["client_id"]))
    metrics.add_metadata("job_id", call["job_id"])
    metrics.add_metric(Metric.CALLS, MetricUnit.Count, 1)
    metrics.add_metric(Metric.CALL_DURATION, MetricUnit.Milliseconds, call["call_ms"])
    metrics.add_metric(Metric.SLOT_WAIT, MetricUnit.Milliseconds, call.get("slot_wait_ms", 0))
    if "first_token_ms" in call:
        metrics.add_metric(Metric.TIME_TO_FIRST_TOKEN, MetricUnit.Milliseconds, call["first_token_ms"])
    if "input_tokens" in call:
        metrics.add_metric(Metric.INPUT_TOKENS, MetricUnit.Count, call["input_tokens"])
        metrics.add_metric(Metric.OUTPUT_TOKENS, MetricUnit.Count, call["output_tokens"])
        metrics.add_metric(Metric.CACHED_TOKENS, MetricUnit.Count, call["cached_tokens"])
        # By call, so that its average shows at once when a system prompt that was cached begins to vary.
        ratio = call["cached_tokens"] / call["input_tokens"] if call["input_tokens"] else 0.0
        metrics.add_metric(Metric.CACHE_HIT_RATIO, MetricUnit.Percent, 100 * ratio)
    if "cost_micro_usd" in call:
        metrics.add_metric(Metric.COST, MetricUnit.Count, call["cost_micro_usd"])
    metrics.flush_metrics()


def _measure_limit(noted: dict[str, Any]) -> None:
    """What the provider says it allows in a minute, next to what is configured."""
    from aws_lambda_powertools.metrics import EphemeralMetrics, MetricUnit  # noqa: PLC0415  30 ms that others need not pay

    metrics = EphemeralMetrics(namespace=NAMESPACE)
    metrics.add_dimension("model", noted["model"])
    metrics.add_dimension("dimension", noted["dimension"])
    metrics.add_metric(Metric.PROVIDER_LIMIT, MetricUnit.Count, noted["provider_limit"])
    metrics.add_metric(Metric.CONFIGURED_LIMIT, MetricUnit.Count, noted["configured"])
    metrics.flush_metrics()
