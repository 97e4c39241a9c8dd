"""moto as the AWS, furnished from template.yaml once for all tests and emptied after each."""

from __future__ import annotations

import io
import json
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.dynamodb.responses import DynamoHandler
from typer.testing import CliRunner

from backburner.adapters import sqs
from cli.__main__ import app
from tests.fakes.provider import Config, FakeProvider
from tests.integration.deployed import CREDENTIALS, STACK, Deployed, deploy, resources
from tests.integration.roads import close_all

FOREIGN = ("AWS_", "OPENAI_", "ANTHROPIC_")
"""What a developer's shell may hold and no test may use."""


@pytest.fixture(scope="session")
def _server() -> Iterator[FakeProvider]:
    with FakeProvider() as running:
        yield running


@pytest.fixture
def provider(_server: FakeProvider) -> Iterator[FakeProvider]:
    """A fake provider on loopback that has heard nothing yet."""
    _server.config = Config()
    yield _server
    close_all()
    _server.reset()


@pytest.fixture(scope="session")
def aws() -> Iterator[None]:
    """An AWS account that nothing real can be reached from."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(FOREIGN)]:
            patch.delenv(name)
        for name, value in {**CREDENTIALS, "MOTO_SQS_ENFORCE_STRICT_QUEUE_PURGE_BEHAVIOUR": "false"}.items():
            patch.setenv(name, value)
        patch.setattr(DynamoHandler, "call_action", atomic(DynamoHandler.call_action))
        with mock_aws():
            yield


def atomic(action: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One request at a time: moto checks a condition and writes in two steps, DynamoDB in one."""
    lock = threading.Lock()

    def locked(handler: Any) -> Any:
        with lock:
            return action(handler)

    return locked


@pytest.fixture(scope="session")
def _stack(aws: None, _server: FakeProvider) -> Deployed:
    """The template with its providers at the fake one, so that the road there is the template's own."""
    return deploy(OpenAIBaseUrl=f"{_server.base_url}/v1", AnthropicBaseUrl=_server.base_url)


@pytest.fixture
def deployed(_stack: Deployed) -> Iterator[Deployed]:
    """The template's storage and queues, empty."""
    yield _stack
    empty(_stack)


def empty(stack: Deployed) -> None:
    """Remove every row, object and message."""
    tables: Any = boto3.resource("dynamodb")
    for name, body in resources("AWS::DynamoDB::Table").items():
        table = tables.Table(stack.names[name])
        keys = {f"#k{n}": key["AttributeName"] for n, key in enumerate(body["Properties"]["KeySchema"])}
        rows = table.scan(ProjectionExpression=",".join(keys), ExpressionAttributeNames=keys)["Items"]
        with table.batch_writer() as writer:
            for row in rows:
                writer.delete_item(Key=row)
    for name in resources("AWS::SQS::Queue"):
        boto3.client("sqs").purge_queue(QueueUrl=stack.names[name])
    for name in resources("AWS::S3::Bucket"):
        boto3.resource("s3").Bucket(stack.names[name]).objects.all().delete()


FUNCTIONS = ("StatusFunction", "WorkerFunction")
"""Those that the operator's tool looks at."""


@pytest.fixture(scope="session")
def _functions(_stack: Deployed) -> None:
    """The functions as the tool sees them, with the worker's pollers; no code of theirs is run."""
    policy = json.dumps({"Version": "2012-10-17", "Statement": []})
    role = boto3.client("iam").create_role(RoleName="any", AssumeRolePolicyDocument=policy)["Role"]["Arn"]
    code = io.BytesIO()
    with zipfile.ZipFile(code, "w") as archive:
        archive.writestr("app.py", "")
    for name in FUNCTIONS:
        boto3.client("lambda").create_function(
            FunctionName=name,
            Runtime="python3.13",
            Handler="app.handler",
            Role=role,
            Code={"ZipFile": code.getvalue()},
            Environment={"Variables": dict(_stack.environments[name])},
        )
    for lane in ("Interactive", "Standard", "Bulk"):
        queue = boto3.client("sqs").get_queue_attributes(
            QueueUrl=_stack.names[f"{lane}Queue"], AttributeNames=["QueueArn"]
        )
        boto3.client("lambda").create_event_source_mapping(
            FunctionName="WorkerFunction",
            EventSourceArn=queue["Attributes"]["QueueArn"],
            BatchSize=10,
            Enabled=False,  # on, moto hands it what is sent, and runs it in Docker
            ScalingConfig={"MaximumConcurrency": 2},
        )


@pytest.fixture
def tool(deployed: Deployed, _functions: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`backburner` with its arguments, on the stack; the result as Typer's runner gives it."""
    monkeypatch.setattr(sqs, "LOOK_SECONDS", 0)  # moto has one server, which need not be waited for

    def run(*arguments: str, input: str | None = None, stack: str = STACK) -> Any:  # noqa: A002  the runner's word
        runner = CliRunner(env={"BACKBURNER_STACK_NAME": stack})
        return runner.invoke(app, arguments, input=input, catch_exceptions=False)

    return run
