"""The formats of hints and tellings, and the answer to a batch of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backburner.adapters.sqs import batch_handler, hint_body, lane_of, parse_hint, parse_telling, telling_body
from backburner.errors import MalformedHint, MalformedTelling, PortUnavailable
from backburner.models import SCHEMA_VERSION, Hint, Lane, Telling

OF_VERSION_1 = {
    '{"job_id":"job_1","v":1}': Hint("job_1"),
    '{"died":7,"job_id":"job_1","v":1}': Hint("job_1", died=7),
    '{"alone":true,"job_id":"job_1","v":1}': Hint("job_1", alone=True),
    '{"alone":true,"died":0,"job_id":"job_1","v":1}': Hint("job_1", died=0, alone=True),
}
"""As written by the first release. Messages of it may be in the queues while a new one is deployed."""


@pytest.mark.parametrize(("body", "hint"), OF_VERSION_1.items())
def test_hints_of_the_first_version_are_read_and_still_written_so(body: str, hint: Hint) -> None:
    """A change of these lines breaks the jobs that are under way during a deployment."""
    assert parse_hint(body) == hint
    assert hint_body(hint) == body


ids = st.text(st.characters(codec="ascii"), min_size=1, max_size=128)
hints = st.builds(Hint, ids, died=st.none() | st.integers(0, 10**18), alone=st.booleans())


@given(hint=hints)
def test_a_hint_is_read_as_it_was_written(hint: Hint) -> None:
    """In characters that SQS takes, whatever the id; and a hundredth of what a message may hold."""
    body = hint_body(hint)
    assert parse_hint(body) == hint
    assert re.fullmatch("[\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+", body)
    assert len(body.encode()) < 2_621


@pytest.mark.parametrize("more", ['"novelty":[1]', '"alone":false', '"alone":"yes"', '"died":null'])
def test_unknown_fields_of_a_hint_are_passed_over(more: str) -> None:
    """A later version may add some that an earlier one can do without."""
    assert parse_hint(f'{{"job_id":"job_1","v":1,{more}}}') == Hint("job_1")


def test_a_hint_without_a_version_is_of_the_present_one() -> None:
    """An operator types it so."""
    assert parse_hint('{"job_id":"job_1"}') == Hint("job_1", schema_version=SCHEMA_VERSION)


@pytest.mark.parametrize(
    "body",
    [
        None, 7, b"{}", {"job_id": "job_1"}, "", " ", "{", "null", "7", "[]", '"job_1"', "{}", '{"job_id":null}',
        '{"job_id":7}', '{"job_id":""}', '{"job_id":["a"]}', '{"job_id":"ü"}', f'{{"job_id":"{"x" * 129}"}}',
        '{"job_id":"job_1","v":0}', '{"job_id":"job_1","v":2}', '{"job_id":"job_1","v":"1"}',
        '{"job_id":"job_1","v":true}', '{"job_id":"job_1","v":1.0}', '{"job_id":"job_1","v":null}',
        '{"job_id":"job_1","died":"1"}', '{"job_id":"job_1","died":true}', '{"job_id":"job_1","died":1.0}',
        '{"job_id":"job_1","died":' + "9" * 5_000 + "}", "[" * 100_000, '{"job_id":"\\ud800"}', "\ud800",
    ],
    ids=lambda body: ascii(body)[:40],
)  # fmt: skip
def test_what_is_no_hint_is_malformed(body: object) -> None:
    """And nothing else: no other error leaves the reader."""
    with pytest.raises(MalformedHint):
        parse_hint(body)


@given(body=st.text() | st.dictionaries(st.sampled_from(["job_id", "v", "died", "alone"]), st.integers() | st.text()))
def test_no_body_whatever_is_another_error(body: Any) -> None:
    """A hint, or malformed."""
    try:
        hint = parse_hint(body if isinstance(body, str) else json.dumps(body))
    except MalformedHint:
        return
    assert 0 < len(hint.job_id) <= 128


# ── Tellings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tellings_of_the_first_version_are_read_and_still_written_so() -> None:
    """As for hints."""
    body = '{"job_id":"job_1","target":"webhook","tries":2,"v":1}'
    assert parse_telling(body) == Telling("job_1", "webhook", 2)
    assert telling_body(Telling("job_1", "webhook", 2)) == body
    only = '{"claims":3,"job_id":"job_1","target":"webhook","tries":0,"v":1}'
    assert parse_telling(only) == Telling("job_1", "webhook", 0, 3)
    assert telling_body(Telling("job_1", "webhook", 0, 3)) == only


@pytest.mark.parametrize(
    "body",
    [
        None, "", "{", "[]", "{}", '{"job_id":"job_1"}', '{"job_id":"job_1","target":"webhook"}',
        '{"job_id":"job_1","target":"","tries":0}', '{"job_id":"job_1","target":7,"tries":0}',
        '{"job_id":"job_1","target":"webhook","tries":"0"}', '{"job_id":"job_1","target":"webhook","tries":true}',
        '{"job_id":"job_1","target":"webhook","tries":0,"v":2}', '{"job_id":7,"target":"webhook","tries":0}',
    ],
    ids=ascii,
)  # fmt: skip
def test_what_is_no_telling_is_malformed_and_comes_back_until_the_queue_gives_it_up(body: str | None) -> None:
    """Its siblings are told."""
    with pytest.raises(MalformedTelling):
        parse_telling(body)
    told: list[str] = []

    def run(tellings: Mapping[str, Telling], _: Callable[[], float]) -> list[str]:
        told.extend(tellings)
        return []

    handle = batch_handler(parse_telling, run)
    assert handle(_event(body, telling_body(Telling("job_1", "webhook"))), Context()) == _failures("m-0")
    assert told == ["m-1"]


# ── Batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────

type Run = Callable[[Mapping[str, Hint], Callable[[], float]], list[str]]


class Context:
    """Lambda's, with eight seconds left."""

    @staticmethod
    def get_remaining_time_in_millis() -> int:
        return 8_000


def _event(*bodies: str | None) -> dict[str, Any]:
    records = [{"messageId": f"m-{number}", "body": body} for number, body in enumerate(bodies)]
    return {"Records": records}


def _failures(*names: str) -> dict[str, Any]:
    return {"batchItemFailures": [{"itemIdentifier": name} for name in names]}


def _never(*_: Any) -> Any:
    raise AssertionError("this was not to be called")


def test_sqs_05_hints_are_run_together_and_those_that_failed_come_back() -> None:
    """Under the very names that Lambda's poller reads; the time left is the invocation's."""
    seen: list[tuple[dict[str, Hint], float]] = []

    def run(hints: Mapping[str, Hint], time_left: Callable[[], float]) -> list[str]:
        seen.append((dict(hints), time_left()))
        return ["m-1"]

    handle = batch_handler(parse_hint, run, _never)
    assert handle(_event('{"job_id":"a"}', '{"job_id":"b"}'), Context()) == _failures("m-1")
    assert seen == [({"m-0": Hint("a"), "m-1": Hint("b")}, 8.0)]


def test_sqs_05_poison_is_rejected_and_does_not_come_back() -> None:
    """Once, with its body; its siblings run."""
    rejected: list[tuple[str, str]] = []
    ran: list[str] = []

    def run(hints: Mapping[str, Hint], _: Callable[[], float]) -> list[str]:
        ran.extend(hints)
        return []

    handle = batch_handler(parse_hint, run, lambda *poison: rejected.append(poison))
    assert handle(_event("{not json", '{"job_id":"b"}', None, ""), Context()) == _failures()
    assert rejected == [(body, "") for body in ("{not json", "", "")]
    assert ran == ["m-1"]


def test_sqs_05_poison_comes_back_if_it_cannot_be_rejected() -> None:
    """Rather than vanish; three times, then the queue's redrive policy takes it."""

    def refuse(_: str, _queue: str) -> None:
        raise PortUnavailable("AccessDenied")

    handle = batch_handler(parse_hint, lambda *_: ["m-1"], refuse)
    assert handle(_event("poison", '{"job_id":"b"}', "poison"), Context()) == _failures("m-0", "m-2", "m-1")


URLS = {lane: f"https://sqs.eu-central-1.amazonaws.com/123456789012/backburner-{lane}" for lane in Lane}
ARN = "arn:aws:sqs:eu-central-1:123456789012:{}".format


@pytest.mark.parametrize(
    ("arn", "lane"),
    [
        *((ARN(f"backburner-{lane}"), lane) for lane in Lane),
        (ARN("another"), Lane.STANDARD),
        ("", Lane.STANDARD),
    ],
)
def test_poison_is_rejected_with_the_queue_that_it_came_from(arn: str, lane: Lane) -> None:
    """Which is all there is to tell its lane by; a hint sent by hand names none."""
    rejected: list[Lane] = []
    event = _event("poison")
    event["Records"][0]["eventSourceARN"] = arn
    batch_handler(parse_hint, _never, lambda _, queue: rejected.append(lane_of(URLS, queue)))(event, Context())
    assert rejected == [lane]


@pytest.mark.parametrize("event", [{}, {"Records": []}, {"Records": None}, _event("poison")], ids=str)
def test_sqs_05_without_hints_nothing_runs(event: dict[str, Any]) -> None:
    """No keeper thread, no pool."""
    assert batch_handler(parse_hint, _never, lambda *_: None)(event, Context()) == _failures()
