"""Permissions: each action that a function's role may do is needed, shown by taking it away on the deployed stack.

A probe does something that ought to fail while its action is `lacking`, and sees it succeed afterwards. The table
PROBES names one for every function, action and kind of resource that the deployed policies allow; no more, no less.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import boto3
import pytest
from websockets.exceptions import InvalidHandshake, InvalidMessage

from backburner.adapters.dynamodb import ClientsTable, due_shard
from backburner.adapters.secrets import FernetSeals
from backburner.delivery import JITTER, WAITS_SECONDS
from backburner.models import ClientLimits
from backburner.repair import ROWS_MAX
from cli.clients import create_client
from tests.e2e import slack_probes
from tests.e2e.conftest import Fake, Stack, until
from tests.e2e.sockets import ask, connection, is_end, read
from tests.fakes.emulated import function_processes, kill, worker_processes
from tests.fakes.receiver import Receiver, Step

pytestmark = pytest.mark.e2e

FUNCTIONS = ("ingest", "status", "websocket", "slack", "worker", "notifier", "repair", "alerts")

LANES = ("Interactive", "Standard", "Bulk")
PART, PARTS = os.environ.get("BACKBURNER_PROBES_PART"), 3
"""Which third of the probes to run, 0 to 2; all of them if not said."""
LANE_QUEUES = [f"{lane}Queue" for lane in LANES]

SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="
LATER_SECONDS = 600
"""The provider puts a parked job off for so long: longer than these tests take."""
SHORT_SECONDS = 14
"""A worker's timeout that is too short to begin a job: CLOSING_SECONDS + CALL_SECONDS_MIN of execution.py are 15."""
LARGE = 150_000
"""Characters; beyond INLINE_BYTES_MAX, so kept in S3."""

# ── The deployed policies ─────────────────────────────────────────────────────────────────────────────────────────────


class Grant(NamedTuple):
    """What one function may do to one kind of resource."""

    function: str
    action: str
    resource: str


@dataclass(frozen=True)
class Policy:
    """An inline policy of a function's role, as deployed."""

    function: str
    role: str
    name: str
    document: dict[str, Any]


def policies(stack: Stack) -> list[Policy]:
    """The inline policies of the functions' roles."""
    iam, functions = stack.aws("iam"), stack.aws("lambda")
    found = []
    for function in FUNCTIONS:
        arn = functions.get_function_configuration(FunctionName=_function_name(stack, function))["Role"]
        role = arn.rpartition("/")[2]
        assert not iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]
        for name in iam.list_role_policies(RoleName=role)["PolicyNames"]:
            document = iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
            found.append(Policy(function, role, name, document))
    return found


def grants(stack: Stack, policy: Policy) -> Iterator[tuple[int, Grant]]:
    """Every action on every resource that the policy allows, with the number of its statement."""
    for number, statement in enumerate(policy.document["Statement"]):
        assert statement["Effect"] == "Allow"
        for action in _many(statement["Action"]):
            for resource in _many(statement["Resource"]):
                yield number, Grant(policy.function, action, _kind(stack, policy.function, resource))


def without(document: dict[str, Any], number: int, action: str) -> dict[str, Any]:
    """The policy without one action of one statement; without the statement if it has no other."""
    statements = [dict(statement) for statement in document["Statement"]]
    left = [other for other in _many(statements[number]["Action"]) if other != action]
    statements[number : number + 1] = [{**statements[number], "Action": left}] if left else []
    return {**document, "Statement": statements}


def _many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _kind(stack: Stack, function: str, arn: str) -> str:
    """The resource as the template calls it, with index or prefix: its name is another in each stack."""
    outputs = stack.outputs
    kinds = {
        f"table/{outputs['JobsTableName']}": "JobsTable",
        f"table/{outputs['ClientsTableName']}": "ClientsTable",
        f"table/{outputs['ConnectionsTableName']}": "ConnectionsTable",
        outputs["SocketUrl"].split("//")[1].split(".")[0]: "SocketApi",
        f"table/{outputs['LimitsTableName']}": "LimitsTable",
        outputs["PayloadsBucketName"]: "PayloadsBucket",
        **{outputs[f"{lane}QueueUrl"].rpartition("/")[2]: f"{lane}Queue" for lane in LANES},
        outputs["DeadLetterQueueUrl"].rpartition("/")[2]: "DeadLetterQueue",
        outputs["NotificationsQueueUrl"].rpartition("/")[2]: "NotificationsQueue",
        outputs["ProviderSecretArn"].split(":", 5)[5]: "ProviderSecret",
        outputs["WebhookKeySecretArn"].split(":", 5)[5]: "WebhookKeySecret",
        f"log-group:{_log_group(stack, function)}:*": "Logs",
    }
    name = arn.split(":", 5)[5]
    for full, kind in kinds.items():
        if name == full or name.startswith(f"{full}/"):
            return kind + name.removeprefix(full)
    return arn


def _function_name(stack: Stack, function: str) -> str:
    return stack.outputs[f"{function.capitalize()}FunctionName"]


def _log_group(stack: Stack, function: str) -> str:
    reply = stack.aws("lambda").get_function_configuration(FunctionName=_function_name(stack, function))
    return str(reply["LoggingConfig"]["LogGroup"])


# ── What a probe works with ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Scene:
    """The stack, and a way to take the probe's action away for a while."""

    stack: Stack
    fake: Fake
    mark: str
    lacking: Callable[[], AbstractContextManager[None]]

    def post(self, **fields: Any) -> int:
        """Status of POST /jobs; the same job each time."""
        asked = {"prompt": self.mark, **fields}
        return self.stack.http().post("/jobs", json=asked, headers={"Idempotency-Key": self.mark}).status_code

    def get(self, path: str) -> int:
        """Status of GET."""
        return self.stack.http().get(path).status_code

    def with_a_new_key(self, **limits: int) -> Scene:
        """As a client whom no warm function knows, with these limits."""
        factory: Any = boto3.resource
        tables = factory(
            "dynamodb",
            endpoint_url=self.stack.endpoint_url,
            region_name=self.stack.region,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        table = tables.Table(self.stack.outputs["ClientsTableName"])
        now = time.time_ns() // 1_000_000
        key = create_client(
            table, f"client-{uuid.uuid4().hex}", "a new client", now, limits=ClientLimits(**limits) if limits else None
        )
        return replace(self, stack=replace(self.stack, api_key=key))

    def parked(self, *steps: dict[str, Any], prompt: str = "", **fields: Any) -> str:
        """A job that its provider put off for long: queued, with no hint on its way. Later calls get the steps."""
        off = {
            "status": 503,
            "headers": {"retry-after": str(LATER_SECONDS)},
            "body": {"error": {"message": "later"}},
        }
        self.fake.script(self.mark, off, *(steps or ({"text": "at last"},)))
        job_id: str = self.stack.submit(key=self.mark, prompt=self.mark + prompt, max_tokens=100_000, **fields)[
            "job_id"
        ]

        def put_off() -> bool:
            job = self.stack.job(job_id)
            return job["status"] == "queued" and bool(job.get("receipt"))

        until(put_off, 30, lambda: f"not put off: {self.stack.job(job_id)}")
        return job_id

    def with_a_target(self, job_id: str) -> str:
        """Give the job a target that no channel serves: each try to tell it fails, and is counted."""
        self.stack.aws("dynamodb").update_item(
            TableName=self.stack.outputs["JobsTableName"],
            Key={"job_id": {"S": job_id}},
            UpdateExpression="SET targets = :targets",
            ConditionExpression="attribute_exists(due_at)",
            ExpressionAttributeValues={":targets": {"S": '["nowhere"]'}},
        )
        return job_id

    def tries(self, job_id: str) -> int:
        """How often that target was to be told."""
        (told,) = self.stack.job(job_id)["deliveries"]
        return int(told["tries"])

    def is_tried(self, job_id: str) -> None:
        """Wait until it was to be told."""
        until(lambda: self.tries(job_id) > 0, 20, lambda: str(self.stack.job(job_id)))

    def is_let_in(self, ticket: str | None = None) -> bool:
        """Whether a WebSocket connection can be opened."""
        try:
            with connection(self.stack, ticket):
                return True
        except (InvalidHandshake, InvalidMessage):
            return False

    def telling(self, job_id: str) -> dict[str, Any]:
        """How far the telling of the job's only target is."""
        (told,) = self.stack.job(job_id)["deliveries"]
        return dict(told)

    def haunt(self, job_id: str) -> None:
        """Let a connection that is gone follow the job."""
        self.stack.aws("dynamodb").put_item(
            TableName=self.stack.outputs["ConnectionsTableName"],
            Item={
                "pk": {"S": f"job#{job_id}"},
                "sk": {"S": "a-ghost"},
                "name": {"S": "s"},
                "draft": {"N": "0"},
                "position": {"N": "0"},
                "expires_at": {"N": str(int(time.time()) + 600)},
            },
        )

    def is_haunted(self, job_id: str) -> bool:
        """Whether it still does."""
        key = {"pk": {"S": f"job#{job_id}"}, "sk": {"S": "a-ghost"}}
        table = self.stack.outputs["ConnectionsTableName"]
        return "Item" in self.stack.aws("dynamodb").get_item(TableName=table, Key=key, ConsistentRead=True)

    def is_counted(self, job_id: str) -> bool:
        """Whether any connection counts the job among those that it follows."""
        reply = self.stack.aws("dynamodb").scan(
            TableName=self.stack.outputs["ConnectionsTableName"],
            FilterExpression="contains(jobs, :job)",
            ExpressionAttributeValues={":job": {"S": job_id}},
        )
        return bool(reply["Items"])

    def untold(self) -> str:
        """An ended job of whose target no message tells: by the worker of a probe, its last message is lost."""
        job_id = self.with_a_target(self.parked())
        queue = self.stack.outputs["NotificationsQueueUrl"]
        with self.without_notifier():
            assert self.stack.http().delete(f"/jobs/{job_id}").status_code == 200
            self.stack.aws("sqs").purge_queue(QueueUrl=queue)
        assert self.tries(job_id) == 0
        return job_id

    @contextmanager
    def without_notifier(self) -> Iterator[None]:
        """Nobody takes messages from the notifications queue."""
        functions = self.stack.aws("lambda")
        sources = functions.list_event_source_mappings(FunctionName=_function_name(self.stack, "notifier"))
        (uuid_,) = [source["UUID"] for source in sources["EventSourceMappings"]]
        functions.update_event_source_mapping(UUID=uuid_, Enabled=False)
        try:
            yield
        finally:
            functions.update_event_source_mapping(UUID=uuid_, Enabled=True)

    def tell(self, job_id: str, tries: int = 0) -> bool:
        """Give a notifier a message, and wait; whether it did what was to be done, so that the message is deleted."""
        telling = {"job_id": job_id, "target": "nowhere", "tries": tries, "v": 1}
        reply = self.stack.aws("lambda").invoke(
            FunctionName=_function_name(self.stack, "notifier"),
            Payload=json.dumps({"Records": [{"messageId": "telling", "body": json.dumps(telling)}]}),
        )
        answer = json.loads(reply["Payload"].read())
        assert "FunctionError" not in reply, answer
        failures: list[Any] = answer["batchItemFailures"]
        return not failures

    def turn(self, job_id: str, *instants: str) -> None:
        """Let these instants of the row be long past."""
        self.stack.aws("dynamodb").update_item(
            TableName=self.stack.outputs["JobsTableName"],
            Key={"job_id": {"S": job_id}},
            UpdateExpression="SET " + ", ".join(f"{instant} = :past" for instant in instants),
            ConditionExpression="attribute_exists(due_at)",
            ExpressionAttributeValues={":past": {"N": "1"}},
        )

    def row(self, job_id: str) -> dict[str, Any]:
        """As DynamoDB has it."""
        reply = self.stack.aws("dynamodb").get_item(
            TableName=self.stack.outputs["JobsTableName"], Key={"job_id": {"S": job_id}}, ConsistentRead=True
        )
        item: dict[str, Any] = reply["Item"]
        return item

    def instant(self, job_id: str, name: str) -> int:
        """One of the row's, in epoch milliseconds."""
        return int(self.row(job_id)[name]["N"])

    def tally(self, job_id: str) -> int:
        """The tokens that the jobs of the job's client hold of today's budget."""
        key = {"limit_id": {"S": f"client#{self.row(job_id)['client_id']['S']}"}}
        table = self.stack.outputs["LimitsTableName"]
        reply = self.stack.aws("dynamodb").get_item(TableName=table, Key=key, ConsistentRead=True)
        return int(reply["Item"]["tokens"]["N"])

    def unsettled(self) -> str:
        """An ended job of a client with a budget, whose charge was never settled; nobody has looked at it yet."""
        client = self.with_a_new_key(tokens_per_day=1_000_000)
        job_id = client.parked()
        charge = self.row(job_id)["charge"]
        with self.unsettling():
            assert client.stack.http().delete(f"/jobs/{job_id}").status_code == 200
        assert self.row(job_id)["charge"] == charge
        return job_id

    @contextmanager
    def unsettling(self) -> Iterator[None]:
        """The Limits table is out of the status function's reach: it is told another name."""
        functions, name = self.stack.aws("lambda"), _function_name(self.stack, "status")
        variables = functions.get_function_configuration(FunctionName=name)["Environment"]["Variables"]

        def say(table: str) -> None:
            functions.update_function_configuration(
                FunctionName=name, Environment={"Variables": {**variables, "LIMITS_TABLE": table}}
            )

        say("none")
        try:
            yield
        finally:
            say(variables["LIMITS_TABLE"])

    def holds_a_slot(self, job_id: str) -> None:
        """Let the job hold a slot some minutes from now."""
        slot = {"model": "gpt-5.4-mini", "start_at": time.time_ns() // 1_000_000 + 300_000, "input_tokens": 1,
                "output_tokens": 1, "costs": {"requests": 1}, "guess": [1.0, 1.0]}  # fmt: skip
        self.stack.aws("dynamodb").update_item(
            TableName=self.stack.outputs["JobsTableName"],
            Key={"job_id": {"S": job_id}},
            UpdateExpression="SET slot = :slot",
            ExpressionAttributeValues={":slot": {"S": json.dumps(slot)}},
        )

    def vacancies(self) -> list[int]:
        """What the slots that were given back are worth in requests."""
        row = self.stack.aws("dynamodb").get_item(
            TableName=self.stack.outputs["LimitsTableName"],
            Key={"limit_id": {"S": "model#gpt-5.4-mini"}},
            ConsistentRead=True,
        )["Item"]
        return [vacancy["costs"]["requests"] for vacancy in json.loads(row["state"]["S"])["vacant"]]

    def is_due(self, job_id: str) -> bool:
        """Whether the row says that somebody must look at it."""
        return self.instant(job_id, "due_at") <= time.time_ns() // 1_000_000

    def status(self, job_id: str) -> str:
        """The job's."""
        return str(self.stack.job(job_id)["status"])

    def work(self, job_id: str) -> bool:
        """Give a worker a hint, and wait; whether it did what was to be done, so that the hint is deleted."""
        hint = {"messageId": "hint", "body": json.dumps({"job_id": job_id, "v": 1})}
        reply = self.stack.aws("lambda").invoke(
            FunctionName=_function_name(self.stack, "worker"), Payload=json.dumps({"Records": [hint]})
        )
        answer = json.loads(reply["Payload"].read())
        assert "FunctionError" not in reply, answer
        failures: list[Any] = answer["batchItemFailures"]
        return not failures

    def repair_fails(self) -> bool:
        """Let the repairer run; whether it ended with an error."""
        reply = self.stack.aws("lambda").invoke(FunctionName=_function_name(self.stack, "repair"), Payload=b"{}")
        return "FunctionError" in reply

    def repair_notes(self) -> str:
        """Let the repairer run; what it notes."""
        began = time.time_ns() // 1_000_000
        self.stack.repair()
        until(lambda: "repair_ran" in str(self.lines("repair", began)), 10, lambda: "repair notes nothing")
        return str(self.lines("repair", began))

    def finish(self, job_id: str) -> None:
        """With all permissions, the row brings the job to its end: repairer, queue, worker."""
        with suppress(self.stack.aws("dynamodb").exceptions.ConditionalCheckFailedException):
            self.turn(job_id, "due_at", "available_at", "lease_until")
        self.stack.repair()
        assert self.stack.ended(job_id)["status"] == "completed"

    @contextmanager
    def backlog(self, job_id: str) -> Iterator[None]:
        """As many rows like this job's as the repairer moves on in a run; all fall due within the minute."""
        table = self.stack.aws("dynamodb", resource=True).Table(self.stack.outputs["JobsTableName"])
        row = table.get_item(Key={"job_id": job_id})["Item"]
        names = [f"{job_id}-{number}" for number in range(ROWS_MAX)]
        due_at = int(time.time() * 1000) + 55_000
        with table.batch_writer() as batch:
            for name in names:
                batch.put_item(Item=row | {"job_id": name, "due_shard": due_shard(name), "due_at": due_at})
        try:
            yield
        finally:
            with table.batch_writer() as batch:
                for name in names:
                    batch.delete_item(Key={"job_id": name})

    @contextmanager
    def short_of_time(self) -> Iterator[None]:
        """Workers have no time to begin a job."""
        functions, name = self.stack.aws("lambda"), _function_name(self.stack, "worker")
        seconds = functions.get_function_configuration(FunctionName=name)["Timeout"]
        functions.update_function_configuration(FunctionName=name, Timeout=SHORT_SECONDS)
        try:
            yield
        finally:
            functions.update_function_configuration(FunctionName=name, Timeout=seconds)

    def delayed_hints(self) -> int:
        """How many hints wait for their time."""
        return _depth(self.stack, "StandardQueue", "Delayed")

    def is_explained(self, word: str) -> bool:
        """Whether the repairer, given a letter without a reason, puts one with a reason in its place."""
        text, before = f"{word} {self.mark}", self.all_letters()
        self.stack.aws("sqs").send_message(QueueUrl=self.stack.outputs["DeadLetterQueueUrl"], MessageBody=text)
        self.stack.repair()
        reasons = [letter.get("MessageAttributes", {}).get("reason") for letter in self.stack.dead_letters(text)]
        return any(reasons) and self.all_letters() == before + 1

    def all_letters(self) -> int:
        """How many letters there are, also those out of sight since somebody has just looked at them."""
        return _depth(self.stack, "DeadLetterQueue", "", "NotVisible")

    def hints_in_hand(self, queue: str) -> int:
        """How many hints were received and not yet deleted."""
        return _depth(self.stack, queue, "NotVisible")

    def knows_the_depth(self, lane: str) -> bool:
        """Whether a fresh ingest process, which remembers no depth, sees how many hints wait before a job's own."""
        url = self.stack.outputs["StandardQueueUrl"]
        kill(function_processes(_function_name(self.stack, "ingest"), f"STANDARD_QUEUE_URL={url}"))
        return "ahead" in self.row(self.stack.submit(prompt=self.mark, priority=lane)["job_id"])

    @contextmanager
    def full(self, lane: str) -> Iterator[None]:
        """The lane takes one job, and holds two that no worker gets."""
        functions, sqs, name = self.stack.aws("lambda"), self.stack.aws("sqs"), _function_name(self.stack, "ingest")
        url = self.stack.outputs[f"{lane.capitalize()}QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        (poller,) = functions.list_event_source_mappings(EventSourceArn=arn)["EventSourceMappings"]
        variables = functions.get_function_configuration(FunctionName=name)["Environment"]["Variables"]

        def set_up(depth_max: str, *, polled: bool) -> None:
            functions.update_event_source_mapping(UUID=poller["UUID"], Enabled=polled)
            functions.update_function_configuration(
                FunctionName=name, Environment={"Variables": {**variables, "LANE_DEPTH_MAX": depth_max}}
            )

        set_up("1", polled=False)
        try:
            for _ in range(2):
                sqs.send_message(QueueUrl=url, MessageBody='{"job_id":"job_nobody","v":1}')
            yield
        finally:
            sqs.purge_queue(QueueUrl=url)
            set_up(variables["LANE_DEPTH_MAX"], polled=True)

    def lose_object(self, prefix: str) -> None:
        """Delete the one object of the payloads bucket with this prefix."""
        s3, bucket = self.stack.aws("s3"), self.stack.outputs["PayloadsBucketName"]
        (found,) = s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
        s3.delete_object(Bucket=bucket, Key=found["Key"])

    def road(self, lane: str = "standard") -> str:
        """A job by way of all functions; its id."""
        job_id: str = self.stack.submit(prompt=self.mark, priority=lane)["job_id"]
        assert self.stack.ended(job_id)["status"] == "completed"
        assert self.tell(job_id)  # there is nobody to tell
        self.connect_by_hand()
        self.stack.repair()
        return job_id

    def connect_by_hand(self) -> None:
        """What API Gateway sends for a new connection, by way of Lambda: the emulator logs nothing of its own calls."""
        event = {
            "requestContext": {"routeKey": "$connect", "connectionId": f"by-hand-{self.mark}"},
            "headers": {"x-api-key": self.stack.api_key},
        }
        reply = self.stack.aws("lambda").invoke(
            FunctionName=_function_name(self.stack, "websocket"), Payload=json.dumps(event)
        )
        assert json.loads(reply["Payload"].read()) == {"statusCode": 200}

    def lines(self, function: str, began: int) -> list[str]:
        """What the function has logged since, in epoch milliseconds."""
        reply = self.stack.aws("logs").filter_log_events(logGroupName=_log_group(self.stack, function), startTime=began)
        return [event["message"] for event in reply["events"]]


def end_processes(stack: Stack, function: str) -> None:
    """Let the function's next call be a cold start."""
    wanted = f"NOTIFICATIONS_QUEUE_URL={stack.outputs['NotificationsQueueUrl']}"
    kill(function_processes(_function_name(stack, function), wanted))


def _depth(stack: Stack, queue: str, *states: str) -> int:
    """Messages in these states, "" for visible, all counted at one moment."""
    names = [f"ApproximateNumberOfMessages{state}" for state in states]
    reply = stack.aws("sqs").get_queue_attributes(QueueUrl=stack.outputs[f"{queue}Url"], AttributeNames=names)
    return sum(int(reply["Attributes"][name]) for name in names)


# ── The probes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def a_request_is_stored(scene: Scene) -> None:
    """503, and nothing is there; then accepted."""
    with scene.lacking():
        assert scene.post() == 503
    reply = scene.stack.http().post("/jobs", json={"prompt": scene.mark}, headers={"Idempotency-Key": scene.mark})
    assert reply.status_code == 202
    assert "Idempotent-Replayed" not in reply.headers
    assert scene.stack.ended(reply.json()["job_id"])["status"] == "completed"


def an_overdue_job_is_hinted_by_a_replay(scene: Scene) -> None:
    """503; then the replay moves the row's clock on."""
    job_id = scene.parked()
    scene.turn(job_id, "due_at")
    asked = {"max_tokens": 100_000}
    with scene.lacking():
        assert scene.post(**asked) == 503
        assert scene.is_due(job_id)
    assert scene.post(**asked) == 202
    assert not scene.is_due(job_id)
    scene.finish(job_id)


def a_new_clients_key_is_known_to_ingest(scene: Scene) -> None:
    """503; then accepted."""
    client = scene.with_a_new_key()
    with scene.lacking():
        assert client.post() == 503
    assert client.post() == 202


def a_replay_is_known_where_its_lane_is_full(scene: Scene) -> None:
    """503; then the job of the key, while others are refused."""
    job_id = scene.stack.submit(key=scene.mark, prompt=scene.mark, priority="bulk")["job_id"]
    assert scene.stack.ended(job_id)["status"] == "completed"
    with scene.full("bulk"):
        refused = scene.stack.submit(status=503, prompt=scene.mark, priority="bulk")
        assert refused["code"] == "lane_full"
        with scene.lacking():
            assert scene.post(priority="bulk") == 503
        assert scene.post(priority="bulk") == 202


def a_lanes_depth_is_seen(scene: Scene, lane: str) -> None:
    """The job is accepted all the same, but nobody knows how many were before it."""
    with scene.lacking():
        assert not scene.knows_the_depth(lane)
    assert scene.knows_the_depth(lane)


def a_waiting_jobs_position_is_told(scene: Scene, lane: str) -> None:
    """As it was when the job was accepted; then as the lane is now, which is empty."""
    job_id = scene.parked(priority=lane)
    scene.stack.aws("dynamodb").update_item(
        TableName=scene.stack.outputs["JobsTableName"],
        Key={"job_id": {"S": job_id}},
        UpdateExpression="SET claims = :none, ahead = :many",
        ExpressionAttributeValues={":none": {"N": "0"}, ":many": {"N": "1000"}},
    )

    def told() -> int:
        position: int = scene.stack.job(job_id)["position"]
        return position

    def position(expected: range) -> None:
        until(lambda: told() in expected, 20, lambda: f"position {told()}")

    with scene.lacking():
        position(range(1001, 1002))
    position(range(1, 1000))
    assert scene.stack.http().delete(f"/jobs/{job_id}").json()["status"] == "cancelled"


def a_limited_clients_job_is_counted(scene: Scene) -> None:
    """503, and nothing is there; then accepted."""
    client = scene.with_a_new_key(tokens_per_day=1_000_000)
    with scene.lacking():
        assert client.post() == 503
    assert client.stack.http().get("/jobs").json()["jobs"] == []
    assert client.post() == 202


def a_charge_is_settled_by_the_repairer(scene: Scene) -> None:
    """The tally stays as it is, and the row due; then what was not used is given back."""
    job_id = scene.unsettled()
    held = scene.tally(job_id)
    assert held > 0
    scene.turn(job_id, "due_at")
    with scene.lacking():
        scene.stack.repair()
        assert scene.tally(job_id) == held
    scene.turn(job_id, "due_at")
    scene.stack.repair()
    assert scene.tally(job_id) == 0


def a_request_is_hinted(scene: Scene, lane: str) -> None:
    """503, with the row due; then the repairer brings it to its end."""
    with scene.lacking():
        assert scene.post(priority=lane) == 503
    page = scene.stack.http().get("/jobs", params={"limit": 1}).json()
    (job,) = page["jobs"]
    assert scene.is_due(job["job_id"])
    scene.finish(job["job_id"])
    assert len(scene.fake.calls(scene.mark)) == 1


def a_large_request_is_kept(scene: Scene) -> None:
    """503; then accepted, and answered."""
    prompt = scene.mark + "a" * LARGE
    with scene.lacking():
        assert scene.post(prompt=prompt) == 503
    job_id = scene.stack.submit(key=scene.mark, prompt=prompt)["job_id"]
    assert scene.stack.ended(job_id)["status"] == "completed"


def a_job_is_shown(scene: Scene) -> None:
    """503; then 200."""
    job_id = scene.stack.submit(prompt=scene.mark)["job_id"]
    with scene.lacking():
        assert scene.get(f"/jobs/{job_id}") == 503
    assert scene.stack.ended(job_id)["status"] == "completed"


def jobs_are_listed(scene: Scene) -> None:
    """503; then 200 with the job."""
    job_id = scene.stack.submit(prompt=scene.mark)["job_id"]
    with scene.lacking():
        assert scene.get("/jobs?limit=1") == 503
    reply = scene.stack.http().get("/jobs", params={"limit": 1})
    assert [job["job_id"] for job in reply.json()["jobs"]] == [job_id]


def a_job_is_cancelled(scene: Scene) -> None:
    """503; then cancelled."""
    job_id = scene.parked()
    with scene.lacking():
        assert scene.stack.http().delete(f"/jobs/{job_id}").status_code == 503
        assert scene.status(job_id) == "queued"
    assert scene.stack.http().delete(f"/jobs/{job_id}").json()["status"] == "cancelled"


def a_new_clients_key_is_known_to_status(scene: Scene) -> None:
    """503; then the usual 404."""
    client = scene.with_a_new_key()
    with scene.lacking():
        assert client.get("/jobs/job_nobody") == 503
    assert client.get("/jobs/job_nobody") == 404


def a_large_result_is_shown(scene: Scene) -> None:
    """503; then the text."""
    scene.fake.script(scene.mark, {"text": "a" * LARGE, "finish_reason": "stop"})
    job_id = scene.stack.submit(prompt=scene.mark, max_tokens=100_000)["job_id"]
    scene.stack.ended(job_id)
    with scene.lacking():
        assert scene.get(f"/jobs/{job_id}") == 503
    assert scene.stack.job(job_id)["result"]["text"] == "a" * LARGE


def a_large_request_is_shown(scene: Scene) -> None:
    """503; then the response, which says what was asked."""
    job_id = scene.stack.submit(prompt=scene.mark, system_prompt="a" * LARGE)["job_id"]
    scene.stack.ended(job_id)
    with scene.lacking():
        assert scene.get(f"/v1/responses/{job_id}") == 503
    assert scene.get(f"/v1/responses/{job_id}") == 200


def a_large_request_is_erased(scene: Scene) -> None:
    """Its row is gone either way; the object stays without."""
    _is_erased(scene, "requests", prompt=scene.mark + "a" * LARGE)


def a_large_result_is_erased(scene: Scene) -> None:
    """Its row is gone either way; the object stays without."""
    scene.fake.script(scene.mark, *({"text": "a" * LARGE, "finish_reason": "stop"} for _ in range(2)))
    _is_erased(scene, "results", prompt=scene.mark, max_tokens=100_000)


def _is_erased(scene: Scene, prefix: str, **fields: Any) -> None:
    s3, bucket = scene.stack.aws("s3"), scene.stack.outputs["PayloadsBucketName"]
    for allowed in (False, True):
        job_id = scene.stack.submit(**fields)["job_id"]
        scene.stack.ended(job_id)
        with nullcontext() if allowed else scene.lacking():
            assert scene.stack.http().delete(f"/v1/responses/{job_id}").status_code == 200
        left = s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/{job_id}").get("KeyCount", 0)
        assert left == (0 if allowed else 1)


def a_hint_is_passed_on_where_no_time_is_left(scene: Scene) -> None:
    """The hint comes back, which costs it a receive; then another takes its place."""
    job_id = scene.parked()
    before = scene.delayed_hints()
    with scene.short_of_time():
        with scene.lacking():
            assert not scene.work(job_id)
            assert scene.delayed_hints() == before
        assert scene.work(job_id)
        assert scene.delayed_hints() == before + 1
    assert scene.stack.http().delete(f"/jobs/{job_id}").status_code == 200


def a_job_is_claimed(scene: Scene) -> None:
    """The hint comes back and no call is made; then the job is answered."""
    job_id = scene.parked()
    scene.turn(job_id, "available_at")
    with scene.lacking():
        assert not scene.work(job_id)
        assert len(scene.fake.calls(scene.mark)) == 1
    scene.finish(job_id)


def a_retry_is_hinted(scene: Scene, lane: str) -> None:
    """The job is put back with no hint, which its row tells; then it is answered."""
    off = {"status": 503, "headers": {"retry-after": str(LATER_SECONDS)}}
    job_id = scene.parked(off, {"text": "at last"}, priority=lane)
    scene.turn(job_id, "available_at")
    with scene.lacking():
        assert scene.work(job_id)
        assert scene.is_due(job_id)
    scene.finish(job_id)


def a_dead_job_gets_its_letter(scene: Scene) -> None:
    """The job fails without a letter; then the repairer sends it."""
    job_id = scene.parked({"status": 401, "body": {"error": {"code": "invalid_api_key"}}})
    scene.turn(job_id, "available_at")
    before = scene.all_letters()
    with scene.lacking():
        assert scene.work(job_id)
        assert scene.status(job_id) == "failed"
        assert scene.all_letters() == before
    scene.turn(job_id, "due_at")
    scene.stack.repair()
    assert scene.all_letters() == before + 1


def a_fresh_worker_reads_the_provider_key(scene: Scene) -> None:
    """The job is put back at no cost, without a call; then it is answered."""
    kill(worker_processes(scene.stack.outputs["WorkerFunctionName"], scene.stack.outputs["StandardQueueUrl"]))
    with scene.lacking():
        job_id = scene.stack.submit(prompt=scene.mark)["job_id"]
        accepted = scene.instant(job_id, "created_at")
        until(lambda: scene.instant(job_id, "available_at") > accepted, 30, lambda: str(scene.stack.job(job_id)))
        job = scene.stack.job(job_id)
        assert (job["status"], job["attempts"]) == ("queued", 0)
    assert not scene.fake.calls(scene.mark)
    scene.finish(job_id)


def a_large_request_is_read(scene: Scene) -> None:
    """The job is put back at no cost, without a call; then it is answered."""
    job_id = scene.parked(prompt="a" * LARGE)
    scene.turn(job_id, "available_at")
    with scene.lacking():
        assert scene.work(job_id)
        job = scene.stack.job(job_id)
        assert (job["status"], job["attempts"]) == ("queued", 1)
        assert len(scene.fake.calls(scene.mark)) == 1
    scene.finish(job_id)


def a_large_result_is_kept(scene: Scene) -> None:
    """The hint comes back and the job is left to its lease; then another call's answer is stored."""
    job_id = scene.parked({"text": "a" * LARGE, "finish_reason": "stop"})
    scene.turn(job_id, "available_at")
    with scene.lacking():
        assert not scene.work(job_id)
        assert scene.status(job_id) == "processing"
    scene.finish(job_id)


def limits_are_read(scene: Scene) -> None:
    """A worker that does not know a model's limits puts the job back at no cost; then it is answered."""
    model = "gpt-5.6-luna"  # no other test asks for it, so no worker knows its limits
    with scene.lacking():
        job_id = scene.stack.submit(prompt=scene.mark, model=model)["job_id"]
        until(lambda: scene.instant(job_id, "claims"), 30, lambda: "no worker took it")
        until(lambda: scene.status(job_id) == "queued", 30, lambda: "not put back")
        assert scene.fake.calls(scene.mark) == []
    scene.finish(job_id)


def a_slot_is_reserved(scene: Scene) -> None:
    """The job is put back at no cost; then it is answered."""
    with scene.lacking():
        job_id = scene.stack.submit(prompt=scene.mark)["job_id"]
        until(lambda: scene.instant(job_id, "claims"), 30, lambda: "no worker took it")
        until(lambda: scene.status(job_id) == "queued", 30, lambda: "not put back")
        assert scene.fake.calls(scene.mark) == []
    scene.finish(job_id)


def a_cancelled_jobs_slot_is_given_back(scene: Scene) -> None:
    """Cancelled all the same, but nobody else gets the slot; then somebody does."""
    for vacant in (False, True):
        scene.stack.limit("gpt-5.4-mini", 10**12)
        mark = replace(scene, mark=f"{scene.mark}-{vacant}")
        mark.road()
        job_id = mark.parked()
        mark.holds_a_slot(job_id)
        with nullcontext() if vacant else scene.lacking():
            assert scene.stack.http().delete(f"/jobs/{job_id}").json()["status"] == "cancelled"
        assert mark.vacancies() == ([1] if vacant else [])


def an_overdue_job_is_moved_on(scene: Scene, lane: str = "standard") -> None:
    """The row stays due; then it is hinted and answered."""
    job_id = scene.parked(priority=lane)
    scene.turn(job_id, "due_at")
    with scene.lacking():
        scene.stack.repair()
        assert scene.is_due(job_id)
    scene.stack.repair()
    assert not scene.is_due(job_id)
    scene.finish(job_id)


def a_repair_runs(scene: Scene) -> None:
    """It ends with an error; then without."""
    with scene.lacking():
        assert scene.repair_fails()
    assert not scene.repair_fails()


def the_oldest_jobs_are_seen(scene: Scene) -> None:
    """Nobody knows how long they have waited; then it is noted."""
    with scene.lacking():
        assert "lane_unseen" in scene.repair_notes()
    assert "lane_seen" in scene.repair_notes()


def jobs_in_hand_are_seen_behind_a_backlog(scene: Scene) -> None:
    """They are not, and the backlog is moved on all the same; then they are."""
    job_id = scene.parked()
    with scene.backlog(job_id):
        for seen in (False, True):
            with nullcontext() if seen else scene.lacking():
                assert ("jobs_in_hand_unseen" in scene.repair_notes()) is not seen
    scene.finish(job_id)


def a_letter_without_reason_is_explained(scene: Scene) -> None:
    """No reason is given, or the old letter stays as well; then one with a reason takes its place."""
    with scene.lacking():
        assert not scene.is_explained("first")
    assert scene.is_explained("second")


def a_worker_announces_an_end(scene: Scene) -> None:
    """The job is completed all the same, its target untold; then the repairer announces it."""
    job_id = scene.with_a_target(scene.parked())
    scene.turn(job_id, "available_at")
    with scene.lacking():
        assert scene.work(job_id)
        assert (scene.status(job_id), scene.tries(job_id)) == ("completed", 0)
    scene.turn(job_id, "due_at")
    scene.stack.repair()
    scene.is_tried(job_id)


def a_cancellation_is_announced(scene: Scene) -> None:
    """The job is cancelled all the same, its target untold; then the repairer announces it."""
    job_id = scene.with_a_target(scene.parked())
    with scene.lacking():
        assert scene.stack.http().delete(f"/jobs/{job_id}").json()["status"] == "cancelled"
        assert scene.tries(job_id) == 0
    scene.turn(job_id, "due_at")
    scene.stack.repair()
    scene.is_tried(job_id)


def a_lost_announcement_is_made_again(scene: Scene) -> None:
    """The target stays untold; then it is tried."""
    job_id = scene.untold()
    scene.turn(job_id, "due_at")
    with scene.lacking():
        scene.stack.repair()
        assert scene.tries(job_id) == 0
    scene.turn(job_id, "due_at")
    scene.stack.repair()
    scene.is_tried(job_id)


def a_telling_is_made_and_noted(scene: Scene) -> None:
    """The message comes back and no try was made; then one was."""
    job_id = scene.untold()
    with scene.lacking():
        assert not scene.tell(job_id)
        assert scene.tries(job_id) == 0
    assert scene.tell(job_id)
    scene.is_tried(job_id)


def a_further_try_is_planned(scene: Scene) -> None:
    """The try is noted and the message comes back, to no effect; then the repairer sends the next."""
    job_id = scene.untold()
    with scene.lacking():
        assert not scene.tell(job_id)
        assert scene.tries(job_id) == 1
        assert scene.tell(job_id)
        assert scene.tries(job_id) == 1
    time.sleep(WAITS_SECONDS[0] * (1 + JITTER) + 0.1)
    assert scene.tell(job_id, tries=1)
    assert scene.tries(job_id) == 2


# ── The WebSocket API ────────────────────────────────────────────────────────────────────────────────────────────────


def a_ticket_is_issued(scene: Scene) -> None:
    """503; then 201."""
    with scene.lacking():
        assert scene.stack.http().post("/tickets").status_code == 503
    assert scene.stack.http().post("/tickets").status_code == 201


def a_connection_is_let_in(scene: Scene) -> None:
    """Refused; then opened. By a client whom no warm function knows."""
    client = scene.with_a_new_key()
    with scene.lacking():
        assert not client.is_let_in()
    assert client.is_let_in()


def a_ticket_is_used(scene: Scene) -> None:
    """Refused, and the ticket is still good; then opened."""
    ticket = scene.stack.http().post("/tickets").json()["ticket"]
    with scene.lacking():
        assert not scene.is_let_in(ticket)
    assert scene.is_let_in(ticket)


def a_message_is_answered(scene: Scene) -> None:
    """With silence; then with a frame."""
    with connection(scene.stack) as socket:
        with scene.lacking():
            ask(socket, action="ping")
            with pytest.raises(TimeoutError):
                socket.recv(timeout=3)
        ask(socket, action="ping")
        assert read(socket) == {"type": "pong"}


def a_job_is_followed(scene: Scene) -> None:
    """Unavailable; then its state."""
    job_id = scene.parked()
    with connection(scene.stack) as socket:
        with scene.lacking():
            ask(socket, action="subscribe", job_id=job_id)
            assert read(socket)["problem"]["code"] == "unavailable"
        ask(socket, action="subscribe", job_id=job_id)
        assert read(socket)["job"]["status"] == "queued"
    assert scene.stack.http().delete(f"/jobs/{job_id}").status_code == 200


def pieces_of_an_answer_are_told(scene: Scene) -> None:
    """None while it is written, and the answer at its end all the same; then pieces."""
    pieces = {}
    with connection(scene.stack) as socket:
        for lacking in (True, False):
            scene.fake.script(f"{scene.mark} {lacking}", {"text": "piece " * 40, "chunk_delay_seconds": 0.1})
            with scene.lacking() if lacking else nullcontext():
                job_id = scene.stack.submit(prompt=f"{scene.mark} {lacking}", stream=True)["job_id"]
                ask(socket, action="subscribe", job_id=job_id)
                frames = [read(socket)]
                while not is_end(frames[-1]):
                    frames.append(read(socket))
            pieces[lacking] = [frame["text"] for frame in frames if frame["type"] == "delta"]
    assert not pieces[True]
    assert pieces[False]


def a_gone_listener_is_removed_while_an_answer_is_written(scene: Scene) -> None:
    """It stays while the worker may not remove it; then it is gone before the job has ended."""
    left = {}
    for lacking in (True, False):
        prompt = f"{scene.mark} {lacking}"
        scene.fake.script(prompt, {"text": "piece " * 40, "chunk_delay_seconds": 0.2})
        with scene.lacking() if lacking else nullcontext():
            job_id = scene.stack.submit(prompt=prompt, stream=True)["job_id"]
            scene.haunt(job_id)
            until(partial(scene.fake.calls, prompt), 30, lambda: "the call did not begin")
            time.sleep(2)  # some looks at who listens
            assert scene.status(job_id) == "processing"
            left[lacking] = scene.is_haunted(job_id)
        scene.stack.ended(job_id)
    assert left == {True: True, False: False}


def a_listener_told_by_the_worker_follows_no_more(scene: Scene) -> None:
    """Its connection goes on counting the job while the worker may not write there; then it does not."""
    with connection(scene.stack) as socket, scene.without_notifier():
        for lacking in (True, False):
            prompt = f"{scene.mark} {lacking}"
            scene.fake.script(prompt, {"text": "well", "latency_seconds": 3})
            with scene.lacking() if lacking else nullcontext():
                job_id = scene.stack.submit(prompt=prompt, stream=True)["job_id"]
                ask(socket, action="subscribe", job_id=job_id)
                end = read(socket, is_end)["job"]
                assert (end["job_id"], end["status"]) == (job_id, "completed")
                time.sleep(1)  # to note that it was told
                assert scene.is_counted(job_id) is lacking


def the_end_is_told_to_listeners(scene: Scene) -> None:
    """The telling fails, or is not known to have happened; then it is noted as done."""
    with connection(scene.stack) as socket:
        job_id = scene.parked(stream=True)
        ask(socket, action="subscribe", job_id=job_id)
        read(socket)
        scene.haunt(job_id)
        with scene.lacking():
            assert scene.stack.http().delete(f"/jobs/{job_id}").status_code == 200
            until(lambda: scene.telling(job_id).get("last_error"), 20, lambda: str(scene.stack.job(job_id)))
            assert scene.telling(job_id)["status"] == "pending"
        until(lambda: scene.telling(job_id)["status"] == "delivered", 40, lambda: str(scene.stack.job(job_id)))
        assert read(socket, is_end)["job"]["status"] == "cancelled"
        assert not scene.is_haunted(job_id)


# ── Webhooks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def a_fresh_ingest_seals_a_webhook_secret(scene: Scene) -> None:
    """503; then accepted."""
    end_processes(scene.stack, "ingest")
    with Receiver() as receiver:
        asked = {"webhook": {"url": receiver.url, "secret": SECRET}}
        with scene.lacking():
            assert scene.post(**asked) == 503
        assert scene.post(**asked) == 202


def a_fresh_notifier_opens_a_webhook_secret(scene: Scene) -> None:
    """Nothing is sent, and the try is noted; then the webhook arrives."""
    end_processes(scene.stack, "notifier")
    _is_told_only_with_the_permission(scene, {"secret": SECRET})


def a_clients_own_webhook_secret_is_found(scene: Scene) -> None:
    """Nothing is sent, and the try is noted; then the webhook arrives."""
    table = ClientsTable(scene.stack.aws("dynamodb"), scene.stack.outputs["ClientsTableName"])
    keys = FernetSeals(lambda: scene.stack.aws("secretsmanager"), scene.stack.outputs["WebhookKeySecretArn"])
    table.put_webhook_secret("local", keys.seal(SECRET), 0, previous_until=0)
    _is_told_only_with_the_permission(scene, {})


def a_large_result_is_told(scene: Scene) -> None:
    """Nothing is sent, and the try is noted; then the webhook arrives."""
    scene.fake.script(scene.mark, {"text": "a" * LARGE, "finish_reason": "stop"})
    _is_told_only_with_the_permission(scene, {"secret": SECRET})


def _is_told_only_with_the_permission(scene: Scene, webhook: dict[str, str]) -> None:
    with Receiver() as receiver:
        with scene.lacking():
            asked: Any = {"prompt": scene.mark, "max_tokens": 100_000, "webhook": {"url": receiver.url, **webhook}}
            job_id = scene.stack.submit(**asked)["job_id"]
            scene.stack.ended(job_id)
            scene.is_tried(job_id)
            until(lambda: "last_error" in scene.stack.job(job_id)["deliveries"][0], 20, lambda: "no error")
            assert receiver.requests == []
        until(lambda: receiver.requests, 60, lambda: str(scene.stack.job(job_id)))


# ── What goes well on the emulator alone ──────────────────────────────────────────────────────────────────────────────


def a_call_is_logged(scene: Scene, function: str) -> None:
    """Lambda writes the lines in the role's name; the emulator writes them itself, and asks no policy."""
    with scene.lacking():
        began = time.time_ns() // 1_000_000
        {"slack": slack_probes.road, "alerts": slack_probes.alarm}.get(function, Scene.road)(scene)
        until(lambda: scene.lines(function, began), 10, lambda: f"{function} logs nothing")


def a_hint_is_received_and_deleted(scene: Scene, lane: str) -> None:
    """Lambda polls in the role's name, and asks for all three when the trigger is made; the emulator asks no policy."""
    with scene.lacking():
        queue = f"{lane.capitalize()}Queue"
        before = scene.hints_in_hand(queue)
        scene.road(lane)
        until(lambda: scene.hints_in_hand(queue) <= before, 10, lambda: "the hint is still in the queue")


def a_telling_is_received_and_deleted(scene: Scene) -> None:
    """As for hints."""
    with scene.lacking():
        job_id = scene.with_a_target(scene.parked())
        assert scene.stack.http().delete(f"/jobs/{job_id}").status_code == 200
        scene.is_tried(job_id)


def a_missing_result_is_told_as_such(scene: Scene) -> None:
    """Without s3:ListBucket, S3 says 403 of a missing object, which would be tried again; the emulator says 404."""
    scene.fake.script(scene.mark, {"text": "a" * LARGE, "finish_reason": "stop"})
    with Receiver([Step(503)]) as receiver, scene.lacking():
        asked: Any = {"prompt": scene.mark, "max_tokens": 100_000, "webhook": {"url": receiver.url, "secret": SECRET}}
        job_id = scene.stack.submit(**asked)["job_id"]
        until(lambda: receiver.requests, 30, lambda: str(scene.stack.job(job_id)))
        scene.lose_object(f"results/{job_id}/")
        until(lambda: len(receiver.requests) > 1, 30, lambda: str(scene.stack.job(job_id)))
        assert "no longer stored" in receiver.requests[1].body.decode()


def a_missing_request_ends_its_job(scene: Scene) -> None:
    """Without s3:ListBucket, S3 says 403 of a missing object, so the job would wait for it; the emulator says 404."""
    job_id = scene.parked(prompt="a" * LARGE)
    scene.turn(job_id, "available_at")
    scene.lose_object(f"requests/{job_id}/")
    with scene.lacking():
        assert scene.work(job_id)
        assert scene.status(job_id) == "failed"


def a_missing_result_is_not_called_a_passing_trouble(scene: Scene) -> None:
    """Without s3:ListBucket, S3 says 403 of a missing object, which would be a 503; the emulator says 404."""
    scene.fake.script(scene.mark, {"text": "a" * LARGE, "finish_reason": "stop"})
    job_id = scene.stack.submit(prompt=scene.mark, max_tokens=100_000)["job_id"]
    scene.stack.ended(job_id)
    scene.lose_object(f"results/{job_id}/")
    with scene.lacking():
        assert scene.get(f"/jobs/{job_id}") != 503


# ── The table ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SOCKETS = "SocketApi/api/POST/@connections/*"

PROBES: dict[Grant, Callable[[Scene], None]] = {
    Grant("ingest", "dynamodb:PutItem", "JobsTable"): a_request_is_stored,
    Grant("ingest", "dynamodb:UpdateItem", "JobsTable"): an_overdue_job_is_hinted_by_a_replay,
    Grant("ingest", "dynamodb:GetItem", "ClientsTable"): a_new_clients_key_is_known_to_ingest,
    Grant("ingest", "dynamodb:GetItem", "LimitsTable"): a_limited_clients_job_is_counted,
    Grant("ingest", "dynamodb:UpdateItem", "LimitsTable"): a_limited_clients_job_is_counted,
    Grant("ingest", "dynamodb:GetItem", "JobsTable"): a_replay_is_known_where_its_lane_is_full,
    **{
        Grant(function, action, f"{lane}Queue"): partial(probe, lane=lane.lower())
        for function, action, probe in (
            ("ingest", "sqs:SendMessage", a_request_is_hinted),
            ("ingest", "sqs:GetQueueAttributes", a_lanes_depth_is_seen),
            ("status", "sqs:GetQueueAttributes", a_waiting_jobs_position_is_told),
            ("worker", "sqs:SendMessage", a_retry_is_hinted),
            ("repair", "sqs:SendMessage", an_overdue_job_is_moved_on),
        )
        for lane in LANES
    },
    Grant("ingest", "secretsmanager:GetSecretValue", "WebhookKeySecret"): a_fresh_ingest_seals_a_webhook_secret,
    Grant("ingest", "s3:PutObject", "PayloadsBucket/requests/*"): a_large_request_is_kept,
    Grant("status", "dynamodb:GetItem", "JobsTable"): a_job_is_shown,
    Grant("status", "dynamodb:BatchGetItem", "JobsTable"): jobs_are_listed,
    Grant("status", "dynamodb:UpdateItem", "JobsTable"): a_job_is_cancelled,
    Grant("status", "dynamodb:Query", "JobsTable/index/by_client"): jobs_are_listed,
    Grant("status", "dynamodb:GetItem", "ClientsTable"): a_new_clients_key_is_known_to_status,
    Grant("status", "s3:GetObject", "PayloadsBucket/results/*"): a_large_result_is_shown,
    Grant("status", "s3:GetObject", "PayloadsBucket/requests/*"): a_large_request_is_shown,
    Grant("status", "s3:DeleteObject", "PayloadsBucket/requests/*"): a_large_request_is_erased,
    Grant("status", "s3:DeleteObject", "PayloadsBucket/results/*"): a_large_result_is_erased,
    Grant("status", "sqs:SendMessage", "NotificationsQueue"): a_cancellation_is_announced,
    Grant("status", "dynamodb:PutItem", "ConnectionsTable"): a_ticket_is_issued,
    Grant("websocket", "dynamodb:GetItem", "ClientsTable"): a_connection_is_let_in,
    Grant("websocket", "dynamodb:PutItem", "ConnectionsTable"): a_connection_is_let_in,
    Grant("websocket", "dynamodb:DeleteItem", "ConnectionsTable"): a_ticket_is_used,
    Grant("websocket", "dynamodb:GetItem", "ConnectionsTable"): a_job_is_followed,
    Grant("websocket", "dynamodb:UpdateItem", "ConnectionsTable"): a_job_is_followed,
    Grant("websocket", "dynamodb:GetItem", "JobsTable"): a_job_is_followed,
    Grant("websocket", "dynamodb:UpdateItem", "JobsTable"): a_job_is_followed,
    Grant("websocket", "execute-api:ManageConnections", SOCKETS): a_message_is_answered,
    Grant("status", "dynamodb:GetItem", "LimitsTable"): a_cancelled_jobs_slot_is_given_back,
    Grant("status", "dynamodb:UpdateItem", "LimitsTable"): a_cancelled_jobs_slot_is_given_back,
    Grant("worker", "dynamodb:GetItem", "LimitsTable"): limits_are_read,
    Grant("worker", "dynamodb:UpdateItem", "LimitsTable"): a_slot_is_reserved,
    # These two end the worker's processes; one after the other they cost two cold starts, apart three.
    Grant("worker", "dynamodb:GetItem", "JobsTable"): a_hint_is_passed_on_where_no_time_is_left,
    Grant("worker", "secretsmanager:GetSecretValue", "ProviderSecret"): a_fresh_worker_reads_the_provider_key,
    Grant("worker", "dynamodb:UpdateItem", "JobsTable"): a_job_is_claimed,
    Grant("worker", "sqs:SendMessage", "DeadLetterQueue"): a_dead_job_gets_its_letter,
    Grant("worker", "sqs:SendMessage", "NotificationsQueue"): a_worker_announces_an_end,
    Grant("worker", "s3:GetObject", "PayloadsBucket/requests/*"): a_large_request_is_read,
    Grant("worker", "s3:PutObject", "PayloadsBucket/results/*"): a_large_result_is_kept,
    Grant("worker", "dynamodb:Query", "ConnectionsTable"): pieces_of_an_answer_are_told,
    Grant("worker", "execute-api:ManageConnections", SOCKETS): pieces_of_an_answer_are_told,
    Grant("worker", "dynamodb:DeleteItem", "ConnectionsTable"): a_gone_listener_is_removed_while_an_answer_is_written,
    Grant("worker", "dynamodb:UpdateItem", "ConnectionsTable"): a_listener_told_by_the_worker_follows_no_more,
    Grant("slack", "dynamodb:PutItem", "JobsTable"): slack_probes.refused_then_taken,
    Grant("slack", "dynamodb:UpdateItem", "JobsTable"): slack_probes.a_question_is_stopped,
    Grant("slack", "dynamodb:GetItem", "JobsTable"): slack_probes.a_question_in_a_thread_is_told_from_talk,
    Grant("slack", "dynamodb:GetItem", "ClientsTable"): slack_probes.a_fresh_desk_reads_slacks_limits,
    Grant("slack", "dynamodb:UpdateItem", "LimitsTable"): slack_probes.refused_then_taken,
    Grant("slack", "dynamodb:GetItem", "LimitsTable"): slack_probes.a_question_in_a_thread_is_told_from_talk,
    Grant(
        "slack", "secretsmanager:GetSecretValue", "ProviderSecret"
    ): slack_probes.a_fresh_desk_reads_the_signing_secret,
    Grant("slack", "sqs:SendMessage", "InteractiveQueue"): slack_probes.refused_then_taken,
    Grant("slack", "sqs:GetQueueAttributes", "InteractiveQueue"): slack_probes.the_depth_before_a_question_is_seen,
    Grant("slack", "sqs:SendMessage", "NotificationsQueue"): slack_probes.what_is_said_without_a_call_is_announced,
    Grant("notifier", "dynamodb:UpdateItem", "LimitsTable"): slack_probes.told_later,
    Grant(
        "notifier", "secretsmanager:GetSecretValue", "ProviderSecret"
    ): slack_probes.a_fresh_notifier_reads_slacks_token,
    Grant("alerts", "secretsmanager:GetSecretValue", "ProviderSecret"): slack_probes.a_fresh_alert_reads_slacks_token,
    Grant("repair", "dynamodb:GetItem", "JobsTable"): an_overdue_job_is_moved_on,
    Grant("repair", "dynamodb:UpdateItem", "JobsTable"): an_overdue_job_is_moved_on,
    Grant("repair", "dynamodb:BatchGetItem", "JobsTable"): jobs_in_hand_are_seen_behind_a_backlog,
    Grant("repair", "dynamodb:UpdateItem", "LimitsTable"): a_charge_is_settled_by_the_repairer,
    Grant("repair", "dynamodb:Query", "JobsTable/index/due"): a_repair_runs,
    Grant("repair", "dynamodb:Query", "JobsTable/index/waiting"): the_oldest_jobs_are_seen,
    Grant("repair", "sqs:SendMessage", "DeadLetterQueue"): a_letter_without_reason_is_explained,
    Grant("repair", "sqs:SendMessage", "NotificationsQueue"): a_lost_announcement_is_made_again,
    Grant("repair", "sqs:ReceiveMessage", "DeadLetterQueue"): a_repair_runs,
    Grant("repair", "sqs:DeleteMessage", "DeadLetterQueue"): a_letter_without_reason_is_explained,
    Grant("notifier", "dynamodb:GetItem", "JobsTable"): a_telling_is_made_and_noted,
    Grant("notifier", "dynamodb:UpdateItem", "JobsTable"): a_telling_is_made_and_noted,
    Grant("notifier", "sqs:SendMessage", "NotificationsQueue"): a_further_try_is_planned,
    **{
        Grant("notifier", action, "ConnectionsTable"): the_end_is_told_to_listeners
        for action in ("dynamodb:Query", "dynamodb:UpdateItem", "dynamodb:DeleteItem")
    },
    Grant("notifier", "execute-api:ManageConnections", SOCKETS): the_end_is_told_to_listeners,
    Grant("notifier", "dynamodb:GetItem", "ClientsTable"): a_clients_own_webhook_secret_is_found,
    Grant("notifier", "secretsmanager:GetSecretValue", "WebhookKeySecret"): a_fresh_notifier_opens_a_webhook_secret,
    Grant("notifier", "s3:GetObject", "PayloadsBucket/results/*"): a_large_result_is_told,
}
# What AWS asks for and the emulator does not, and what goes well without it all the same.
NOT_ENFORCED: dict[Grant, Callable[[Scene], None]] = {
    **{
        Grant(function, action, "Logs"): partial(a_call_is_logged, function=function)
        for function in FUNCTIONS
        for action in ("logs:CreateLogStream", "logs:PutLogEvents")
    },
    **{
        Grant("worker", action, f"{lane}Queue"): partial(a_hint_is_received_and_deleted, lane=lane.lower())
        for lane in LANES
        for action in ("sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:GetQueueAttributes")
    },
    **{
        Grant("notifier", action, "NotificationsQueue"): a_telling_is_received_and_deleted
        for action in ("sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:GetQueueAttributes")
    },
    Grant("worker", "s3:ListBucket", "PayloadsBucket"): a_missing_request_ends_its_job,
    Grant("notifier", "s3:ListBucket", "PayloadsBucket"): a_missing_result_is_told_as_such,
    Grant("status", "s3:ListBucket", "PayloadsBucket"): a_missing_result_is_not_called_a_passing_trouble,
}


def standing_for(grant: Grant, listed: Collection[Grant]) -> Grant:
    """The grant whose probe shows this one. Where a statement names all lanes' queues, that is the standard lane's:
    whoever lacks the action lacks it for the whole statement.
    """
    standard = grant._replace(resource="StandardQueue")
    return standard if grant.resource in LANE_QUEUES and standard in listed else grant


def one_of_each(listed: Collection[Grant]) -> list[Grant]:
    """Those that stand for all, in their order."""
    found = list(dict.fromkeys(standing_for(grant, listed) for grant in listed))
    return found if PART is None else found[int(PART) :: PARTS]


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", autouse=True)
def unscheduled(stack: Stack) -> Iterator[None]:
    """The repairer runs only when a probe lets it: the schedule would now and then come between two looks."""
    events = stack.aws("events")
    rules = events.list_rules()["Rules"]
    (rule,) = [rule["Name"] for rule in rules if rule.get("ScheduleExpression") == "rate(1 minute)"]
    events.disable_rule(Name=rule)
    stack.aws("sqs").purge_queue(QueueUrl=stack.outputs["DeadLetterQueueUrl"])  # a look at it shows the first ten only
    try:
        yield
    finally:
        events.enable_rule(Name=rule)


@pytest.fixture
def scene(stack: Stack, fake: Fake, mark: str, grant: Grant) -> Scene:
    """Where the grant can be taken away."""

    @contextmanager
    def lacking() -> Iterator[None]:
        iam = stack.aws("iam")
        (found,) = [
            (policy, number)
            for policy in policies(stack)
            if policy.function == grant.function
            for number, other in grants(stack, policy)
            if other == grant
        ]
        policy, number = found
        where = {"RoleName": policy.role, "PolicyName": policy.name}
        iam.put_role_policy(**where, PolicyDocument=json.dumps(without(policy.document, number, grant.action)))
        try:
            yield
        finally:
            iam.put_role_policy(**where, PolicyDocument=json.dumps(policy.document))

    return Scene(stack, fake, mark, lacking)


def test_every_permission_has_a_probe_and_every_probe_a_permission(stack: Stack) -> None:
    """What the deployed functions' policies allow is what is shown here to be needed, each once."""
    deployed = {function["FunctionName"] for function in stack.aws("lambda").list_functions()["Functions"]}
    assert deployed == {_function_name(stack, function) for function in FUNCTIONS}
    statements = {grant: number for policy in policies(stack) for number, grant in grants(stack, policy)}
    allowed = Counter(grant for policy in policies(stack) for _, grant in grants(stack, policy))
    listed = Counter([*PROBES, *NOT_ENFORCED])
    apart = [grant for grant, number in statements.items() if statements[standing_for(grant, listed)] != number]
    assert apart == [], "shown by another statement's probe"
    assert list(allowed - listed) == [], "allowed, but not shown to be needed"
    assert list(listed - allowed) == [], "needed, but not allowed"


@pytest.mark.parametrize("grant", one_of_each(PROBES), ids=" ".join)
def test_no_permission_can_be_left_out(scene: Scene, grant: Grant) -> None:
    """Without this one action something fails; with it again, the same goes well.

    A statement without any of its actions is less still, so none can be left out either.
    """
    PROBES[grant](scene)


@pytest.mark.parametrize("grant", one_of_each(NOT_ENFORCED), ids=" ".join)
def test_what_the_emulator_does_not_enforce_goes_well_without(scene: Scene, grant: Grant) -> None:
    """If it fails, the emulator has learnt to enforce it, and the entry belongs among the PROBES."""
    NOT_ENFORCED[grant](scene)


def test_each_function_writes_to_its_own_log_group(stack: Stack, fake: Fake, mark: str) -> None:
    """The lines about a job are in the group that the function's policy names, for no policy is asked."""
    scene = Scene(stack, fake, mark, nullcontext)
    began = time.time_ns() // 1_000_000
    parked = scene.parked()
    assert stack.http().delete(f"/jobs/{parked}").status_code == 200
    job_id = scene.road()
    slack_probes.road(scene)
    slack_probes.alarm(scene)
    for function, wanted in {
        "ingest": {"message": "job_accepted", "job_id": job_id},
        "status": {"message": "job_ended", "job_id": parked},
        "websocket": {"message": "socket_opened", "client_id": "local"},
        "worker": {"message": "job_ended", "job_id": job_id},
        "notifier": {"message": "telling_dropped", "job_id": job_id},
        "slack": {"message": "slack_message_taken", "channel": slack_probes.workspace(scene).channel},
        "repair": {"message": "repair_ran"},
        "alerts": {"message": "alert_told"},
    }.items():
        line = {"service": function, **wanted}

        def logged(function: str = function, line: dict[str, str] = line) -> bool:
            entries = [json.loads(text) for text in scene.lines(function, began) if text.startswith("{")]
            return any(line.items() <= entry.items() for entry in entries)

        until(logged, 10, partial("{} has not logged {}".format, function, line))
