"""`backburner size`: how many workers a load needs, what to deploy with, what it costs, and how long jobs wait."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from backburner.bootstrap import BATCH
from backburner.models import INLINE_BYTES_MAX, Lane, ModelInfo, Usage
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

# What a job uses, as README.md and docs/architecture.md have it. DynamoDB bills each KB of a row that is written, and
# each 4 KB that are read; an index entry that is put or removed is one more write.
TOKEN_BYTES = 4
"""Of text in a token, roughly."""
ROW_BYTES, END_BYTES, ENTRY_BYTES = 800, 400, 200
"""A row without what is asked and answered; what its end adds; its entry by client, with what DynamoDB adds to both."""
INDEX_WRITES, SLOT_WRITES = 3, 2
"""What put and finish of the row change in its indexes; its slot at the limiter."""
RENEWALS_SECONDS, DUE_SECONDS = 10, 30
"""A call's lease is renewed so often; beyond every so many seconds that also moves an entry of an index, two units."""
KEPT_DAYS, LARGE_KEPT_DAYS, MONTH_DAYS = 15, 22, 30.4
"""By the template's defaults: 14 days after a deadline of one; large texts, by the bucket's own rule."""
SQS_REQUESTS = 3
"""Send, receive and delete; shared by a batch, so it is less under load."""
IDLE_RECEIVES = 4 * 5 * 3 * 60 * 730
"""Four queues, whose five pollers each ask every 20 s when there is nothing to do."""
ACCEPT_GB_SECONDS, POLL_GB_SECONDS, REPAIR_GB_SECONDS = 0.5 * 0.05, 0.5 * 0.02, 0.5 * 0.5
WORKER_GB = 1.0
LOG_BYTES = 5_000
REPAIRS = 60 * 730
ALARMS, METRICS, DASHBOARDS, SECRETS = 47, 158, 1, 2
"""The template's, a composite alarm counted as the five whose price it has; metrics as metrics.md counts them."""
LEFT_OUT = (
    "data transfer to the internet",
    "retries and fallbacks",
    "webhooks, Slack and WebSocket clients",
    "clients' budgets",
    "storage of logs",
    "traces",
)
"""What is not estimated; small, or not known before."""


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

    @property
    def texts(self) -> tuple[int, int]:
        """Bytes of what is asked and of what is answered."""
        return self.input_tokens * TOKEN_BYTES, self.output_tokens * TOKEN_BYTES

    @property
    def rows(self) -> tuple[int, int]:
        """Bytes of a row when it is accepted and when it has ended; a text too large for it lies in S3."""
        asked, answered = (size if size <= INLINE_BYTES_MAX else 0 for size in self.texts)
        return ROW_BYTES + asked, ROW_BYTES + asked + END_BYTES + answered


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


def writes(load: Load) -> int:
    """Write units of a job that succeeds at once: put, claim, renewals and finish of its row, indexes, its slot."""
    accepted, ended = (math.ceil(size / 1024) for size in load.rows)
    renewals = math.floor(load.seconds / RENEWALS_SECONDS)
    moves = int(load.seconds // DUE_SECONDS)
    return 2 * accepted + ended + INDEX_WRITES + SLOT_WRITES + renewals * accepted + 2 * moves


def stored_gb(load: Load) -> tuple[float, float]:
    """What lies in DynamoDB and in S3 once as much expires as comes."""
    row = load.rows[1] + ENTRY_BYTES
    large = sum(size for size in load.texts if size > INLINE_BYTES_MAX)
    return (
        load.jobs_month * row * KEPT_DAYS / MONTH_DAYS / 1e9,
        load.jobs_month * large * LARGE_KEPT_DAYS / MONTH_DAYS / 1e9,
    )


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
    reads = jobs * load.polls * math.ceil(load.rows[1] / 4096)
    requests = jobs * (1 + load.polls)
    row_gb, large_gb = stored_gb(load)
    large = jobs * sum(size > INLINE_BYTES_MAX for size in load.texts) / 1000
    million = 1_000_000
    items = {
        "Lambda": gb_seconds * prices["lambda_gb_second"][load.architecture]
        + (invocations + requests + REPAIRS) / million * prices["lambda_million_requests"],
        "DynamoDB": jobs * writes(load) / million * prices["dynamodb_million_writes"]
        + reads / million * prices["dynamodb_million_reads"],
        "DynamoDB storage": row_gb * (prices["dynamodb_gb_month"] + prices["dynamodb_recovery_gb_month"]),
        "S3": large_gb * prices["s3_gb_month"] + large * (prices["s3_thousand_writes"] + prices["s3_thousand_reads"]),
        "SQS": jobs * SQS_REQUESTS / million * (prices["sqs_million_requests"] + prices["sqs_million_fair_requests"])
        + IDLE_RECEIVES / million * prices["sqs_million_requests"],
        "API Gateway": requests / million * prices["api_gateway_million_requests"],
        "CloudWatch": jobs * LOG_BYTES / 1e9 * prices["logs_gb"]
        + ALARMS * prices["alarm_month"]
        + METRICS * prices["metric_month"]
        + DASHBOARDS * prices["dashboard_month"],
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
        "left_out": list(LEFT_OUT),
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
    said = [
        f"sam deploy --parameter-overrides {parameters}",
        f"List prices as of {told['prices_as_of']}; where each is from: cli/prices.json.",
        f"Left out: {', '.join(LEFT_OUT)}.",
    ]
    show(told, grid, *said, as_json=as_json)
    if told["account_concurrency"] > FRESH_ACCOUNT:
        notes.print("Raise the account's quota of concurrent executions first.", markup=False)
    if any(share > 1 for share in told["share_of_provider_limits"].values()):
        notes.print("The provider's limits are below the peak: jobs will wait for them.", style="red", markup=False)
