"""What a job costs: the requests to AWS that each kind of job makes, counted, and dollars a million jobs.

    make bench-bill [ARGS="--jobs 100 --call-seconds 8"]

The functions run with the template's tables and queues on moto, in this process; every request of a client is counted.
DynamoDB's units are computed from the rows' sizes before and after each write, and from the index entries that it
changes; a row written in a transaction counts twice. Next to it stands what one writes in an afternoon
(bench/afternoon.py): Powertools' idempotency, a status row, one message for each invocation.

Lambda's time is a model, since moto has none: an invocation lasts as long as its call and OVERHEAD_SECONDS, or as
SHORT_SECONDS for one without. Full batches are ten jobs; an idle lane has batches of one, and then nothing is saved.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import botocore.client
from boto3.dynamodb.types import TypeSerializer
from moto import mock_aws
from rich.console import Console
from rich.table import Table

from bench.afternoon import Afternoon
from tests.fakes.provider import FakeProvider
from tests.fakes.receiver import Receiver
from tests.fakes.slack import SIGNING_SECRET, TOKEN, FakeSlack, signed
from tests.integration.deployed import CREDENTIALS, deploy, resources
from tests.integration.functions import Context, Stack, event
from tests.integration.roads import close_all

SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="
PRICES = Path(__file__).parents[1] / "cli" / "prices.json"
OVERHEAD_SECONDS = 0.3
SHORT_SECONDS = {"IngestFunction": 0.03, "StatusFunction": 0.02, "SlackFunction": 0.04, "NotifierFunction": 0.15}
BATCH = 10
WRITE_BYTES, READ_BYTES = 1_024, 4_096
IGNORED = {"sqs:ReceiveMessage", "sqs:DeleteMessage"}
"""The pollers' requests, which here the driver makes one by one: they are added by the batch."""


@dataclass
class Bill:
    """What was counted over a number of jobs."""

    writes: int = 0
    index_writes: int = 0
    reads: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    invocations: Counter[str] = field(default_factory=Counter)
    log_bytes: int = 0


def size_of(value: Any) -> int:  # noqa: PLR0911
    """Bytes of an attribute's value. Source: DynamoDB Developer Guide, "Item sizes and formats"."""
    [(kind, inner)] = value.items()
    match kind:
        case "S":
            return len(inner.encode())
        case "N":
            return len(inner.strip("-0.")) // 2 + 2
        case "BOOL" | "NULL":
            return 1
        case "SS":
            return sum(len(text.encode()) for text in inner)
        case "L":
            return 3 + sum(1 + size_of(item) for item in inner)
        case "M":
            return 3 + sum(1 + len(name.encode()) + size_of(item) for name, item in inner.items())
        case _:
            return len(inner)


def bytes_of(item: Mapping[str, Any]) -> int:
    """Of a whole item, or of what an index holds of it; 0 if there is none."""
    return sum(len(name.encode()) + size_of(value) for name, value in item.items())


class Meter:
    """Counts what any client asks of AWS while it is on."""

    def __init__(self) -> None:
        self.bill = Bill()
        self._real: Any = botocore.client.BaseClient._make_api_call  # type: ignore[attr-defined]  # noqa: SLF001
        self._client: Any = boto3.client("dynamodb")
        self._tables: dict[str, Any] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within the block."""
        base: Any = botocore.client.BaseClient
        meter = self

        def metered(client: Any, operation: str, arguments: Mapping[str, Any]) -> Any:
            return meter.call(client, operation, arguments)

        base._make_api_call = metered  # noqa: SLF001
        try:
            yield
        finally:
            base._make_api_call = self._real  # noqa: SLF001

    def call(self, client: Any, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Make the request, and count it. Raises ValueError for one whose price is not known here."""
        service = client.meta.service_model.service_name
        if service != "dynamodb":
            if f"{service}:{operation}" not in IGNORED:
                self.bill.requests[service] += 1
            return self._real(client, operation, arguments)
        written = list(_written(operation, arguments))
        before = [self._row(table, key) for table, key in written]
        reply = self._real(client, operation, arguments)
        self.bill.requests["dynamodb"] += 1
        for (table, key), old in zip(written, before, strict=True):
            new = self._row(table, key)
            units = math.ceil(max(bytes_of(old), bytes_of(new), 1) / WRITE_BYTES)
            self.bill.writes += 2 * units if operation == "TransactWriteItems" else units
            self.bill.index_writes += self._index_units(table, old, new)
        if not written:
            self.bill.reads += self._read_units(arguments, reply)
        return reply

    def _row(self, table: str, key: Mapping[str, Any]) -> Mapping[str, Any]:
        names = [one["AttributeName"] for one in self._described(table)["KeySchema"]]
        reply = self._real(
            self._client, "GetItem", {"TableName": table, "Key": {name: _typed(key[name]) for name in names}}
        )
        item: Mapping[str, Any] = reply.get("Item", {})
        return item

    def _described(self, table: str) -> Any:
        if table not in self._tables:
            self._tables[table] = self._real(self._client, "DescribeTable", {"TableName": table})["Table"]
        return self._tables[table]

    def _index_units(self, table: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> int:
        """Write units of each index whose entry changes; a moved entry is two writes."""
        described, units = self._described(table), 0
        own = {one["AttributeName"] for one in described["KeySchema"]}
        for index in described.get("GlobalSecondaryIndexes", []):
            keys = {one["AttributeName"] for one in index["KeySchema"]}
            was, now = (_entry(item, keys, own, index["Projection"]) for item in (old, new))
            if was == now:
                continue
            moved = was and now and any(was[name] != now[name] for name in keys)
            parts = (was, now) if moved else ((max(was, now, key=bytes_of)),)
            units += sum(math.ceil(bytes_of(part) / WRITE_BYTES) for part in parts)
        return units

    @staticmethod
    def _read_units(arguments: Mapping[str, Any], reply: Mapping[str, Any]) -> float:
        read = sum(bytes_of(item) for item in reply.get("Items", [])) or bytes_of(reply.get("Item") or {})
        halves = 2 if arguments.get("ConsistentRead") else 1
        return math.ceil(max(read, 1) / READ_BYTES) * halves / 2


def _typed(value: Any) -> Any:
    """As DynamoDB spells it: boto3's resources take Python's own values."""
    return value if isinstance(value, dict) else TypeSerializer().serialize(value)


def _written(operation: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Table and key, or whole item, of each row that a request writes or checks."""
    if operation in {"PutItem", "UpdateItem", "DeleteItem"}:
        yield arguments["TableName"], arguments.get("Item") or arguments["Key"]
    elif operation == "TransactWriteItems":
        for one in arguments["TransactItems"]:
            for inner in one.values():
                yield inner["TableName"], inner.get("Item") or inner["Key"]
    elif operation not in {"GetItem", "Query", "Scan", "BatchGetItem"}:
        raise ValueError(f"what {operation} costs is not known here")


def _entry(item: Mapping[str, Any], keys: set[str], own: set[str], projection: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an index holds of a row; nothing if the row lacks a key of it."""
    if not keys <= item.keys():
        return {}
    if projection["ProjectionType"] == "ALL":
        return item
    names = keys | own | set(projection.get("NonKeyAttributes", []))
    return {name: value for name, value in item.items() if name in names}


@contextmanager
def silenced() -> Iterator[Callable[[], int]]:
    """Standard output goes into a file; how many bytes of it there are."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: (sys.stdout.flush(), os.fstat(file.fileno()).st_size)[1]
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)


def counted(stack: Stack, kind: Callable[[Stack, int], None], jobs: int, lane: str, *, told: bool = False) -> Bill:
    """The bill of so many jobs of a kind, each function warm."""
    meter = Meter()
    with silenced() as written:
        for number in range(-BATCH, 0):  # what only a cold function asks for is not in the figures
            kind(stack, number)
        _drain(stack, lane, told=told)
        before = written()
        with meter.on():
            for number in range(jobs):
                kind(stack, number)
                meter.bill.invocations["SlackFunction" if lane == "InteractiveQueue" else "IngestFunction"] += 1
                if (number + 1) % BATCH == 0:
                    batches, tellings = _drain(stack, lane, told=told)
                    meter.bill.invocations["WorkerFunction"] += batches
                    meter.bill.invocations["NotifierFunction"] += tellings
                    meter.bill.requests["sqs"] += 2 * (batches + tellings)  # a receive and a delete by the batch
        meter.bill.log_bytes = written() - before
    return meter.bill


def _drain(stack: Stack, lane: str, *, told: bool) -> tuple[int, int]:
    """Work off what waits, and tell it; how many batches of each."""
    batches = tellings = 0
    while stack.work(lane):
        batches += 1
    while told and stack.tell():
        tellings += 1
    return batches, tellings


def dollars(bill: Bill, jobs: int, call_seconds: float, *, batch: int, fair: bool = True) -> dict[str, float]:
    """A million jobs at list prices; one status request a job. fair: whether the messages have groups."""
    prices = json.loads(PRICES.read_text())["aws"]
    memory = {
        name: body["Properties"]["MemorySize"] / 1024 for name, body in resources("AWS::Serverless::Function").items()
    }
    gb_seconds = sum(
        count * memory[name] * SHORT_SECONDS[name] for name, count in bill.invocations.items() if name in SHORT_SECONDS
    )
    working = jobs / batch * memory["WorkerFunction"] * (call_seconds + OVERHEAD_SECONDS)
    invocations = bill.invocations.total() - bill.invocations["WorkerFunction"] + jobs / batch
    per_job = {
        "DynamoDB": (bill.writes + bill.index_writes) * prices["dynamodb_million_writes"]
        + bill.reads * prices["dynamodb_million_reads"],
        "SQS": bill.requests["sqs"] * (prices["sqs_million_requests"] + fair * prices["sqs_million_fair_requests"]),
        "Lambda": (gb_seconds + working) * 1e6 * prices["lambda_gb_second"]["arm64"]
        + invocations * prices["lambda_million_requests"],
        "logs": bill.log_bytes / 1e9 * 1e6 * prices["logs_gb"],
    }
    return {name: value / jobs for name, value in per_job.items()}


def scenarios(receiver: Receiver) -> dict[str, tuple[Callable[[Stack, int], None], str, bool]]:
    """How a job of each kind is submitted, its lane's queue, and whether the notifier tells of it."""
    began = time.time()

    def posted(stack: Stack, number: int, client: str, **more: Any) -> None:
        key = _KEYS.setdefault((id(stack), client), stack.client(client, **_LIMITS.get(client, {})))
        reply = stack.post(key, {"prompt": f"Name a river, {number}.", "max_tokens": 64, **more})
        assert reply.status == 202, reply.text

    def asked(stack: Stack, number: int) -> None:
        mention = event("slack_event")
        envelope = json.loads(mention["body"])
        envelope["event"] |= {
            "ts": f"{began + number:.6f}",
            "channel": f"C{number % 50 + 50:06d}",
            "user": f"U{number + 1_000:06d}",
        }
        mention["body"] = json.dumps(envelope)
        mention["headers"] |= signed(SIGNING_SECRET, mention["body"], time.time())
        assert stack.function("SlackFunction")(mention, Context())["statusCode"] == 200

    webhook = {"webhook": {"url": receiver.url, "secret": SECRET}}
    return {
        "plain": (lambda stack, number: posted(stack, number, "plain"), "StandardQueue", False),
        "with limits and budgets": (lambda stack, number: posted(stack, number, "limited"), "StandardQueue", False),
        "with a webhook": (lambda stack, number: posted(stack, number, "plain", **webhook), "StandardQueue", True),
        "asked in Slack": (asked, "InteractiveQueue", True),
    }


_KEYS: dict[tuple[int, str], str] = {}
_LIMITS = {
    "limited": {"requests_per_minute": 100_000, "tokens_per_day": 10**9, "micro_usd_per_day": 10**9},
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100, help="of each kind (default %(default)s)")
    parser.add_argument("--call-seconds", type=float, default=8.0, help="of each call (default %(default)s)")
    chosen = parser.parse_args()
    os.environ.update(CREDENTIALS)
    bills: dict[str, Bill] = {}
    with FakeProvider() as provider, FakeSlack() as slack, Receiver() as receiver, mock_aws():
        provider.configure(tokens_per_chunk=100_000)
        deployed = deploy(
            OpenAIBaseUrl=f"{provider.base_url}/v1", WebhookAllowHttp="true", WebhookAllowLoopback="true",
            WebhookPorts=str(receiver.url.split(":")[2].split("/")[0]), SlackApiBaseUrl=slack.base_url,
        )  # fmt: skip
        stack = Stack(deployed)
        secrets = {"openai_api_key": "sk", "slack_signing_secret": SIGNING_SECRET, "slack_bot_token": TOKEN}
        with silenced():
            stack.provider_keys(json.dumps(secrets))
        for name, (kind, lane, told) in scenarios(receiver).items():
            bills[name] = counted(stack, kind, chosen.jobs, lane, told=told)
        bills["in an afternoon"] = afternoon(provider, chosen.jobs)
        close_all()
    show(bills, chosen.jobs, chosen.call_seconds)


def afternoon(provider: FakeProvider, jobs: int) -> Bill:
    """The same for the plain implementation next to it."""
    peer = Afternoon.made(f"{provider.base_url}/v1")
    meter = Meter()
    with silenced() as written:
        peer.post(-1)
        peer.work()
        before = written()
        with meter.on():
            for number in range(jobs):
                peer.post(number)
                peer.work()
                meter.bill.invocations["IngestFunction"] += 1
                meter.bill.invocations["WorkerFunction"] += 1
                meter.bill.requests["sqs"] += 2
        meter.bill.log_bytes = written() - before
    return meter.bill


def show(bills: Mapping[str, Bill], jobs: int, call_seconds: float) -> None:
    """Requests a job, then dollars a million jobs."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"a job, counted over {jobs} of each kind", title_justify="left")
    for heading in (
        "",
        "DynamoDB requests",
        "write units",
        "of indexes",
        "read units",
        "SQS",
        "secrets, S3, other",
        "log bytes",
    ):
        table.add_column(heading, justify="right" if heading else "left")
    for name, bill in bills.items():
        other = sum(count for service, count in bill.requests.items() if service not in ("dynamodb", "sqs"))
        counts = (bill.requests["dynamodb"], bill.writes, bill.index_writes, bill.reads, bill.requests["sqs"], other)
        table.add_row(name, *(f"{count / jobs:.2f}" for count in counts), f"{bill.log_bytes / jobs:,.0f}")
    console.print(table)
    table = Table(
        title=f"dollars a million jobs with calls of {call_seconds:g} s, without API Gateway and tokens",
        title_justify="left",
    )
    for heading in ("", "jobs an invocation", "DynamoDB", "SQS", "Lambda", "logs", "together"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, bill in bills.items():
        for batch in (1,) if name == "in an afternoon" else (BATCH, 1):
            sums = dollars(bill, jobs, call_seconds, batch=batch, fair=name != "in an afternoon")
            table.add_row(name, str(batch), *(f"{value:.2f}" for value in sums.values()), f"{sum(sums.values()):.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
