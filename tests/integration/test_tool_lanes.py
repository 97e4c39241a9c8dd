"""`backburner status`, `pause`, `resume`, `drain` and `tail`: the lanes and their jobs, as an operator sees them."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import batched
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from rich.console import Console

from backburner import bootstrap
from backburner.adapters.dynamodb import attributes
from backburner.models import Failure, Gauge, Job, JobStatus, Lane
from cli import jobs, lanes, screen, status
from cli.deployment import Deployment
from cli.limits import numbers
from tests.fakes.provider import Behaviour, FakeProvider
from tests.integration.deployed import Deployed
from tests.integration.functions import Stack, sigterm_kept
from tests.integration.jobs import a_job
from tests.integration.test_tool_dead import die, printed


@pytest.fixture
def stack(deployed: Deployed, provider: FakeProvider) -> Iterator[Stack]:
    """The functions, with keys for the provider."""
    functions = Stack(deployed)
    functions.provider_keys()
    with sigterm_kept():
        yield functions


@pytest.fixture
def pollers(tool: Any) -> Iterator[dict[str, str]]:
    """The states of the lanes' pollers, as Lambda has them; as they were, for whoever comes next."""
    yield _Pollers()
    for mapping in boto3.client("lambda").list_event_source_mappings()["EventSourceMappings"]:
        boto3.client("lambda").update_event_source_mapping(UUID=mapping["UUID"], Enabled=False)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is drawn on stderr, as if that were a terminal."""
    drawn = io.StringIO()
    made = Console(file=drawn, force_terminal=True, width=200, highlight=False)
    for module in (screen, lanes, status):
        monkeypatch.setattr(module, "notes", made)
    return drawn


class _Pollers(dict[str, str]):
    def __missing__(self, lane: str) -> str:
        found = boto3.client("lambda").list_event_source_mappings(FunctionName="WorkerFunction")["EventSourceMappings"]
        return next(str(each["State"]) for each in found if f"{lane.capitalize()}Queue" in each["EventSourceArn"])


def test_a_lane_is_stopped_and_started_and_the_others_go_on(tool: Any, pollers: dict[str, str]) -> None:
    """By its event source mapping; twice is no error, and stopping is asked about."""
    assert printed(tool("resume", "bulk", "--json")) == {"lane": "bulk", "state": "Enabled"}
    assert (pollers["bulk"], pollers["standard"]) == ("Enabled", "Disabled")
    assert tool("pause", "bulk", input="n\n").exit_code == 1
    assert pollers["bulk"] == "Enabled"
    for _ in range(2):
        assert printed(tool("pause", "bulk", "--yes", "--json")) == {"lane": "bulk", "state": "Disabled"}
    assert pollers["bulk"] == "Disabled"
    assert tool("pause", "fast", "--yes").exit_code == 2


def test_a_poller_that_takes_its_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lambda says Disabling for a while."""
    states = iter(["Enabled", "Disabling", "Disabling", "Disabled"])
    slept: list[float] = []
    calls: list[dict[str, Any]] = []

    class Somewhere:
        def client(self, _service: str) -> Any:
            return type("Client", (), {"update_event_source_mapping": lambda _self, **given: calls.append(given)})()

    monkeypatch.setattr(lanes, "pollers", lambda _at: {Lane.BULK: lanes.Poller("u-1", next(states), 2)})
    assert lanes.switch(Somewhere(), Lane.BULK, on=False, sleep=slept.append) == "Disabled"  # type: ignore[arg-type]
    assert (calls, slept) == ([{"UUID": "u-1", "Enabled": False}], [lanes.POLL_SECONDS] * 2)


def test_what_is_waited_for_is_shown_at_a_terminal(tool: Any, pollers: dict[str, str], terminal: io.StringIO) -> None:
    """Lambda takes minutes at times. Whoever asks for JSON is shown nothing."""
    for command in (("resume", "bulk"), ("pause", "bulk", "--yes"), ("status",)):
        printed(tool(*command, "--json"))
    assert terminal.getvalue() == ""
    assert tool("resume", "bulk").stdout == "The lane bulk is enabled.\n"
    assert "Waiting for the lane bulk to be enabled" in terminal.getvalue()
    assert tool("pause", "bulk", "--yes").stdout == "The lane bulk is disabled.\n"
    assert "Waiting for the lane bulk to be disabled" in terminal.getvalue()
    assert "being worked on" in tool("status", "--once").stdout
    assert "Looking at " in terminal.getvalue()


def test_nothing_is_shown_of_waiting_where_there_is_no_terminal(tool: Any, pollers: dict[str, str]) -> None:
    """A log is no place for what turns."""
    for command in (
        ("resume", "bulk"),
        ("pause", "bulk", "--yes"),
        ("status",),
        ("drain", "bulk", "--cancel", "--yes"),
    ):
        done = tool(*command)
        assert (done.exit_code, done.stderr) == (0, "")


def test_a_poller_of_an_alias_is_found() -> None:
    """With gradual deployments a queue leads to the alias, which Lambda does not list under the function's name."""
    mapping = {
        "UUID": "u-1",
        "State": "Enabled",
        "EventSourceArn": "arn:bulk",
        "FunctionArn": "arn:aws:lambda:eu-central-1:1:function:worker:live",
        "ScalingConfig": {"MaximumConcurrency": 2},
    }

    def paginate(**by: str) -> list[dict[str, Any]]:
        return [{"EventSourceMappings": [mapping] if by == {"EventSourceArn": "arn:bulk"} else []}]

    paginator = SimpleNamespace(paginate=paginate)
    arns = {"bulk": "arn:bulk"}

    def attributes_of(QueueUrl: str, **_: Any) -> dict[str, Any]:  # noqa: N803  AWS's name
        return {"Attributes": {"QueueArn": arns.get(QueueUrl, "arn:other")}}

    at = Deployment("backburner", None)  # type: ignore[arg-type]
    at.__dict__["outputs"] = {output: lane.value for lane, output in lanes.QUEUES.items()}
    at.__dict__["outputs"]["WorkerFunctionName"] = "worker"
    at._clients = {
        "lambda": SimpleNamespace(get_paginator=lambda _: paginator),
        "sqs": SimpleNamespace(get_queue_attributes=attributes_of),
    }
    assert lanes.pollers(at) == {Lane.BULK: lanes.Poller("u-1", "Enabled", 2)}


def test_status_tells_lanes_limits_and_failures(stack: Stack, tool: Any, provider: FakeProvider) -> None:
    """Once where there is no terminal."""
    key = stack.client("bob")
    ids = [stack.post(key, {"prompt": "a", "priority": "bulk"}).json["job_id"] for _ in range(2)]
    stack.let_pass(ids[0], "due_at")
    stack.repair()  # who has waited for a minute is entered among those that wait; its hint is sent again
    die(stack, provider, "quota_exhausted", 2)
    told = printed(tool("status", "--json"))
    by_lane = {lane["lane"]: lane for lane in told["lanes"]}
    assert (by_lane["bulk"]["waiting"], by_lane["standard"]["waiting"]) == (3, 0)
    assert 0 <= by_lane["bulk"]["oldest_seconds"] < 600
    assert by_lane["standard"]["oldest_seconds"] is None
    assert (by_lane["bulk"]["poller"], by_lane["bulk"]["concurrency"]) == ("Disabled", 2)
    assert (told["dead_letters"], told["failed_last_hour"]) == (2, {"quota_exhausted": 2})
    assert "gpt-5.4-mini" in told["limits"]
    assert told["limit_numbers"]["gpt-5.4-mini"].keys() == {"held_seconds", "share", "strikes", "reserved_seconds"}
    shown = tool("status")
    assert shown.exit_code == 0
    assert "dead jobs: 2" in shown.stdout
    assert "quota_exhausted 2" in shown.stdout


def test_status_goes_on_in_a_terminal_until_it_is_interrupted(
    stack: Stack, tool: Any, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is drawn anew with what has changed since."""
    screen = io.StringIO()
    monkeypatch.setattr(status, "console", Console(file=screen, force_terminal=True, width=100))
    slept: list[float] = []

    def meanwhile(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt
        die(stack, provider, "quota_exhausted", 2)

    clock = SimpleNamespace(sleep=meanwhile, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(status, "time", clock)
    stack.client("bob")
    assert tool("status", "--every", "7").exit_code == 130
    assert slept == [7, 7]
    drawn = screen.getvalue()
    assert drawn.index("dead jobs: 0") < drawn.index("dead jobs: 2")


def test_a_model_of_the_deployments_own_is_limited_before_its_first_call(
    deployed: Deployed, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `limits show` lists it; what it lacks is taken for misspelt."""
    own = '{"mine": {"provider": "openai", "context_tokens": 9000, "output_tokens_max": 900}}'
    monkeypatch.setattr(Deployment, "parameters", {"ExtraModels": own})
    assert printed(tool("limits", "set", "mine", "--requests", "7", "--json"))["operator"]["requests"] == 7
    told = printed(tool("limits", "show", "--json"))
    assert [line["in_force"] for line in told["limits"] if line["model"] == "mine"] == [7]
    quiet = {"held_seconds": 0, "share": 1, "strikes": 0, "reserved_seconds": 0}
    assert told["numbers"] == {"mine": quiet}
    assert tool("limits", "set", "mien", "--requests", "7").exit_code == 2


def test_numbers_say_what_the_sentence_says() -> None:
    """For whoever watches by a program."""
    gauge = Gauge("m", held_until=12_500, share=0.5, strikes=2, cursors={"requests": 11_000_000})
    assert numbers(gauge, 10_000) == {"held_seconds": 2.5, "share": 0.5, "strikes": 2, "reserved_seconds": 1}


def test_a_lane_is_drained_when_nothing_of_it_waits_or_runs(
    stack: Stack, tool: Any, monkeypatch: pytest.MonkeyPatch, pollers: dict[str, str]
) -> None:
    """While workers work; not while the lane is stopped; and not for ever."""
    key = stack.client()
    for _ in range(3):
        stack.post(key, {"prompt": "a", "priority": "bulk"})
    stack.post(key, {"prompt": "another lane"})
    stopped = tool("drain", "bulk")
    assert (stopped.exit_code, "backburner resume bulk" in stopped.stderr) == (2, True)
    monkeypatch.setattr(lanes, "pollers", lambda _at: {})
    late = tool("drain", "bulk", "--for", "0s", "--json")
    assert (late.exit_code, json.loads(late.stdout)["left"]) == (1, 3)
    monkeypatch.setattr("cli.lanes.time.sleep", lambda _seconds: stack.work("BulkQueue"))
    assert printed(tool("drain", "bulk", "--json")) == {"lane": "bulk", "left": 0}


@pytest.mark.parametrize(
    ("counted", "bars", "said"), [(1_000, ["0/3", "1/3", "3/3"], "2 jobs left"), (2, ["0/2", "2/2"], "at least 2 jobs")]
)
def test_a_bar_shows_how_far_a_lane_is_drained(
    stack: Stack, tool: Any, terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch, counted: int, bars: Any, said: str
) -> None:
    """Out of the jobs there at the start, or of the last that are counted."""
    key = stack.client()
    ids = [stack.post(key, {"prompt": "a", "priority": "bulk"}).json["job_id"] for _ in range(3)]

    def meanwhile(_seconds: float) -> None:
        if ids:
            stack.delete(key, ids.pop())
        threading.Event().wait(0.25)  # a bar is drawn ten times a second

    monkeypatch.setattr(lanes, "pollers", lambda _at: {})
    monkeypatch.setattr(lanes, "LEFT_MAX", counted)
    monkeypatch.setattr("cli.lanes.time.sleep", meanwhile)
    assert tool("drain", "bulk").stdout == "The lane bulk is empty.\n"
    drawn = terminal.getvalue()
    assert [bar for bar in bars if bar not in drawn] == []
    assert said in drawn


def test_a_stopped_lane_is_drained_by_cancelling(stack: Stack, tool: Any) -> None:
    """What waits is cancelled, in this lane only."""
    key = stack.client()
    ids = [stack.post(key, {"prompt": "a", "priority": "bulk"}).json["job_id"] for _ in range(3)]
    other = stack.post(key, {"prompt": "a"}).json["job_id"]
    assert tool("drain", "bulk", "--cancel", input="n\n").exit_code == 1
    assert printed(tool("drain", "bulk", "--cancel", "--yes", "--json"))["left"] == 0
    assert {stack.get(key, job_id).json["status"] for job_id in ids} == {"cancelled"}
    assert stack.get(key, other).json["status"] == "queued"


def stored(deployed: Deployed, *jobs: Job) -> None:
    """Write the rows as they are, many at a time."""
    client: Any = boto3.client("dynamodb")
    for some in batched(jobs, 25, strict=False):
        rows = [{name: getattr(job, name) for name in Job.__dataclass_fields__} for job in some]
        items = [{k: v for k, v in attributes(row, row["job_id"]).items() if v is not None} for row in rows]
        client.batch_write_item(
            RequestItems={deployed.names["JobsTable"]: [{"PutRequest": {"Item": item}} for item in items]}
        )


def queued(number: int, lane: Lane, now: int, **changes: Any) -> Job:
    """A job that was accepted just now; the lower its number, the longer it is due."""
    changed = {"due_at": now + number, "deadline_at": now + 86_400_000, "expires_at": now // 1000 + 90_000, **changes}
    return a_job(job_id=f"job_{lane}_{number}", lane=lane, created_at=now, available_at=now, **changed)


def test_a_lane_is_not_empty_because_a_thousand_jobs_of_another_are_due_before(
    deployed: Deployed, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far down its job stands, it is seen, counted and cancelled."""
    now = time.time_ns() // 1_000_000
    others = [queued(number, Lane.STANDARD, now) for number in range(lanes.DUE_MAX + 5)]
    stored(deployed, *others, queued(50_000, Lane.BULK, now))
    monkeypatch.setattr(lanes, "pollers", lambda _at: {})
    late = tool("drain", "bulk", "--for", "0s", "--json")
    assert (late.exit_code, json.loads(late.stdout)) == (1, {"lane": "bulk", "left": 1})
    asked = tool("drain", "bulk", "--cancel", input="n\n")
    assert "Cancel 1 waiting jobs of the lane bulk" in asked.stderr
    assert printed(tool("drain", "bulk", "--cancel", "--yes", "--json"))["left"] == 0
    monkeypatch.setattr(lanes, "LEFT_MAX", 10)
    left = json.loads(tool("drain", "standard", "--for", "0s", "--json").stdout)
    assert left == {"lane": "standard", "left": len(others)}


def test_a_lane_that_looks_empty_is_looked_at_again(
    stack: Stack, tool: Any, monkeypatch: pytest.MonkeyPatch, pollers: dict[str, str]
) -> None:
    """An index is a moment behind: what one look has missed, the next one finds."""
    stack.post(stack.client(), {"prompt": "a", "priority": "bulk"})
    seen = lanes.unfinished
    missed = iter([True, True])  # one of them is for the bar
    monkeypatch.setattr(lanes, "pollers", lambda _at: {})
    monkeypatch.setattr(lanes, "unfinished", lambda *given: iter(()) if next(missed, False) else seen(*given))
    assert json.loads(tool("drain", "bulk", "--for", "0s", "--json").stdout)["left"] == 1


def test_an_expired_row_keeps_no_lane_from_being_empty(deployed: Deployed, tool: Any, monkeypatch: Any) -> None:
    """DynamoDB takes days to remove it, and nobody works on it any more."""
    now = time.time_ns() // 1_000_000
    stored(deployed, queued(1, Lane.BULK, now, expires_at=now // 1000 - 1))
    monkeypatch.setattr(lanes, "pollers", lambda _at: {})
    assert printed(tool("drain", "bulk", "--json"))["left"] == 0


def test_jobs_being_worked_on_are_counted_by_few_requests_and_at_least_where_there_are_more(
    deployed: Deployed, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backlog that is not due soon is not read for it."""
    now = time.time_ns() // 1_000_000
    running = [queued(n, Lane.STANDARD, now, status=JobStatus.PROCESSING, due_at=now + 540 * n) for n in range(110)]
    backlog = [queued(n, Lane.BULK, now, due_at=now + 300_000) for n in range(150)]
    stored(deployed, *running, *backlog)
    read: list[int] = []
    batches = lanes._read

    def counted(at: Deployment, ids: Sequence[str]) -> list[dict[str, Any]]:
        read.append(len(ids))
        return batches(at, ids)

    monkeypatch.setattr(lanes, "_read", counted)
    told = printed(tool("status", "--json"))
    assert (told["processing"], told["processing_at_least"], read) == (110, False, [100, 10])
    monkeypatch.setattr(lanes, "DUE_MAX", 60)
    told = printed(tool("status", "--json"))
    assert (told["processing"], told["processing_at_least"]) == (60, True)
    assert "at least 60 jobs being worked on" in tool("status").stdout


def test_failures_of_the_last_hour_are_all_counted_or_said_to_be_at_least_so_many(
    deployed: Deployed, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Slack's people too, who need no row among the clients."""
    now = time.time_ns() // 1_000_000
    failed = {
        "status": JobStatus.FAILED,
        "finished_at": now - 1,
        "due_at": None,
        "error": Failure("timeout", "", retryable=True),
    }
    stored(deployed, *(queued(n, Lane.BULK, now - n, client_id="slack", **failed) for n in range(130)))
    stored(deployed, queued(1, Lane.STANDARD, now, client_id="slack", **failed | {"finished_at": now - 3_700_000}))
    told = printed(tool("status", "--json"))
    assert (told["failed_last_hour"], told["failed_last_hour_at_least"]) == ({"timeout": 130}, False)
    assert "failed in the last hour: timeout 130" in tool("status").stdout
    monkeypatch.setattr(status, "FAILURES_MAX", 99)
    told = printed(tool("status", "--json"))
    assert (told["failed_last_hour"], told["failed_last_hour_at_least"]) == ({"timeout": 98}, True)
    assert "failed in the last hour: at least timeout 98" in tool("status").stdout


def test_the_live_view_counts_failures_less_often_than_it_looks(
    deployed: Deployed, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each count reads many rows of every client."""
    monkeypatch.setattr(status, "console", Console(file=io.StringIO(), force_terminal=True, width=100))
    counts: list[int] = []
    sleeps: list[int] = []
    counted = status.failures

    def counting(*given: Any) -> Any:
        counts.append(len(sleeps))
        return counted(*given)

    def sleep(_seconds: float) -> None:
        sleeps.append(1)
        if len(sleeps) > 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(status, "failures", counting)
    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=sleep, strftime=time.strftime, gmtime=time.gmtime))
    tool("status", "--every", "10")
    assert counts == [0, 3, 6]


def test_a_rare_lane_and_a_rare_state_are_found_behind_others(
    deployed: Deployed, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts what is shown; what was not looked at is said."""
    now = time.time_ns() // 1_000_000
    stored(deployed, *(queued(n, Lane.STANDARD, now - n, client_id="slack") for n in range(210)))
    old = queued(1, Lane.BULK, now - 9_999, client_id="slack", status=JobStatus.CANCELLED, due_at=None)
    stored(deployed, old)
    for filters in (("--lane", "bulk"), ("--status", "cancelled"), ("--lane", "bulk", "--client", "slack")):
        listed = printed(tool("jobs", "list", *filters, "--limit", "3", "--json"))
        assert ([job["job_id"] for job in listed["jobs"]], listed["all_seen"]) == ([old.job_id], True)
    assert len(printed(tool("jobs", "list", "--limit", "205", "--json"))["jobs"]) == 205
    monkeypatch.setattr(jobs, "LOOKED_AT_MAX", 150)
    cut_off = tool("jobs", "list", "--lane", "bulk", "--json")
    assert json.loads(cut_off.stdout) == {"jobs": [], "all_seen": False}
    assert "only the newest 150 jobs" in cut_off.stderr


def test_a_job_is_followed_to_its_end(
    stack: Stack, tool: Any, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From queued over a failed attempt to its answer, of which nothing is printed."""
    provider.script("secret-prompt", Behaviour(status=503), Behaviour(text="secret-answer"))
    monkeypatch.setattr(bootstrap.SystemChance, "uniform", lambda _self, low, _high: low)
    job_id = stack.post(stack.client(), {"prompt": "secret-prompt"}).json["job_id"]
    monkeypatch.setattr(bootstrap.SystemClock, "sleep", lambda _self, _seconds: stack.work())
    followed = tool("tail", job_id, "--json")
    events = [json.loads(line) for line in followed.stdout.splitlines() if line.startswith('{"at"')]
    assert followed.exit_code == 0
    assert [(event["event"], event.get("status") or event.get("outcome")) for event in events] == [
        ("status", "queued"),
        ("attempt", "overloaded"),
        ("status", "queued"),
        ("attempt", "completed"),
        ("status", "completed"),
    ]
    assert "secret" not in "".join(map(json.dumps, events))
    assert tool("tail", job_id).exit_code == 0
    assert tool("tail", "job_nobody").stderr == "there is no job 'job_nobody'\n"


def test_a_job_that_fails_ends_the_following_with_1(stack: Stack, tool: Any, provider: FakeProvider) -> None:
    """And says of what."""
    [job_id] = die(stack, provider, "quota_exhausted", 1)
    shown = tool("tail", job_id)
    assert (shown.exit_code, "failed: quota_exhausted" in shown.stdout) == (1, True)
    assert "dead_letter: delivered" in shown.stdout
