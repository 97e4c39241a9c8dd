"""Answers told while they are written: without gap or repeat, whoever comes and goes, and at no cost to the job."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backburner.lifecycle import RENEW_MS
from backburner.models import Attempt, Job, JobStatus, Payload
from backburner.ports import Listener
from backburner.streaming import (
    FRAME_BYTES_MAX,
    LOOK_SECONDS,
    LOOK_SECONDS_MAX,
    MISSES_MAX,
    PIECE_CHARACTERS_MAX,
    PUSH_SECONDS,
    Broadcast,
    LiveAnswers,
    delta_frame,
    job_frame,
)
from docs.examples.follow import Answer
from tests.fakes.house import ALICE, House
from tests.fakes.sockets import AtOnce, MemoryConnections, MemorySockets

NEVER = 10**12


@dataclass
class Room:
    """A house whose answers can be listened to."""

    house: House = field(default_factory=House)
    sockets: MemorySockets = field(default_factory=MemorySockets)
    time: float = 0.0

    def __post_init__(self) -> None:
        self.connections = MemoryConnections(lambda: 0)
        self.live = LiveAnswers(
            self.connections, self.sockets, self.house.store, AtOnce(), lambda: self.time, self.house.journal
        )
        self.count = 0

    def job(self, **changes: Any) -> Job:
        """A job that is being worked on and may be listened to."""
        job = self.house.lifecycle.claim(self.house.accept(stream=True).job_id, "worker")
        return replace(job, **changes)

    def listener(self, job: Job, connection_id: str = "c", draft: int = 0, position: int = 0) -> None:
        """A connection that follows the job, anew if it did."""
        self.count += 1
        self.connections.open(connection_id, ALICE.client_id, NEVER)
        self.connections.subscribe(job.job_id, Listener(connection_id, f"s{self.count}", draft, position), jobs_max=9)

    def push(self, broadcast: Broadcast, seconds: float = LOOK_SECONDS) -> None:
        """Let time pass, then push."""
        self.time += seconds
        broadcast.push()

    def text(self, connection_id: str = "c") -> str:
        """What the connection was sent, put together by the documented client."""
        answer = Answer()
        for frame in self.sockets.sent(connection_id, "delta"):
            answer.take(frame)
        return answer.text


@pytest.fixture
def room() -> Room:
    return Room()


# ── Pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_said_between_two_pushes_is_one_piece(room: Room) -> None:
    """Seven messages a second, however fast the model writes."""
    job = room.job()
    room.listener(job)
    broadcast = Broadcast(job, room.live)
    broadcast.begin()
    for piece in ("Do", "na", "u"):
        broadcast.say(piece)
    room.push(broadcast)
    broadcast.say(", Elbe")
    room.push(broadcast)
    room.push(broadcast)
    assert room.sockets.sent("c", "delta") == [
        {"type": "delta", "job_id": job.job_id, "draft": 1, "position": 0, "end": 5, "text": "Donau"},
        {"type": "delta", "job_id": job.job_id, "draft": 1, "position": 5, "end": 11, "text": ", Elbe"},
    ]


def test_positions_count_characters_not_bytes_or_utf_16_units(room: Room) -> None:
    """A pair of surrogates that comes in two pieces is one character; half of one becomes a replacement."""
    job = room.job()
    room.listener(job)
    broadcast = Broadcast(job, room.live)
    broadcast.begin()
    for piece in ("中😀", "\ud83d", "\ude00.", "\ude00", "\ud83d", "x"):
        broadcast.say(piece)
        room.push(broadcast)
    assert room.text() == "中😀😀.\ufffd\ufffdx"
    assert room.sockets.sent("c", "delta")[-1]["end"] == 7


def test_a_late_listener_gets_all_that_was_said(room: Room) -> None:
    """In frames that pass, from the beginning."""
    job = room.job()
    broadcast = Broadcast(job, room.live)
    broadcast.begin()
    text = "\u0001" * (2 * PIECE_CHARACTERS_MAX) + "😀" * PIECE_CHARACTERS_MAX + "end"
    broadcast.say(text)
    room.push(broadcast)
    room.listener(job)
    room.push(broadcast)
    assert room.text() == text
    assert len(room.sockets.sent("c", "delta")) == 4


def test_a_listener_who_comes_back_gets_the_rest(room: Room) -> None:
    """From the position that it names, if that is of this draft."""
    job = room.job()
    broadcast = Broadcast(job, room.live)
    broadcast.begin()
    broadcast.say("0123456789")
    room.push(broadcast)
    room.listener(job, "same", draft=1, position=7)
    room.listener(job, "of-an-older-draft", draft=0, position=7)
    room.listener(job, "beyond", draft=1, position=11)
    room.listener(job, "up-to-date", draft=1, position=10)
    room.push(broadcast)
    begun = {name: frame["position"] for name, frame in room.sockets.frames}
    assert begun == {"same": 7, "of-an-older-draft": 0, "beyond": 0}


def test_the_next_attempt_is_another_draft(room: Room) -> None:
    """The client throws the old one away, without being told to."""
    job = room.job()
    room.listener(job)
    for claims, pieces in ((1, ("An ans",)), (2, ("Another", " one"))):
        broadcast = Broadcast(replace(job, claims=claims), room.live)
        broadcast.begin()
        for piece in pieces:
            broadcast.say(piece)
            room.push(broadcast)
    assert room.text() == "Another one"


# ── Any pattern of cuts ──────────────────────────────────────────────────────────────────────────────────────────────

texts = st.text(max_size=12) | st.integers(1, 3 * PIECE_CHARACTERS_MAX).map(lambda size: "ab😀"[size % 3] * size)
steps = st.lists(
    st.one_of(
        texts.map(lambda text: ("say", text)),
        st.sampled_from(
            [("push", ""), ("cut", ""), ("come back", ""), ("subscribe anew", ""), ("fail", ""), ("fail unseen", ""),
             ("lose the worker", "")]
        ),
    ),
    max_size=40,
)  # fmt: skip


@given(steps)
@settings(max_examples=300, deadline=None)
def test_any_pattern_of_cuts_and_returns_gives_exactly_the_text(pattern: list[tuple[str, str]]) -> None:
    """A client that keeps draft and position has a beginning of the draft at all times, and all of it at last."""
    room = Room()
    job = room.job()
    client, said, connected, taken, trouble = Answer(), "", 0, 0, ""
    broadcast = Broadcast(job, room.live)
    broadcast.begin()

    def connect() -> None:
        nonlocal connected
        connected += 1
        room.listener(job, f"c{connected}", client.draft, client.position)

    def receive() -> None:
        """What was sent reaches the client, unless its connection was cut before."""
        nonlocal taken
        for name, frame in room.sockets.frames[taken:]:
            if name == f"c{connected}" and frame["type"] == "delta":
                client.take(frame)
                assert client.draft <= job.claims
                assert client.draft < job.claims or said.startswith(client.text)
        taken = len(room.sockets.frames)

    def before_post(connection_id: str) -> None:
        nonlocal trouble
        room.sockets.broken.discard(connection_id)
        if trouble:
            if trouble == "fail unseen":  # the frame arrives, and its sender does not know
                post = room.sockets.before_post
                room.sockets.before_post = lambda _: None
                room.sockets.post(connection_id, frames[-1])
                room.sockets.before_post = post
            room.sockets.broken.add(connection_id)
            trouble = ""

    frames: list[str] = []
    post = room.sockets.post

    def noted(connection_id: str, frame: str) -> bool:
        frames.append(frame)
        return post(connection_id, frame)

    room.sockets.post = noted  # type: ignore[method-assign]
    room.sockets.before_post = before_post
    connect()
    for step, text in pattern:
        if step == "say":
            broadcast.say(text)
            said += text
        elif step == "push":
            room.push(broadcast)
            receive()
        elif step == "cut":
            room.sockets.gone.add(f"c{connected}")
        elif step == "come back":
            room.sockets.gone.add(f"c{connected}")
            connect()
        elif step == "subscribe anew":
            room.listener(job, f"c{connected}", client.draft, client.position)
        elif step.startswith("fail"):
            trouble = step
        else:
            job, said = replace(job, claims=job.claims + 1), ""
            broadcast = Broadcast(job, room.live)
            broadcast.begin()
    trouble = ""
    room.push(broadcast)
    room.push(broadcast)
    receive()
    given_up = any(ear.misses >= MISSES_MAX for ear in broadcast._ears.values())
    if f"c{connected}" in room.sockets.gone or given_up:
        connect()
        room.push(broadcast)
        receive()
    assert client.text == said or (client.draft < job.claims and not said)


# ── What goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_nobody_wants_to_hear_costs_nothing(room: Room) -> None:
    """No thread and no look, also when its lease is renewed."""
    before = threading.active_count()
    job = room.house.lifecycle.claim(room.house.accept().job_id, "worker")
    with room.live.listening(job) as audience:
        audience.say("unheard")
        audience.seen(room.house.lifecycle.renew(job, job.due_at))
        assert threading.active_count() == before
    assert room.connections.looks == 0


def test_who_comes_while_the_call_runs_hears_it_from_the_beginning() -> None:
    """The renewal of the lease shows that somebody has come, though nobody had wanted to hear the job."""
    room = Room()
    house = room.house
    live = replace(room.live, monotonic=time.monotonic)
    house.execution = replace(house.execution, deltas=live)
    job_id = house.accept().job_id

    def think() -> str:
        (lease,) = house.execution.leases.held
        assert lease.audience is not None
        lease.audience.say("first ")
        room.listener(house.job(job_id))
        house.submission.follow(house.job(job_id))
        house.execution.leases.tick()  # nothing is due yet
        assert room.sockets.frames == []
        house.clock.advance(RENEW_MS / 1000)
        house.execution.leases.tick()
        end = time.monotonic() + 10
        while room.text() != "first " and time.monotonic() < end:
            time.sleep(0.01)
        assert room.text() == "first "
        return "then"

    house.provider.script = [think]  # type: ignore[attr-defined]
    house.work()
    assert house.job(job_id).status is JobStatus.COMPLETED


def test_without_listeners_nothing_is_posted(room: Room) -> None:
    """A look now and then is all."""
    job = room.job()
    broadcast = Broadcast(job, room.live)
    broadcast.begin()
    broadcast.say("unheard")
    for _ in range(8):
        room.push(broadcast, LOOK_SECONDS / 4)
    assert room.sockets.frames == []
    assert room.connections.looks == 3


def test_the_longer_nobody_comes_the_rarer_are_the_looks(room: Room) -> None:
    """A minute's answer without a listener is some twenty looks; whoever comes is heard soon, and looked for again."""
    job = room.job()
    broadcast = Broadcast(job, room.live)
    broadcast.begin()
    for _ in range(400):
        room.push(broadcast, PUSH_SECONDS)
    assert 15 < room.connections.looks < 25
    broadcast.say("text")
    room.listener(job)
    room.push(broadcast, LOOK_SECONDS_MAX)
    assert room.text() == "text"
    room.sockets.gone.add("c")
    broadcast.say(" and more")
    room.push(broadcast)
    before = room.connections.looks
    for _ in range(4):
        room.push(broadcast)
    assert room.connections.looks == before + 4


def test_a_gone_connection_is_removed_and_the_others_go_on(room: Room) -> None:
    """410: it is closed, with all that it followed."""
    job = room.job()
    room.listener(job, "a")
    room.listener(job, "b")
    room.sockets.gone.add("a")
    broadcast = Broadcast(job, room.live)
    broadcast.begin()
    broadcast.say("text")
    room.push(broadcast)
    assert room.text("b") == "text"
    assert [listener.connection_id for listener in room.connections.listeners(job.job_id, 9, sure=True)] == ["b"]


def test_a_connection_that_keeps_failing_is_left_alone(room: Room) -> None:
    """It gets no more of this draft, but is still a listener, to be told of the end."""
    job = room.job()
    room.listener(job, "a")
    room.sockets.broken.add("a")
    posts: list[str] = []
    room.sockets.before_post = posts.append
    broadcast = Broadcast(job, room.live)
    broadcast.begin()
    for _ in range(10):
        broadcast.say("x")
        room.push(broadcast)
    assert len(posts) == MISSES_MAX
    assert len(room.connections.listeners(job.job_id, 9, sure=True)) == 1


def test_a_slow_connection_holds_up_neither_the_call_nor_the_others() -> None:
    """While one post hangs, the other listener gets its pieces, and the end of the call waits for bounded time."""
    room = Room()
    job = room.job()
    room.listener(job, "fast")
    room.listener(job, "slow")
    hung = threading.Event()
    room.sockets.before_post = lambda connection_id: hung.wait(30) if connection_id == "slow" else None  # type: ignore[assignment]
    with ThreadPoolExecutor(max_workers=4) as posts:
        live = replace(room.live, posts=posts, monotonic=time.monotonic)
        with live.listening(job) as audience:
            began = time.monotonic()
            for piece in "abc":
                audience.say(piece)
            assert time.monotonic() - began < 15
            end = time.monotonic() + 15
            while room.text("fast") != "abc" and time.monotonic() < end:
                time.sleep(0.01)
            assert room.text("fast") == "abc"
            began = time.monotonic()
        assert time.monotonic() - began < 15
        hung.set()


def test_a_fault_of_the_telling_is_not_the_calls(room: Room) -> None:
    """It is noted, and the answer goes on without listeners."""
    job = room.job()
    room.listener(job)
    with replace(room.live, monotonic=lambda: float("no number")).listening(job) as audience:
        audience.say("text")
    assert room.house.journal.named("broadcast_failed") == [{"job_id": job.job_id, "error": "ValueError"}]


def test_where_no_thread_can_be_had_the_call_is_made_all_the_same(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told meanwhile."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with room.live.listening(room.job()) as audience:
        audience.say("text")
    assert room.sockets.frames == []
    assert room.house.journal.named("broadcast_failed")[0]["error"] == "no thread"


def test_a_look_that_fails_leaves_the_listeners_as_they_were(room: Room) -> None:
    """DynamoDB has a bad moment; who is known goes on listening."""
    job = room.job()
    room.listener(job)
    broadcast = Broadcast(job, room.live)
    broadcast.begin()
    room.connections.fails = True
    broadcast.say("text")
    room.push(broadcast)
    assert room.text() == "text"


# ── States ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_listeners_are_told_when_the_job_is_taken_and_when_it_waits_again(room: Room) -> None:
    """Of its end they are told as all targets are, so not here."""
    job = room.job()
    room.listener(job)
    broadcast = Broadcast(job, room.live)
    broadcast.begin()
    row = replace(job, status=JobStatus.QUEUED)
    room.house.store.rows[job.job_id] = row
    broadcast.end()
    room.house.store.rows[job.job_id] = replace(job, status=JobStatus.COMPLETED)
    broadcast.end()
    assert [frame["job"]["status"] for frame in room.sockets.sent("c", "job")] == ["processing", "queued"]


def test_a_worker_gives_a_listener_the_answer_as_it_comes(room: Room) -> None:
    """By way of the execution itself."""
    room.house.execution = replace(
        room.house.execution, deltas=replace(room.live, posts=AtOnce(), monotonic=time.monotonic)
    )
    job = room.house.accept(stream=True)
    room.listener(job)

    def think() -> str:
        time.sleep(0.3)
        return "an answer"

    room.house.provider.script = [think]  # type: ignore[attr-defined]
    room.house.work()
    assert room.house.job(job.job_id).status is JobStatus.COMPLETED
    assert room.sockets.sent("c", "job")[0]["job"]["status"] == "processing"


# ── Frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("character", ["a", '"', "\u0000", "中", "😀", "\u2028", "\\"])
def test_the_largest_piece_fits_a_frame(character: str) -> None:
    """Whatever it is made of."""
    frame = delta_frame("j" * 64, 10**9, 10**9, character * PIECE_CHARACTERS_MAX)
    assert len(frame.encode()) <= FRAME_BYTES_MAX


def _frames(job: Job) -> Iterator[dict[str, Any]]:
    frame = job_frame(job)
    assert len(frame.encode()) <= FRAME_BYTES_MAX
    yield json.loads(frame)


def test_a_job_that_is_too_large_for_a_frame_is_shown_without_what_is_large(room: Room) -> None:
    """First without its result, then without metadata and receipt; a result kept apart is not even read."""
    small = replace(room.job(), status=JobStatus.COMPLETED, result=Payload('{"text":"short"}'))
    (shown,) = _frames(small)
    assert shown["job"]["result"] == {"text": "short"}
    (shown,) = _frames(replace(small, result=Payload(json.dumps({"text": "x" * FRAME_BYTES_MAX}))))
    assert "result" not in shown["job"]
    assert "GET the job" in shown["job"]["result_note"]
    (shown,) = _frames(replace(small, result=Payload(None, "results/1")))
    assert "GET the job" in shown["job"]["result_note"]
    line = Attempt(1, "x" * 1_000, 1, 2)
    (shown,) = _frames(replace(small, metadata=json.dumps({"a": "b" * 16_000}), log=(line,) * 30))
    assert shown["job"]["status"] == "completed"
    assert "metadata" not in shown["job"]
    assert "receipt" not in shown["job"]
