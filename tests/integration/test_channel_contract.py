"""What every channel keeps to, fake and real: told once, failures in the core's words, many at a time.

A new channel adds its line to LINES.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from backburner.addresses import Receivers
from backburner.channels.outbound import Outbound
from backburner.channels.slack import SENTENCES, STOPPED, SlackChannel
from backburner.channels.slack_api import SlackApi
from backburner.channels.webhook import WebhookChannel
from backburner.channels.websocket import WebSocketChannel
from backburner.delivery import REASON_CHARACTERS_MAX, TELLING_MS
from backburner.errors import PortUnavailable, Untold
from backburner.models import Failure, Job, JobStatus, Payload, SlackOrigin, Webhook
from backburner.ports import Channel, Listener
from tests.fakes.house import House, RecordingChannel
from tests.fakes.receiver import Receiver, Step
from tests.fakes.slack import TEAM, USER, FakeSlack
from tests.fakes.sockets import MemoryConnections, MemorySockets

DAY_SECONDS = 86_400


@dataclass(frozen=True)
class Line:
    """A channel, and its other end.

    addressed: the job as one that asks for this channel. arrived: ids and statuses of the jobs that it was told of.
    fail: let the next telling fail, for now or for good. never_for_good: no failure of this channel's is final.
    """

    channel: Channel
    addressed: Callable[[Job], Job]
    arrived: Callable[[], list[tuple[str, str]]]
    fail: Callable[[bool], None]
    never_for_good: bool = False


@contextmanager
def fake() -> Iterator[Line]:
    """The one that the core's own tests use."""
    channel = RecordingChannel()
    yield Line(
        channel,
        addressed=lambda job: job,
        arrived=lambda: [(job.job_id, job.status) for job in channel.told],
        fail=lambda again: channel.failures.append(Untold("http_503" if again else "http_410", again=again)),
    )


@contextmanager
def webhook() -> Iterator[Line]:
    """To a receiver on loopback."""
    house = House()
    with Receiver() as receiver:
        channel = WebhookChannel(
            receivers=Receivers(loopback=True),
            outbound=Outbound(),
            payloads=house.payloads,
            seals=house.seals,
            secrets=house.webhook_secrets,
            clock=house.clock,
        )
        sealed = house.seals.seal("whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg==")

        def arrived() -> list[tuple[str, str]]:
            events = [json.loads(request.body)["data"] for request in receiver.requests]
            return [(event["job_id"], event["status"]) for event in events]

        yield Line(
            channel,
            addressed=lambda job: replace(job, webhook=Webhook(receiver.url, sealed)),
            arrived=arrived,
            fail=lambda again: receiver.script.append(Step(503 if again else 410)),
        )


@contextmanager
def websocket() -> Iterator[Line]:
    """To one connection a job."""
    connections, sockets, failures = MemoryConnections(lambda: 0), MemorySockets(), list[str]()
    house = House()

    def addressed(job: Job) -> Job:
        name = f"of-{job.job_id}"
        connections.open(name, job.client_id, DAY_SECONDS)
        connections.subscribe(job.job_id, Listener(name, "a", 0, 0), jobs_max=1)
        return job

    def refuse(_connection_id: str) -> None:
        if failures:
            raise PortUnavailable(failures.pop())

    sockets.before_post = refuse
    with ThreadPoolExecutor(max_workers=20) as posts:
        yield Line(
            WebSocketChannel(connections, sockets, posts, clock=house.clock, journal=house.journal),
            addressed=addressed,
            arrived=lambda: [(frame["job"]["job_id"], frame["job"]["status"]) for _, frame in sockets.frames],
            fail=lambda _again: failures.append("LimitExceededException"),
            never_for_good=True,
        )


@contextmanager
def slack() -> Iterator[Line]:
    """To one channel a job, by the official SDK."""
    house = House()
    says = {STOPPED: JobStatus.CANCELLED, **{SENTENCES[code]: status for status, code in CODES.items()}}
    with FakeSlack() as server:
        channel = SlackChannel(
            SlackApi(lambda: server.token, lambda _: False, base_url=server.base_url),
            payloads=house.payloads,
            line=house.limits,
            clock=house.clock,
            journal=house.journal,
        )

        def addressed(job: Job) -> Job:
            room = f"C{job.job_id[-9:]}"
            asked = server.say("a question", channel=room)
            return replace(job, slack=SlackOrigin(room, USER, TEAM, "channel", asked["ts"], asked["ts"]))

        def arrived() -> list[tuple[str, str]]:
            told = [message for message in server.messages() if message.metadata is not None]
            return [
                (message.metadata["event_payload"]["job_id"], says.get(message.markdown, JobStatus.COMPLETED))
                for message in told
                if message.metadata is not None
            ]

        yield Line(
            channel,
            addressed=addressed,
            arrived=arrived,
            fail=lambda again: server.script(
                "chat.postMessage", {"status": 500} if again else {"error": "channel_not_found"}
            ),
        )


LINES: dict[str, Any] = {"fake": fake, "webhook": webhook, "websocket": websocket, "slack": slack}
CODES = {JobStatus.FAILED: "timeout", JobStatus.EXPIRED: "deadline_passed"}


@pytest.fixture(params=LINES)
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    """Each of them."""
    with LINES[request.param]() as found:
        yield found


def ended(status: JobStatus = JobStatus.COMPLETED, number: int = 1) -> Job:
    """A job that has ended so."""
    job = replace(House().accept(), job_id=f"job_{number:026d}", status=status, finished_at=1_800_000_000_000, claims=1)
    if status is JobStatus.COMPLETED:
        result = {"text": "The Danube 中", "finish_reason": "stop", "model": "m-1", "provider": "fake"}
        return replace(job, result=Payload(json.dumps(result)))
    if status is JobStatus.CANCELLED:
        return job
    return replace(job, error=Failure(CODES[status], "It did not end in time.", retryable=True))


@pytest.mark.parametrize("status", [status for status in JobStatus if status.is_final])
def test_a_job_is_told_of_once_whatever_its_end(line: Line, status: JobStatus) -> None:
    """By its id, with its status."""
    job = line.addressed(ended(status))
    line.channel.tell(job)
    assert line.arrived() == [(job.job_id, status)]


@pytest.mark.parametrize("again", [True, False])
def test_a_failure_says_whether_to_try_again_and_why_in_a_word(line: Line, again: bool) -> None:
    """The next telling goes well all the same."""
    line.fail(again)
    with pytest.raises(Untold) as untold:
        line.channel.tell(line.addressed(ended()))
    assert untold.value.again is (again or line.never_for_good)
    assert 0 < len(untold.value.message) <= REASON_CHARACTERS_MAX
    assert " " not in untold.value.message
    line.channel.tell(line.addressed(ended(number=2)))
    assert line.arrived()[-1] == (ended(number=2).job_id, JobStatus.COMPLETED)


def test_many_are_told_at_once(line: Line) -> None:
    """One channel serves a whole batch, and one failure among them is its own."""
    line.fail(True)
    jobs = [line.addressed(ended(number=number)) for number in range(20)]
    with ThreadPoolExecutor(max_workers=20) as pool:
        runs = [pool.submit(line.channel.tell, job) for job in jobs]
    failures = [run.exception() for run in runs if run.exception() is not None]
    assert [type(failure) for failure in failures] == [Untold]
    assert len(line.arrived()) == len(set(line.arrived())) >= 19


def test_the_waits_between_tries_grow_and_end(line: Line) -> None:
    """And a telling is over before its lease."""
    waits = list(line.channel.waits_seconds)
    assert all(earlier <= later for earlier, later in itertools.pairwise(waits))
    assert all(wait > 0 for wait in waits)
    assert sum(waits) <= 7 * DAY_SECONDS
    began = time.monotonic()
    line.channel.tell(line.addressed(ended()))
    assert 1000 * (time.monotonic() - began) < TELLING_MS
