"""`backburner load`: a synthetic burst against a deployed stack, and a verdict."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
import urllib3

from backburner.models import Lane
from cli.api import CONNECTIONS_MAX, HASTY, PATIENT, Api, ApiKey, has_ended
from cli.deployment import Deployment, Profile, Region, StackName
from cli.durations import seconds_of
from cli.screen import AsJson, Yes, confirm, progress, show, table

ACK_MS = 1_000.0
POLL_SECONDS = 1.0
ASKED = {"prompt": "Say yes.", "system_prompt": "Answer in one word.", "max_tokens": 16}
"""As cheap as a call can be; the deployment and the provider's limits are tried out, not the model."""


@dataclass
class Burst:
    """What a burst came to. acks_ms: of accepted requests; refused: the others, by reason; late_starts: sent too late.

    completion_seconds: from acceptance to the end, as the API tells them, so in whole seconds.
    """

    sent: int = 0
    acks_ms: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    job_ids: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    completion_seconds: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The 50th, 95th and 99th, and the largest."""
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(values)}


def fire(api: Api, requests: Sequence[dict[str, Any]], rate: float, advance: Callable[[], None]) -> Burst:
    """Send the requests at a steady rate, whether or not earlier ones are answered, each once."""
    burst = Burst(sent=len(requests))

    def send(request: dict[str, Any], due: float) -> tuple[str, str, float]:
        began = time.perf_counter()
        try:
            reply = api.submit(request)
        except urllib3.exceptions.HTTPError as error:
            return "", f"no reply: {type(error).__name__}", 0.0
        finally:
            advance()
        # Counted from when it was due: a server that cannot keep up must not look fast since we wait for it.
        took_ms = 1000 * (time.perf_counter() - min(began, due))
        return (reply.body["job_id"], "", took_ms) if reply.status == 202 else ("", reply.problem, took_ms)

    with ThreadPoolExecutor(max_workers=CONNECTIONS_MAX) as pool:
        start = time.perf_counter()
        runs = []
        for number, request in enumerate(requests):
            due = start + number / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            runs.append(pool.submit(send, request, due))
        for run in runs:
            job_id, why, took_ms = run.result()
            if job_id:
                burst.job_ids.append(job_id)
                burst.acks_ms.append(took_ms)
            else:
                burst.refused[why] += 1
    return burst


def await_ends(api: Api, burst: Burst, seconds: float, advance: Callable[[], None]) -> None:
    """Look at the accepted jobs until all have ended; what has not after so many seconds, or is not there, is lost."""
    left, ends_at = list(burst.job_ids), time.monotonic() + seconds
    with ThreadPoolExecutor(max_workers=8) as pool:
        while left:
            waiting = []
            for job_id, reply in zip(left, pool.map(api.job, left), strict=True):
                if reply.status != 200 or not has_ended(reply.body):
                    waiting.append(job_id)
                    continue
                advance()
                burst.statuses[reply.body["status"]] += 1
                if reply.body["status"] != "completed":
                    burst.errors[reply.body.get("error", {}).get("code", reply.body["status"])] += 1
                burst.completion_seconds.append(float(reply.body["finished_at"] - reply.body["created_at"]))
            left = waiting
            if left and time.monotonic() >= ends_at:
                break
            if left:
                time.sleep(POLL_SECONDS)
    burst.lost = left


def verdict(burst: Burst, ack_ms: float) -> list[str]:
    """What is wrong; nothing if the deployment carries the load."""
    wrong = []
    if burst.lost:
        wrong.append(f"{len(burst.lost)} of {len(burst.job_ids)} accepted jobs are lost")
    if burst.refused:
        wrong.append(f"{burst.refused.total()} of {burst.sent} requests were not accepted")
    if burst.errors:
        wrong.append(f"{burst.errors.total()} jobs did not complete")
    slowest = percentiles(burst.acks_ms).get("p99", 0.0)
    if slowest > ack_ms:
        wrong.append(f"1 % of requests waited longer than {slowest:,.0f} ms for their 202; {ack_ms:,.0f} are allowed")
    return wrong


def load(
    rps: Annotated[float, typer.Option(min=0.01, help="The expected peak, in jobs a second.")],
    for_: Annotated[
        float,
        typer.Option("--for", parser=seconds_of, metavar="DURATION", help="How long.", show_default="60s"),
    ] = 60.0,
    times: Annotated[float, typer.Option(min=0.1, help="The burst is so many times the peak.")] = 2.0,
    lane: Annotated[Lane, typer.Option(help="The lane that jobs go to.")] = Lane.STANDARD,
    model: Annotated[str | None, typer.Option(help="Left out: the deployment's default.", show_default=False)] = None,
    ack_ms: Annotated[float, typer.Option(min=1, help="The longest p99 of a 202 that passes.")] = ACK_MS,
    lost_after: Annotated[
        float,
        typer.Option(
            parser=seconds_of, metavar="DURATION", help="A job that has not ended by then is lost.", show_default="10m"
        ),
    ] = 600.0,
    yes: Yes = False,
    key: ApiKey = None,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Submit a burst of small jobs at twice the expected peak, and see all of them to their ends.

    Ends with 1 unless every request was accepted in time and every job completed. The calls are real, and paid for.
    """
    at = Deployment.find(stack, profile, region)
    count = max(1, round(rps * times * for_))
    confirm(f"Run {count} jobs on {at.name}? Their calls are paid for.", yes=yes or at.local is not None)
    more = {"priority": lane.value} | ({} if model is None else {"model": model})
    requests = [{**ASKED, **more} for _ in range(count)]
    with progress("Submitting", count) as advance:
        burst = fire(Api.of(at, key, HASTY), requests, rps * times, advance)
    with progress("Waiting", len(burst.job_ids)) as advance:
        await_ends(Api.of(at, key, PATIENT), burst, lost_after, advance)
    wrong = verdict(burst, ack_ms)
    acks, ends = percentiles(burst.acks_ms), percentiles(burst.completion_seconds)
    grid = table("what", "#p50", "#p95", "#p99", "#max")
    grid.add_row("202 after, ms", *(f"{value:,.0f}" for value in acks.values()))
    grid.add_row("ended after, s", *(f"{value:,.0f}" for value in ends.values()))
    told = {
        "rate": rps * times,
        "sent": burst.sent,
        "accepted": len(burst.job_ids),
        "refused": dict(burst.refused),
        "statuses": dict(burst.statuses),
        "failures": dict(burst.errors),
        "ack_ms": acks,
        "completion_seconds": ends,
        "lost": burst.lost,
        "verdict": "passed" if not wrong else "failed",
        "reasons": wrong,
    }
    counts = ", ".join(f"{name} {n}" for name, n in (burst.statuses + burst.refused).items())
    said = [
        f"{burst.sent} requests at {rps * times:g}/s: {counts or 'none answered'}; lost: {len(burst.lost)}",
        *(f"lost: {job_id}" for job_id in burst.lost),
        "The deployment carries this load." if not wrong else "It does not carry this load: " + "; ".join(wrong) + ".",
    ]
    show(told, grid, *said, as_json=as_json)
    if wrong:
        raise typer.Exit(1)
