"""SAM-01: values that only work together. Each may be right by itself; CloudFormation checks none of the pairs."""

import re
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from backburner import bootstrap
from backburner.budgets import TRYING_MS_MAX
from backburner.delivery import TELLING_MS
from backburner.execution import CLOSING_SECONDS
from backburner.http import LAST_LOOK_SECONDS, WAIT_SECONDS_MAX
from backburner.lifecycle import LEASE_MS, RENEW_MS
from backburner.repair import LOOK_AHEAD_MS
from tests.template.resolved import (
    Edit,
    Template,
    code_folder,
    dead_letter_queues,
    drop,
    environment,
    functions,
    led_to,
    of_type,
    put,
    queue_sources,
    referred,
    shipped,
)

TIMEOUT_SECONDS_DEFAULT = 3
VISIBILITY_SECONDS_DEFAULT = 30
RETENTION_SECONDS_DEFAULT = 345_600
GATEWAY_SECONDS = 29
BATCH_WITHOUT_WINDOW_MAX = 10
NOTICED_SECONDS_MAX = 90
"""Within this a killed worker's job is on its way again."""

CALLS = {
    "ingest": (
        # The client's key, the lane's depth, the client's webhook secret or the key that seals one, his tally, a large
        # request, the row, the hint.
        ("dynamodb", "sqs", "dynamodb", "dynamodb", "s3", "dynamodb", "sqs"),
        ("dynamodb", "sqs", "secretsmanager", "dynamodb", "s3", "dynamodb", "sqs"),
    ),
    "status": (
        ("dynamodb", "dynamodb", "s3"),  # the client's key, the row, a large result
        ("dynamodb", "dynamodb", "dynamodb", "sqs", "dynamodb"),  # the key, the row, its end, its target, the row
        ("dynamodb", "dynamodb", "dynamodb", "sqs", "dynamodb", "s3"),  # the same of a response, with a large request
        ("dynamodb", "dynamodb", "dynamodb", "s3", "s3"),  # the key, the row, its emptying, both its large texts
    ),
    "websocket": (
        # Whose connection, the row, the connection's list, the subscription, the row again; the answer.
        (*["dynamodb"] * 5, "apigatewaymanagementapi"),
    ),
    "slack": (
        # The secret, also anew; the client, whose thread (twice), how often a person asked, the lane's depth, the
        # client's tally, whether the key is known, what is said instead, the row; the hint.
        ("secretsmanager", "secretsmanager", *["dynamodb"] * 8, "sqs", "sqs"),
    ),
}
"""What an endpoint asks of AWS for one request, one call after the other, by its longest roads."""

# ── Rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def visibility(template: Template) -> list[str]:
    """A message stays hidden for six function timeouts and the batching window, as AWS advises: else it runs twice."""
    problems = []
    for source in queue_sources(template):
        timeout = timeout_seconds(functions(template)[source.function])
        wanted = 6 * timeout + source.properties.get("MaximumBatchingWindowInSeconds", 0)
        queue = of_type(template, "AWS::SQS::Queue")[source.queue]
        given = int(queue.get("VisibilityTimeout", VISIBILITY_SECONDS_DEFAULT))
        if given < wanted:
            problems.append(f"{source.queue}: VisibilityTimeout {given} < {wanted} for {source.function}")
    return problems


def call(template: Template) -> list[str]:
    """A provider call ends early enough for its answer to be stored before the function is ended."""
    problems = []
    for name, body in functions(template).items():
        seconds = environment(template, name).get("CALL_TIMEOUT_SECONDS")
        timeout = timeout_seconds(body)
        if seconds is not None and int(seconds) + CLOSING_SECONDS > timeout:
            problems.append(f"{name}: CALL_TIMEOUT_SECONDS {seconds} + {CLOSING_SECONDS} > Timeout {timeout}")
    return problems


def gateway(template: Template) -> list[str]:
    """A function behind API Gateway is ended before the gateway gives up, so that both agree on what happened."""
    return [
        f"{name}: Timeout {seconds} is not below the gateway's {GATEWAY_SECONDS}"
        for name, seconds in _endpoint_timeouts(template).items()
        if seconds >= GATEWAY_SECONDS
    ]


def aws_calls(template: Template) -> list[str]:
    """However slow AWS answers, a request is answered by us within the endpoint's timeout, if only with a 503."""
    problems = []
    for name, timeout in _endpoint_timeouts(template).items():
        folder = code_folder(template, name).name
        worst = _call_seconds(getattr(bootstrap, folder), environment(template, name))
        total = max(sum(worst[service] for service in road) for road in CALLS[folder]) + TRYING_MS_MAX / 1000
        if total >= timeout:
            problems.append(f"{name}: its calls may take {total} s of Timeout {timeout}: {worst}")
    return problems


def retention(template: Template) -> list[str]:
    """A dead letter outlives its lane's messages: its age counts from the first sending, so it would vanish at once."""
    queues = of_type(template, "AWS::SQS::Queue")
    problems = []
    for name, body in queues.items():
        if "RedrivePolicy" not in body:
            continue
        dead = referred(body["RedrivePolicy"]["deadLetterTargetArn"], "Arn")
        lane_seconds = int(body.get("MessageRetentionPeriod", RETENTION_SECONDS_DEFAULT))
        dead_seconds = int(queues[dead].get("MessageRetentionPeriod", RETENTION_SECONDS_DEFAULT))
        if dead_seconds <= lane_seconds:
            problems.append(f"{dead}: MessageRetentionPeriod {dead_seconds} <= {lane_seconds} of {name}")
    return problems


def window(template: Template) -> list[str]:
    """A batch of more than ten needs a batching window, or the stack fails at its event source."""
    return [
        f"{source.name}: BatchSize {source.properties['BatchSize']} without a MaximumBatchingWindowInSeconds"
        for source in queue_sources(template)
        if source.properties.get("BatchSize", 10) > BATCH_WITHOUT_WINDOW_MAX
        and source.properties.get("MaximumBatchingWindowInSeconds", 0) < 1
    ]


def loss(template: Template) -> list[str]:
    """A killed worker's job is seen by the repairer within 90 s: a lease and one round of the schedule."""
    period = _repair_period_seconds(template)
    worst = LEASE_MS / 1000 + period
    return [f"a lost job is noticed after {worst:.0f} s"] if worst > NOTICED_SECONDS_MAX else []


def look_ahead(template: Template) -> list[str]:
    """The repairer looks ahead to its next run: it reminds of every lease that lapses before."""
    period = _repair_period_seconds(template)
    seen = LOOK_AHEAD_MS / 1000
    return [f"the repairer runs every {period} s and looks {seen:.0f} s ahead"] if seen < period else []


def telling(template: Template) -> list[str]:
    """A notifier is ended before its tellings' leases run out, so that nobody tells a target beside it."""
    problems = []
    for source in queue_sources(template):
        timeout = timeout_seconds(functions(template)[source.function])
        if source.queue == "NotificationsQueue" and 1000 * timeout > TELLING_MS:
            problems.append(f"{source.function}: Timeout {timeout} is longer than a telling's lease of {TELLING_MS} ms")
    return problems


def waiting(template: Template) -> list[str]:
    """The longest wait that a deployment may allow leaves time for a last look at the job."""
    timeout = timeout_seconds(functions(template)["StatusFunction"])
    most = template["Parameters"]["LongPollSeconds"]["MaxValue"]
    problems = [] if most == WAIT_SECONDS_MAX else [f"LongPollSeconds may be {most}, wait {WAIT_SECONDS_MAX}"]
    return problems + (
        [f"a wait of {most} s leaves too little of {timeout}"] if most + LAST_LOOK_SECONDS > timeout else []
    )


RULES = [visibility, call, gateway, waiting, aws_calls, retention, window, loss, look_ahead, telling]


def _endpoint_timeouts(template: Template) -> dict[str, int]:
    permissions = of_type(template, "AWS::Lambda::Permission").values()
    called = [p["FunctionName"] for p in permissions if p["Principal"] == "apigateway.amazonaws.com"]
    names = {led_to(template, function) for function in called}
    return {name: timeout_seconds(functions(template)[name]) for name in sorted(names)}


def timeout_seconds(function: dict[str, Any]) -> int:
    """When Lambda ends the function."""
    return int(function.get("Timeout", TIMEOUT_SECONDS_DEFAULT))


def _call_seconds(builder: Any, variables: dict[str, str]) -> dict[str, float]:
    """How long one call of each service may take, with its retries, by the clients that a function makes.

    Those among them, too, that are made late. Of several clients of one service, the slowest counts.
    """
    worst: dict[str, float] = {}

    def client(_session: Any, service: str, *, config: Any, **_: Any) -> Any:
        seconds = config.retries["total_max_attempts"] * (config.connect_timeout + config.read_timeout)
        worst[service] = max(seconds, worst.get(service, 0.0))
        return MagicMock()

    with (
        patch("botocore.session.Session.create_client", client),
        patch("backburner.adapters.s3.PayloadsBucket", lambda s3, _bucket: s3()),
        patch("backburner.adapters.sockets.ApiGatewaySockets", lambda management: management()),
        patch("backburner.adapters.secrets.FernetSeals", lambda secretsmanager, _arn: secretsmanager()),
        patch.dict("os.environ", variables),
    ):
        builder()
    return worst


def _repair_period_seconds(template: Template) -> int:
    for rule in of_type(template, "AWS::Events::Rule").values():
        if any(led_to(template, target["Arn"]) == "RepairFunction" for target in rule["Targets"]):
            rate = re.fullmatch(r"rate\((\d+) minutes?\)", rule["ScheduleExpression"])
            if rate and rule.get("State", "ENABLED") == "ENABLED":
                return 60 * int(rate[1])
    raise LookupError("no schedule calls RepairFunction every so many minutes")


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

RESOURCE = "Resources.{}.Properties.{}".format
WORKER_TIMEOUT = RESOURCE("WorkerFunction", "Timeout")
SCHEDULE = RESOURCE("RepairFunctionEveryMinute", "ScheduleExpression")
SOURCE = RESOURCE("WorkerFunctionStandard", "{}").format


@pytest.mark.parametrize("rule", RULES)
def test_sam_01_the_shipped_timeouts_fit_together(rule: Any) -> None:
    """The template as shipped keeps every rule."""
    assert rule(shipped()) == []


def test_the_longest_batching_windows_fit() -> None:
    """Whatever the parameters allow; a second less of visibility would not do."""
    windows = {"StandardBatchSeconds": 30, "BulkBatchSeconds": 30}
    assert visibility(shipped(**windows)) == []
    assert visibility(shipped(put("Mappings.Timeouts.Seconds.Visibility", 1829), **windows)) != []


@pytest.mark.parametrize(
    ("rule", "edits"),
    [
        pytest.param(visibility, [put("Mappings.Timeouts.Seconds.Worker", 306)], id="worker-timeout-in-mapping"),
        pytest.param(visibility, [put(WORKER_TIMEOUT, 900)], id="worker-timeout-literal"),
        pytest.param(
            visibility,
            [put("Parameters.T", {"Type": "Number", "Default": 600}), put(WORKER_TIMEOUT, {"Ref": "T"})],
            id="worker-timeout-in-parameter",
        ),
        pytest.param(
            visibility, [drop(WORKER_TIMEOUT), put("Globals.Function.Timeout", 600)], id="worker-timeout-in-globals"
        ),
        pytest.param(visibility, [drop(RESOURCE("StandardQueue", "VisibilityTimeout"))], id="no-visibility"),
        pytest.param(visibility, [put("Mappings.Timeouts.Seconds.Visibility", 1799)], id="visibility-in-mapping"),
        pytest.param(visibility, [put(SOURCE("MaximumBatchingWindowInSeconds"), 31)], id="batching-window"),
        pytest.param(call, [put("Mappings.Timeouts.Seconds.Call", 291)], id="longer-call"),
        pytest.param(call, [put("Mappings.Timeouts.Seconds.Worker", 249)], id="shorter-worker"),
        pytest.param(call, [drop(WORKER_TIMEOUT)], id="default-timeout"),
        pytest.param(gateway, [put("Mappings.Timeouts.Seconds.Endpoint", 29)], id="endpoint-as-slow-as-the-gateway"),
        pytest.param(aws_calls, [put("Mappings.Timeouts.Seconds.Endpoint", 15)], id="endpoint-faster-than-aws"),
        pytest.param(waiting, [put("Parameters.LongPollSeconds.MaxValue", 25)], id="longer-wait"),
        pytest.param(waiting, [put("Mappings.Timeouts.Seconds.Endpoint", 27)], id="shorter-endpoint"),
        pytest.param(retention, [put("Mappings.Timeouts.Seconds.LaneRetention", 1209600)], id="lane-as-long"),
        pytest.param(retention, [drop(RESOURCE("DeadLetterQueue", "MessageRetentionPeriod"))], id="default-retention"),
        pytest.param(window, [put(SOURCE("BatchSize"), 20)], id="batch-of-20"),
        pytest.param(loss, [put(SCHEDULE, "rate(5 minutes)")], id="slower-repair"),
        pytest.param(telling, [put("Mappings.Timeouts.Seconds.Notifier", 61)], id="notifier-outlasts-its-lease"),
        pytest.param(look_ahead, [put(SCHEDULE, "rate(2 minutes)")], id="slower-than-the-repairer-thinks"),
    ],
)
def test_sam_01_a_timeout_changed_alone_is_found(rule: Any, edits: list[Edit]) -> None:
    """Every rule fails on a template in which one of its values was changed without the other, wherever it is set."""
    assert rule(shipped(*edits)) != []


def test_a_renewal_may_fail_once() -> None:
    """Two renewals fit into a lease, so that one lost reply does not cost a worker its job."""
    assert 2 * RENEW_MS < LEASE_MS


def test_every_dead_letter_queue_is_one_of_the_template() -> None:
    """The retention rule sees both ends of every redrive policy."""
    template = shipped()
    assert dead_letter_queues(template) <= of_type(template, "AWS::SQS::Queue").keys()
