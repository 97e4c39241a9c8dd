"""What an operator does with dead jobs: retry, mend, discard; and the letters that are swept up afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from backburner.errors import InvalidRequest, Overloaded, PortUnavailable, ProviderRefusedRequest
from backburner.models import INLINE_BYTES_MAX, DeadLetter, Hint, Job, JobStatus
from backburner.ports import Conflict
from backburner.redrive import Dead
from tests.fakes.house import House
from tests.fakes.memory import ScriptedProvider

DEAD = [Overloaded() for _ in range(3)]


def dead_house(*script: object) -> tuple[House, Job]:
    """A house with one dead job; afterwards the provider says what the script has."""
    house = House(provider=ScriptedProvider(*DEAD, *script))  # type: ignore[arg-type]
    job = house.accept("k", webhook={"url": "https://hooks.example.com/a", "secret": SECRET})
    house.settle()
    row = house.job(job.job_id)
    assert (row.status, len(house.dead_letters.letters)) == (JobStatus.FAILED, 1)
    return house, row


SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="


def ends(house: House) -> list[str]:
    """Of which ends the receiver was told."""
    return [job.status for job in house.channel.told]


def test_a_retried_job_runs_once_more_and_its_letter_is_swept_up() -> None:
    """With attempts of its own and a new deadline; the client is told of both ends, once each."""
    house, dead = dead_house()
    house.clock.advance(3 * 86_400)
    queued = house.redrive.retry(dead)
    assert (queued.status, queued.attempts, queued.error) == (JobStatus.QUEUED, 0, None)
    assert queued.deadline_at == house.clock.now() + dead.deadline_seconds * 1000
    assert house.redrive.sweep() == 1
    house.settle()
    row = house.job(dead.job_id)
    assert (row.status, row.attempts) == (JobStatus.COMPLETED, 1)
    assert house.dead_letters.letters == []
    assert ends(house) == ["failed", "completed"]


def test_a_job_retried_by_two_operators_and_redriven_by_its_letter_runs_once() -> None:
    """One conditional write; what comes later finds another claim count."""
    house, dead = dead_house()
    letter = house.dead_letters.letters[0].hint
    house.redrive.retry(dead)
    with pytest.raises(Conflict):
        house.redrive.retry(dead)
    house.run(letter)
    house.settle()
    house.run(letter)
    assert len(house.provider.questions) == len(DEAD) + 1  # type: ignore[attr-defined]
    assert house.job(dead.job_id).status is JobStatus.COMPLETED


def test_a_retried_job_whose_hint_is_lost_is_run_all_the_same() -> None:
    """Row first, then hint: the repairer sends another."""
    house, dead = dead_house()

    def refuse(*_: object, **__: object) -> None:
        raise PortUnavailable

    send, house.hints.send = house.hints.send, refuse
    house.redrive.retry(dead)
    house.hints.send = send
    house.settle()
    assert house.job(dead.job_id).status is JobStatus.COMPLETED


def test_a_job_that_dies_again_has_a_letter_of_its_own() -> None:
    """And only that one is left."""
    house, dead = dead_house(*DEAD)
    house.redrive.retry(dead)
    house.settle()
    assert house.redrive.sweep() == 1
    [letter] = house.dead_letters.letters
    again = house.job(dead.job_id)
    assert letter.hint == Hint(dead.job_id, died=again.claims)
    assert again.claims > dead.claims
    house.redrive.retry(again)
    house.settle()
    assert house.job(dead.job_id).status is JobStatus.COMPLETED


def test_a_job_that_lost_its_workers_is_retried_by_itself() -> None:
    """It must not take its batch along again."""
    house, dead = dead_house()
    worker_lost = dead.error
    assert worker_lost is not None
    for code, alone in (("worker_lost", True), ("overloaded", False)):
        house.hints.sent.clear()
        row = house.store.rows[dead.job_id] = house.job(dead.job_id)
        failed = _failed(row, code)
        house.store.rows[dead.job_id] = failed
        house.redrive.retry(failed)
        assert [sent.hint.alone for sent in house.hints.sent] == [alone]


def _failed(row: Job, code: str) -> Job:
    from dataclasses import replace

    from backburner.models import Failure

    return replace(row, status=JobStatus.FAILED, error=Failure(code, "", retryable=True))


def test_a_mended_job_asks_what_the_operator_wrote_and_stays_the_clients_own() -> None:
    """The other fields stay; a replay of the client's request is still a replay."""
    house, dead = dead_house("a river")
    house.redrive.retry(dead, {"prompt": "Name a lake.", "max_tokens": 7})
    house.settle()
    asked = house.provider.questions[-1]  # type: ignore[attr-defined]
    assert (asked.messages[0].content, asked.max_tokens) == ("Name a lake.", 7)
    replayed = house.accept("k", webhook={"url": "https://hooks.example.com/a", "secret": SECRET})
    assert (replayed.job_id, replayed.status) == (dead.job_id, JobStatus.COMPLETED)


def test_a_field_is_taken_away_by_none() -> None:
    """As in a JSON merge patch."""
    house = House(provider=ScriptedProvider(*DEAD))
    job = house.accept(system_prompt="Be brief.", max_tokens=3)
    house.settle()
    house.redrive.retry(house.job(job.job_id), {"system_prompt": None})
    stored = json.loads(house.job(job.job_id).request.text or "")
    assert stored == {"max_tokens": 3, "prompt": "Name a river."}


def test_a_large_mended_request_goes_beside_the_row() -> None:
    """Under another name than the client's own."""
    house, dead = dead_house()
    house.redrive.retry(dead, {"prompt": "x" * INLINE_BYTES_MAX})
    row = house.job(dead.job_id)
    assert row.request.text is None
    house.settle()
    assert len(house.provider.questions[-1].messages[0].content) == INLINE_BYTES_MAX  # type: ignore[attr-defined]
    assert house.redrive.request_of(house.job(dead.job_id))["prompt"].startswith("xxx")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"priority": "bulk"}, "priority"),
        ({"deadline_seconds": 5}, "deadline_seconds"),
        ({"webhook": None}, "webhook"),
        ({"metadata": {}}, "metadata"),
        ({"model": "no-such-model"}, "model"),
    ],
)
def test_what_cannot_be_mended_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    """And the job stays as dead as it was."""
    house, dead = dead_house()
    with pytest.raises(InvalidRequest) as refused:
        house.redrive.retry(dead, changes)
    assert refused.value.field == field
    assert house.job(dead.job_id) == dead


def test_a_mended_request_must_be_a_request() -> None:
    """The same checks as at the endpoint."""
    house, dead = dead_house()
    wrong: tuple[dict[str, object], ...] = ({"prompt": None}, {"prompt": " "}, {"max_tokens": 0}, {"messages": []})
    for changes in wrong:
        with pytest.raises(InvalidRequest) as refused:
            house.redrive.retry(dead, changes)
        assert refused.value.fields
    assert house.job(dead.job_id) == dead


def test_a_discarded_job_stays_failed_is_told_once_and_runs_no_more() -> None:
    """By whatever letter or hint; its client learns nothing new."""
    house, dead = dead_house()
    letter = house.dead_letters.letters[0].hint
    assert letter is not None
    house.lifecycle.discard(dead)
    assert house.redrive.sweep() == 1
    house.run(letter)
    with pytest.raises(Conflict):
        house.redrive.retry(house.job(dead.job_id))
    house.settle()
    row = house.job(dead.job_id)
    assert (row.status, row.error, row.finished_at) == (JobStatus.FAILED, dead.error, dead.finished_at)
    assert ends(house) == ["failed"]
    assert len(house.provider.questions) == len(DEAD)  # type: ignore[attr-defined]
    assert house.lifecycle.discard(row).discarded_at == row.discarded_at


def test_a_job_discarded_before_its_letter_was_sent_gets_none() -> None:
    """The client is still told."""
    house = House(provider=ScriptedProvider(*DEAD))
    job = house.accept(webhook={"url": "https://hooks.example.com/a", "secret": SECRET})
    bury = house.dead_letters.bury

    def refuse(*_: object, **__: object) -> None:
        raise PortUnavailable

    house.dead_letters.bury = refuse
    while house.job(job.job_id).status is not JobStatus.FAILED:
        house.work()
        house.clock.advance(10)
    house.dead_letters.bury = bury
    house.lifecycle.discard(house.job(job.job_id))
    house.settle()
    assert (house.dead_letters.letters, ends(house)) == ([], ["failed"])


def test_only_what_has_failed_is_discarded() -> None:
    """Not what runs again, and not another death."""
    house, dead = dead_house(*DEAD)
    house.redrive.retry(dead)
    with pytest.raises(Conflict):
        house.lifecycle.discard(dead)
    house.settle()
    with pytest.raises(Conflict):
        house.lifecycle.discard(dead)
    assert house.job(dead.job_id).discarded_at is None


def test_discarding_while_a_target_is_told_loses_neither() -> None:
    """The outbox changes between the operator's reading and his writing."""
    house = House(provider=ScriptedProvider(*DEAD))
    job = house.accept(webhook={"url": "https://hooks.example.com/a", "secret": SECRET})
    bury = house.dead_letters.bury
    house.dead_letters.bury = lambda *_, **__: (_ for _ in ()).throw(PortUnavailable())
    while house.job(job.job_id).status is not JobStatus.FAILED:
        house.work()
        house.clock.advance(10)
    stale = house.job(job.job_id)
    house.dead_letters.bury = bury
    house.clock.advance(100)
    house.repair.run_once()  # buries the letter and sets the telling going
    house.tell()
    row = house.lifecycle.discard(stale)
    assert {(notice.target, notice.status) for notice in row.outbox} == {
        ("dead_letter", "delivered"),
        ("webhook", "delivered"),
    }


def test_the_sweep_leaves_what_still_asks_for_something() -> None:
    """Dead jobs, letters without a reason, what is no hint, and jobs that never were."""
    house, dead = dead_house()
    house.dead_letters.redrive_policy_moves(Hint("job_x"))
    house.dead_letters.bury("garbage", reason="malformed_hint", detail="", lane=dead.lane, client_id=None)
    house.run("job_never")
    before = list(house.dead_letters.letters)
    assert len(before) == 4
    assert house.redrive.sweep() == 0
    assert house.dead_letters.letters == before
    garbage = next(letter for letter in before if letter.body == "garbage")
    assert house.redrive.sweep({garbage.name}) == 1
    assert garbage not in house.dead_letters.letters


def test_letters_of_one_cause_are_told_from_others_whatever_ids_they_name() -> None:
    """Numbers and ids differ from job to job, the cause does not."""

    def cause(reason: str | None, detail: str) -> tuple[str, str]:
        return Dead(DeadLetter("r", "", reason, None, detail=detail), None).cause

    first = cause("overloaded", "Request req_011CSHoEeqs5C35K2UUqR7Fy failed after 12 s.")
    assert first == cause("overloaded", "Request req_77aaSHoEeqs5C35K2UUqR7zz failed after 7 s.")
    assert first != cause("timeout", "Request req_011CSHoEeqs5C35K2UUqR7Fy failed after 12 s.")
    assert cause("a", "the model 'm-1' is gone") != cause("a", "the key is refused")
    assert cause(None, "")[0] == "unexplained"


def test_a_look_at_many_letters_shows_each_once_and_puts_them_back() -> None:
    """Also one that is broken off."""
    house = House()
    for number in range(35):
        house.dead_letters.bury(f"{number}", reason="x", detail="", lane=house.accept().lane, client_id=None)
    for _ in range(2):
        names = [dead.letter.name for dead in house.redrive.letters()]
        assert len(names) == len(set(names)) == 35
    look = house.redrive.letters()
    next(look)
    look.close()  # type: ignore[attr-defined]
    assert len(list(house.redrive.letters())) == 35


def test_letters_in_the_repairers_hand_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks every minute, and hides what it looks at for seconds. What stays hidden is not waited for for ever."""
    house, _ = dead_house()
    receive = house.dead_letters.receive
    looks: list[int] = []

    def later(seconds: int) -> Sequence[DeadLetter]:
        looks.append(seconds)
        return [] if len(looks) < 4 else receive(seconds)

    monkeypatch.setattr(house.dead_letters, "receive", later)
    assert len(list(house.redrive.letters())) == 1
    monkeypatch.setattr(house.dead_letters, "receive", lambda _seconds: [])
    assert list(house.redrive.letters()) == []


def test_a_failure_that_only_the_client_can_mend_can_be_retried_mended() -> None:
    """It has no letter, but a row."""
    house = House(provider=ScriptedProvider(ProviderRefusedRequest()))
    job = house.accept()
    house.settle()
    assert house.dead_letters.letters == []
    house.redrive.retry(house.job(job.job_id), {"prompt": "Name a lake."})
    house.settle()
    assert house.job(job.job_id).status is JobStatus.COMPLETED


def test_a_redriven_hint_that_no_worker_can_answer_is_a_dead_letter_again() -> None:
    """The redrive policy moves it there without its reason; the repairer gives it back its letter."""
    house, dead = dead_house()
    [letter] = house.dead_letters.letters
    house.dead_letters.remove(letter)
    house.dead_letters.redrive_policy_moves(letter.hint)
    house.repair.run_once()
    assert [(found.reason, found.hint) for found in house.dead_letters.letters] == [("overloaded", letter.hint)]
    house.lifecycle.discard(dead)
    house.dead_letters.letters.clear()
    house.dead_letters.redrive_policy_moves(letter.hint)
    house.repair.run_once()
    assert house.dead_letters.letters == []
