"""The functions as Lambda runs them: each app.py imported anew with the environment that the template gives it."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import boto3
import pytest

from backburner import observability
from backburner.models import ClientLimits
from cli.clients import create_client
from tests.integration.deployed import ROOT, Deployed, resources
from tests.integration.permissions import guarded

type Handler = Callable[[dict[str, Any], Any], dict[str, Any]]

SECONDS_LEFT = 300


class Context:
    """What a handler asks of Lambda's context."""

    @staticmethod
    def get_remaining_time_in_millis() -> int:
        return SECONDS_LEFT * 1000


def event(name: str) -> dict[str, Any]:
    """One of events/*.json, to be changed at will."""
    found: dict[str, Any] = json.loads((ROOT / "events" / f"{name}.json").read_text())
    return found


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """The worker takes SIGTERM; the test run wants it back."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def load(deployed: Deployed, logical_id: str, **overrides: str) -> Handler:
    """A function's handler, as its cold start makes it."""
    code = ROOT / resources("AWS::Serverless::Function")[logical_id]["Properties"]["CodeUri"] / "app.py"
    specification = importlib.util.spec_from_file_location(f"{logical_id}_app", code)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    observability.logger.cache_clear()
    with pytest.MonkeyPatch.context() as patch, sigterm_kept():
        for variable, value in {**deployed.environments[logical_id], **overrides}.items():
            patch.setenv(variable, value)
        specification.loader.exec_module(module)
        observability.logger()  # with this function's name
    handler: Handler = module.handler
    return handler


@dataclass(frozen=True)
class Reply:
    """What the gateway would send."""

    status: int
    headers: dict[str, str]
    text: str

    @cached_property
    def json(self) -> Any:
        return json.loads(self.text)


def reply_of(answer: dict[str, Any]) -> Reply:
    """A handler's answer, if it is one that API Gateway takes."""
    assert set(answer) <= {"statusCode", "headers", "multiValueHeaders", "body", "isBase64Encoded"}
    assert answer.get("isBase64Encoded") is False
    assert isinstance(answer["body"], str)
    assert len(json.dumps(answer, ensure_ascii=False).encode()) <= 6 * 1024 * 1024, "Lambda's limit for a reply"
    headers = {name.lower(): ", ".join(values) for name, values in answer.get("multiValueHeaders", {}).items()}
    return Reply(answer["statusCode"], headers | (answer.get("headers") or {}), answer["body"])


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.getMessage()} {record.__dict__}")


@dataclass
class Stack:
    """All functions over one deployed template, driven by events/*.json."""

    deployed: Deployed
    overrides: dict[str, str] = field(default_factory=dict)
    log: _Lines = field(default_factory=_Lines)

    def __post_init__(self) -> None:
        self.sqs: Any = boto3.client("sqs")
        self._handlers: dict[str, Handler] = {}

    def function(self, logical_id: str) -> Handler:
        """A warm function."""
        if logical_id not in self._handlers:
            known = {
                name: value for name, value in self.overrides.items() if name in self.deployed.environments[logical_id]
            }
            handler = load(self.deployed, logical_id, **known)
            self._handlers[logical_id] = guarded(handler, logical_id, self.deployed.names)
            logger = logging.getLogger(self.deployed.environments[logical_id]["POWERTOOLS_SERVICE_NAME"])
            if self.log not in logger.handlers:
                logger.addHandler(self.log)
        return self._handlers[logical_id]

    def client(self, client_id: str = "alice", **limits: int) -> str:
        """A new client's key."""
        table = boto3.resource("dynamodb").Table(self.deployed.names["ClientsTable"])
        return create_client(table, client_id, client_id.title(), 1, limits=ClientLimits(**limits))

    def tally(self, client_id: str) -> dict[str, int]:
        """What the jobs of a limited client hold of today's budgets."""
        client: Any = boto3.client("dynamodb")
        key = {"limit_id": {"S": f"client#{client_id}"}}
        item = client.get_item(TableName=self.deployed.names["LimitsTable"], Key=key)["Item"]
        return {name: int(item[name]["N"]) for name in ("tokens", "micro_usd")}

    def provider_keys(self, text: str = '{"openai_api_key": " sk-openai \\n", "anthropic_api_key": "sk-ant"}') -> None:
        """Fill in the secret."""
        client = boto3.client("secretsmanager")
        client.put_secret_value(SecretId=self.deployed.names["ProviderSecret"], SecretString=text)

    def post(self, key: str, body: Any, **headers: str) -> Reply:
        """POST /jobs."""
        asked = event("post_job")
        text = body if isinstance(body, str) else json.dumps(body)
        given = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
        asked |= {"headers": given, "multiValueHeaders": {n: [v] for n, v in given.items()}, "body": text}
        return reply_of(self.function("IngestFunction")(asked, Context()))

    def get(self, key: str, job_id: str) -> Reply:
        """GET /jobs/{id}."""
        return self._status("get_job", key, job_id)

    def delete(self, key: str, job_id: str) -> Reply:
        """DELETE /jobs/{id}."""
        return self._status("delete_job", key, job_id)

    def listing(self, key: str, **query: str) -> Reply:
        """GET /jobs."""
        asked = event("list_jobs")
        asked |= {"queryStringParameters": query or None, "multiValueQueryStringParameters": None}
        return self._ask(asked, key)

    def _status(self, name: str, key: str, job_id: str) -> Reply:
        asked = event(name)
        asked |= {"path": f"/jobs/{job_id}", "pathParameters": {"job_id": job_id}}
        return self._ask(asked, key)

    def _ask(self, asked: dict[str, Any], key: str) -> Reply:
        asked["headers"]["Authorization"] = f"Bearer {key}"
        return reply_of(self.function("StatusFunction")(asked, Context()))

    def messages(self, queue: str = "StandardQueue") -> list[dict[str, Any]]:
        """What a queue shows now, ten at most."""
        reply = self.sqs.receive_message(
            QueueUrl=self.deployed.names[queue], MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        )
        found: list[dict[str, Any]] = reply.get("Messages", [])
        return found

    def run(self, *bodies: str | None, queue: str = "StandardQueue") -> list[str]:
        """Give the worker a batch with these bodies; the numbers of the messages that must come back."""
        arn = f"arn:aws:sqs:eu-central-1:123456789012:{self.deployed.names[queue].rpartition('/')[2]}"
        batch = event("lane_batch")
        pattern = batch["Records"][0]
        batch["Records"] = []
        for number, body in enumerate(bodies):
            record = copy.deepcopy(pattern) | {"messageId": f"m-{number}", "body": body, "eventSourceARN": arn}
            if body is None:
                del record["body"]
            batch["Records"].append(record)
        answer = self.function("WorkerFunction")(batch, Context())
        assert set(answer) == {"batchItemFailures"}
        return [failure["itemIdentifier"] for failure in answer["batchItemFailures"]]

    def work(self, queue: str = "StandardQueue") -> int:
        """What Lambda's poller does, once: receive, run, delete what was answered; how many messages there were."""
        messages = self.messages(queue)
        if messages:
            failed = self.run(*[message["Body"] for message in messages], queue=queue)
            for number, message in enumerate(messages):
                if f"m-{number}" not in failed:
                    url = self.deployed.names[queue]
                    self.sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return len(messages)

    def tell(self) -> int:
        """What the notifier's poller does, once; how many messages there were."""
        url = self.deployed.names["NotificationsQueue"]
        messages = self.messages("NotificationsQueue")
        if messages:
            records = [{"messageId": message["MessageId"], "body": message["Body"]} for message in messages]
            answer = self.function("NotifierFunction")({"Records": records}, Context())
            assert answer == {"batchItemFailures": []}
        for message in messages:
            self.sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return len(messages)

    def repair(self) -> dict[str, Any]:
        """The minute's repair."""
        return self.function("RepairFunction")(event("repair_schedule"), Context())

    def row(self, job_id: str) -> dict[str, Any]:
        """A job's row as DynamoDB has it."""
        client: Any = boto3.client("dynamodb")
        reply = client.get_item(TableName=self.deployed.names["JobsTable"], Key={"job_id": {"S": job_id}})
        item: dict[str, Any] = reply["Item"]
        return item

    def limit(self, model: str, per_minute: int) -> None:
        """Set a model's limits, as an operator does: by its row."""
        table = boto3.resource("dynamodb").Table(self.deployed.names["LimitsTable"])
        table.put_item(
            Item={
                "limit_id": f"model#{model}",
                "requests_per_minute": per_minute,
                "tokens_per_minute": per_minute,
                "input_tokens_per_minute": per_minute,
                "output_tokens_per_minute": per_minute,
            }
        )

    def rows(self) -> list[str]:
        """The ids of all rows."""
        client: Any = boto3.client("dynamodb")
        return sorted(item["job_id"]["S"] for item in client.scan(TableName=self.deployed.names["JobsTable"])["Items"])

    def let_pass(self, job_id: str, instant: str) -> None:
        """Put an instant of a row into the past."""
        client: Any = boto3.client("dynamodb")
        client.update_item(
            TableName=self.deployed.names["JobsTable"],
            Key={"job_id": {"S": job_id}},
            UpdateExpression="SET #instant = :past",
            ExpressionAttributeNames={"#instant": instant},
            ExpressionAttributeValues={":past": {"N": "1"}},
        )

    def objects(self) -> list[str]:
        """The keys in the payloads bucket."""
        client: Any = boto3.client("s3")
        found = client.list_objects_v2(Bucket=self.deployed.names["PayloadsBucket"]).get("Contents", [])
        return sorted(item["Key"] for item in found)
