"""A support bot's load in Slack: messages a minute, with calls that take seconds, on a local stack of its own.

    make bench-slack [ARGS="--per-minute 60 --minutes 3 --call-seconds 8"]

The provider and Slack are fakes that keep the real ones' limits; the stack is the shipped template with its defaults.
Each message is a signed event. What is not acknowledged within three seconds is sent again, as Slack does, and so is
one message in ten that was. Prints how long an acknowledgement and an answer took, and ends with 1 unless every message
was answered exactly once, by one call, within the acknowledgement's target, and the queues are empty.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import httpx2
from rich.console import Console
from rich.table import Table

from tests.fakes.slack import BOT_USER, SIGNING_SECRET, FakeSlack, signed

ACK_SECONDS_MAX = 3.0
"""Slack waits no longer."""
ACK_P99_MS = 1_000
RESENDS_MAX = 3
RESENT_ANYWAY = 0.1
USERS, CHANNELS = 500, 8
DRAIN_SECONDS_MAX = 180
WARM_UP = 4


@dataclass
class Sent:
    """A message and what became of it."""

    event: dict[str, Any]
    at: float
    ack_ms: float = 0.0
    status: int = 0
    resends: int = 0


class Bench:
    """The stack under load, and the fakes around it."""

    def __init__(self) -> None:
        described = json.loads(Path(os.environ["BACKBURNER_STACK_FILE"]).read_text())
        self.stack = described
        self.provider, self.slack = os.environ["BACKBURNER_FAKE_PROVIDER"], os.environ["BACKBURNER_FAKE_SLACK"]
        self.http = httpx2.Client(timeout=30, trust_env=False, limits=httpx2.Limits(max_connections=50))
        self.sender = FakeSlack()
        self.chance = random.Random(7)

    def control(self, address: str, verb: str, what: str, **given: Any) -> Any:
        """Steer a fake."""
        reply = self.http.request(verb, f"{address}/_control/{what}", **given)
        reply.raise_for_status()
        return reply.json()

    def say(self, number: int) -> dict[str, Any]:
        """Somebody asks something somewhere."""
        user, channel = f"U{self.chance.randrange(USERS):09}", f"C{number % CHANNELS:09}"
        message = {"text": f"<@{BOT_USER}> question {number:06}", "user": user, "channel": channel}
        return dict(self.control(self.slack, "POST", "messages", json=message))

    def send(self, event: dict[str, Any]) -> Sent:
        """Send the event as Slack does, again if it is not acknowledged in time."""
        sent, body = Sent(event, time.time()), json.dumps(self.sender.envelope(event))
        for attempt in range(RESENDS_MAX + 1):
            headers = {"Content-Type": "application/json", **signed(SIGNING_SECRET, body, time.time())}
            if attempt:
                headers |= {"X-Slack-Retry-Num": str(attempt), "X-Slack-Retry-Reason": "http_timeout"}
            began = time.perf_counter()
            try:
                reply = self.http.post(f"{self.stack['api_url']}/slack/events", content=body, headers=headers)
                status = reply.status_code
            except httpx2.HTTPError:
                status = 0
            took = time.perf_counter() - began
            if attempt == 0:
                sent.ack_ms, sent.status = 1000 * took, status
            again = self.chance.random() < RESENT_ANYWAY and attempt == 0
            if status == 200 and took <= ACK_SECONDS_MAX and not again:
                break
            sent.resends += 1
        return sent

    def answers(self) -> Counter[str]:
        """How many messages of ours each thread holds."""
        found = self.control(self.slack, "GET", "messages")
        return Counter(m["thread_ts"] for m in found if m["bot"] and m["ephemeral_for"] is None)

    def depths(self) -> dict[str, int]:
        """What is in the queues."""
        factory: Any = boto3.client  # typed by literals, which the names below are not
        sqs = factory("sqs", endpoint_url=self.stack["endpoint_url"], region_name=self.stack["region"],
                      aws_access_key_id="test", aws_secret_access_key="test")  # fmt: skip
        names = [f"ApproximateNumberOfMessages{state}" for state in ("", "NotVisible", "Delayed")]
        depths = {}
        for queue in ("Interactive", "Notifications", "DeadLetter"):
            url = self.stack["outputs"][f"{queue}QueueUrl"]
            attributes = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
            depths[queue] = sum(int(attributes[name]) for name in names)
        return depths

    def until_answered(self, sent: list[Sent]) -> None:
        """Wait until every message has an answer and the queues are empty, or for long enough."""
        end = time.monotonic() + DRAIN_SECONDS_MAX
        while time.monotonic() < end:
            answers = self.answers()
            if all(answers[one.event["ts"]] for one in sent) and not any(self.depths().values()):
                return
            time.sleep(1)


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98], max(values)


def main() -> None:
    """Run the load and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-minute", type=float, default=60.0, help="messages a minute (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=3.0, help="for how long (default %(default)s)")
    parser.add_argument("--call-seconds", type=float, default=8.0, help="of each call (default %(default)s)")
    chosen = parser.parse_args()
    bench = Bench()
    console = Console()
    warm = [bench.send(bench.say(number)) for number in range(WARM_UP)]
    bench.until_answered(warm)
    bench.control(bench.provider, "PUT", "config", json={"latency_seconds": chosen.call_seconds})
    count = round(chosen.per_minute * chosen.minutes)
    events = [bench.say(WARM_UP + number) for number in range(count)]
    with ThreadPoolExecutor(max_workers=20) as pool:
        began = time.perf_counter()
        runs = []
        for number, event in enumerate(events):
            time.sleep(max(0.0, began + number * 60 / chosen.per_minute - time.perf_counter()))
            runs.append(pool.submit(bench.send, event))
        sent = [run.result() for run in runs]
    bench.until_answered(sent)
    answers, depths = bench.answers(), bench.depths()
    posts = [
        call
        for call in bench.control(bench.slack, "GET", "ledger")
        if call["method"] == "chat.postMessage" and call["error"] is None
    ]
    posted = {call["arguments"]["thread_ts"]: call["at"] for call in posts if "thread_ts" in call["arguments"]}
    alarms = [call["arguments"]["text"] for call in posts if "thread_ts" not in call["arguments"]]
    asked = Counter(call["prompt"][-6:] for call in bench.control(bench.provider, "GET", "ledger"))
    once = sum(answers[one.event["ts"]] == 1 for one in sent)
    one_call = sum(asked[one.event["text"][-6:]] == 1 for one in sent)
    acks = quantiles([one.ack_ms for one in sent])
    waits = [posted[one.event["ts"]] - one.at for one in sent if one.event["ts"] in posted]
    table = Table(title=f"Slack: {count} messages at {chosen.per_minute:g}/min, calls of {chosen.call_seconds:g} s")
    for heading in ("", "p50", "p99", "max"):
        table.add_column(heading, justify="right")
    table.add_row("acknowledged (ms)", *(f"{value:.0f}" for value in acks))
    table.add_row("answered (s)", *(f"{value:.1f}" for value in quantiles(waits)))
    console.print(table)
    console.print(
        f"answered exactly once: {once} of {count}; by exactly one call: {one_call}; "
        f"acknowledged by 200 at once: {sum(one.status == 200 for one in sent)}; sent again: "
        f"{sum(one.resends for one in sent)} times; left in queues: {depths}"
    )
    for alarm in alarms:
        console.print(f"alarm: {alarm}")
    good = once == one_call == count and acks[1] < ACK_P99_MS and not any(depths.values())
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
