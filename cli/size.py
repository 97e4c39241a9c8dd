"""`backburner size`: how many workers a load needs, what to deploy with, what it costs, and how long jobs wait."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from backburner.bootstrap import BATCH
from backburner.models import Lane, ModelInfo, Usage
from backburner.pricing import PriceList, cost_micro_usd
from cli.queueing import Waits, lane
from cli.screen import AsJson, Refused, notes, show, table

CONCURRENCY_MIN, CONCURRENCY_MAX = 2, 1_000
"""What Lambda takes as an event source's MaximumConcurrency."""
FRESH_ACCOUNT = 10
"""Concurrent executions of a fresh AWS account."""
OTHERS = {"interactive": 2, "standard": 2, "bulk": 2, "notifier": 2}
"""The template's defaults of what else runs."""
MONTH_SECONDS = 730 * 3_600

# What a job uses, as README.md and docs/architecture.md have it; a row of 2 KB is two write units, an index entry one.
WRITES = 3 * 2 + 5 + 2
"""Put, claim, finish of the row; what they change in its indexes; its slot at the limiter."""
RENEWALS_SECONDS, RENEWAL_WRITES = 10, 4
SQS_REQUESTS = 3
"""Send, receive and delete; shared by a batch, so it is less under load."""
IDLE_RECEIVES = 4 * 5 * 3 * 60 * 730
"""Four queues, whose five pollers each ask every 20 s when there is nothing to do."""
ACCEPT_GB_SECONDS, POLL_GB_SECONDS, REPAIR_GB_SECONDS = 0.5 * 0.05, 0.5 * 0.02, 0.5 * 0.5
WORKER_GB = 1.0
LOG_BYTES = 3_000
REPAIRS = 60 * 730
ALARMS, METRICS, SECRETS = 45, 137, 2
"""The template's, a composite alarm counted as the five whose price it has; metrics of two models, see metrics.md."""


@dataclass(frozen=True)
class Load:
    """What is expected. rps: jobs a second at the peak. average: the month's mean rate as a share of the peak."""

    rps: float
    seconds: float
    utilization: float
    model: ModelInfo
    input_tokens: int
    output_tokens: int
    average: float = 0.3
    polls: float = 3.0
    wait: float = 2.0
    architecture: str = "arm64"

    @property
    def jobs_month(self) -> float:
        """Jobs in a month of 730 hours."""
        return self.rps * self.average * MONTH_SECONDS


def workers(rps: float, seconds: float, utilization: float) -> int:
    """Jobs that must be able to run at once: the offered load over the share of it that is to be busy, rounded up."""
    return math.ceil(round(rps * seconds / utilization, 9))


def concurrency(load: Load) -> tuple[int, Waits]:
    """The least MaximumConcurrency with which 95 % of jobs are taken within `wait` seconds at the peak; and the waits.

    Raises Refused if none does.
    """
    needed = math.ceil(workers(load.rps, load.seconds, load.utilization) / BATCH)
    for at_once in range(max(CONCURRENCY_MIN, needed), CONCURRENCY_MAX + 1):
        waits = lane(load.rps, load.seconds, at_once, BATCH)
        if waits is not None and waits.quantile(0.95) <= load.wait:
            return at_once, waits
    raise Refused(f"Not even {CONCURRENCY_MAX} invocations at once keep up with that.")


def aws_cost(load: Load, prices: dict[str, Any]) -> dict[str, float]:
    """Dollars a month by service, rounded up to cents; jobs share an invocation as they do at the average rate."""
    jobs = load.jobs_month
    at_once, _ = concurrency(load)
    usual = lane(load.rps * load.average, load.seconds, at_once, BATCH)
    sharing = usual.batch if usual is not None else 1.0
    invocations = jobs / sharing
    gb_seconds = (
        invocations * load.seconds * WORKER_GB
        + jobs * (ACCEPT_GB_SECONDS + load.polls * POLL_GB_SECONDS)
        + REPAIRS * REPAIR_GB_SECONDS
    )
    writes = jobs * (WRITES + RENEWAL_WRITES * math.floor(load.seconds / RENEWALS_SECONDS))
    requests = jobs * (1 + load.polls)
    million = 1_000_000
    items = {
        "Lambda": gb_seconds * prices["lambda_gb_second"][load.architecture]
        + (invocations + requests + REPAIRS) / million * prices["lambda_million_requests"],
        "DynamoDB": writes / million * prices["dynamodb_million_writes"]
        + jobs * load.polls / million * prices["dynamodb_million_reads"],
        "SQS": (jobs * SQS_REQUESTS + IDLE_RECEIVES) / million * prices["sqs_million_requests"],
        "API Gateway": requests / million * prices["api_gateway_million_requests"],
        "CloudWatch": jobs * LOG_BYTES / 1e9 * prices["logs_gb"]
        + ALARMS * prices["alarm_month"]
        + METRICS * prices["metric_month"],
        "Secrets Manager": SECRETS * prices["secret_month"],
    }
    return {name: math.ceil(100 * dollars) / 100 for name, dollars in items.items()}


def token_cost(load: Load) -> float:
    """Dollars a month for tokens, none of them cached."""
    micro_usd = cost_micro_usd(load.model, Usage(load.input_tokens, load.output_tokens))
    return math.ceil(load.jobs_month * micro_usd / 10_000) / 100


def shares(load: Load) -> dict[str, float]:
    """How much of a new account's limits of the model the peak would use, by dimension."""
    minute = {
        "requests": 60 * load.rps,
        "tokens": 60 * load.rps * (load.input_tokens + load.output_tokens),
        "input_tokens": 60 * load.rps * load.input_tokens,
        "output_tokens": 60 * load.rps * load.output_tokens,
    }
    limits = {name: getattr(load.model.limits, name) for name in minute}
    return {name: minute[name] / limit for name, limit in limits.items() if limit}


def sized(load: Load, into: Lane) -> dict[str, Any]:
    """All that `size` tells. Raises Refused for a load that no deployment carries."""
    known = json.loads((Path(__file__).parent / "prices.json").read_text())
    at_once, waits = concurrency(load)
    others = {**OTHERS, into.value: at_once}
    cost = aws_cost(load, known["aws"])
    tokens = token_cost(load)
    return {
        "workers": workers(load.rps, load.seconds, load.utilization),
        "maximum_concurrency": at_once,
        "batch_size": BATCH,
        "parameters": {f"{into.value.capitalize()}Concurrency": at_once},
        "account_concurrency": sum(others.values()) + 2,  # and one each to accept and to poll
        "wait_at_peak_seconds": {
            "mean": waits.mean,
            **{f"p{share}": waits.quantile(share / 100) for share in (50, 95, 99)},
        },
        "chance_of_waiting": waits.busy,
        "jobs_in_an_invocation": waits.batch,
        "share_of_provider_limits": shares(load),
        "jobs_a_month": round(load.jobs_month),
        "usd_a_month": {"aws": cost, "aws_total": round(sum(cost.values()), 2), "tokens": tokens},
        "prices_as_of": known["as_of"],
    }


def size(
    rps: Annotated[float, typer.Option(min=0.001, help="Jobs a second, at the peak.")],
    seconds: Annotated[float, typer.Option(min=0.1, max=240, help="How long a call takes, on average.")],
    utilization: Annotated[float, typer.Option(min=0.05, max=0.95, help="How busy workers are to be.")] = 0.7,
    wait: Annotated[float, typer.Option(min=0, help="Seconds within which 95 % of jobs are to begin at peak.")] = 2.0,
    into: Annotated[Lane, typer.Option("--lane", help="The lane they go to.")] = Lane.STANDARD,
    model: Annotated[str, typer.Option(help="As in the catalogue.")] = "gpt-5.4-mini",
    input_tokens: Annotated[int, typer.Option(min=1, help="Of a job, on average.")] = 1_000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of a job, on average.")] = 300,
    average: Annotated[
        float, typer.Option(min=0.001, max=1, help="The month's mean rate, as a share of the peak.")
    ] = 0.3,
    polls: Annotated[float, typer.Option(min=0, help="How often a client asks for a job.")] = 3.0,
    architecture: Annotated[str, typer.Option(help="arm64 or x86_64.")] = "arm64",
    as_json: AsJson = False,
) -> None:
    """Tell what a load needs: workers, parameters to deploy with, money, and how long jobs wait at the peak.

    Workers = rps x seconds / utilization, rounded up: jobs that run at once. An invocation takes up to ten jobs, but
    only as many as wait when it is free, and ends with the longest; so a lane of few invocations is cheap and lets
    jobs wait. The wait is that of a queue with bulk service (M/M(1,10)/c; Erlang C for batches of one), which errs on
    the side of waiting. Deploy with the parameters that are printed.
    """
    found = PriceList.load().find(model)
    if found is None:
        raise Refused(f"no model {model!r} in the catalogue; there are: {', '.join(PriceList.load().names())}")
    if architecture not in ("arm64", "x86_64"):
        raise Refused("--architecture is arm64 or x86_64")
    load = Load(rps, seconds, utilization, found, input_tokens, output_tokens, average, polls, wait, architecture)
    told = sized(load, into)
    waits, money = told["wait_at_peak_seconds"], told["usd_a_month"]
    parameters = " ".join(f"{name}={value}" for name, value in told["parameters"].items())
    grid = table("what", "#", "")
    grid.add_row("workers", str(told["workers"]), f"{rps:g}/s x {seconds:g} s / {utilization:g}: jobs at once")
    grid.add_row(
        "MaximumConcurrency", str(told["maximum_concurrency"]), f"invocations of up to {BATCH} jobs (BatchSize)"
    )
    grid.add_row("account's concurrency", str(told["account_concurrency"]), f"a fresh account has {FRESH_ACCOUNT}")
    grid.add_row("wait at peak", f"{waits['mean']:.1f} s", "mean")
    grid.add_row("", f"{waits['p95']:.1f} s", f"95 %; 99 %: {waits['p99']:.1f} s")
    grid.add_row(
        "jobs have to wait",
        f"{told['chance_of_waiting']:.0%}",
        f"{told['jobs_in_an_invocation']:.1f} jobs an invocation",
    )
    for name, share in told["share_of_provider_limits"].items():
        grid.add_row(f"of {model}'s limit", f"{share:.0%}", f"{name.replace('_', ' ')} a minute of a new account")
    grid.add_row(
        "AWS, a month", f"${money['aws_total']:,.2f}", ", ".join(f"{n} ${d:,.2f}" for n, d in money["aws"].items())
    )
    grid.add_row(
        "tokens, a month",
        f"${money['tokens']:,.2f}",
        f"{told['jobs_a_month']:,} jobs of {input_tokens} + {output_tokens} tokens",
    )
    said = [f"sam deploy --parameter-overrides {parameters}", f"List prices as of {told['prices_as_of']}."]
    show(told, grid, *said, as_json=as_json)
    if told["account_concurrency"] > FRESH_ACCOUNT:
        notes.print("Raise the account's quota of concurrent executions first.", markup=False)
    if any(share > 1 for share in told["share_of_provider_limits"].values()):
        notes.print("The provider's limits are below the peak: jobs will wait for them.", style="red", markup=False)
