"""Other models where one cannot serve, and calls that outlive their worker."""

from dataclasses import replace
from typing import Any

import pytest

from backburner.errors import (
    Authentication,
    ConnectionLost,
    ContentFiltered,
    ContextLengthExceeded,
    InvalidRequest,
    JobFailed,
    Overloaded,
    ProviderTimeout,
    QuotaExhausted,
)
from backburner.lifecycle import LEASE_MS
from backburner.models import Client, JobStatus
from backburner.ports import Background
from tests.fakes.house import ALICE, House
from tests.fakes.memory import MODEL, MemoryCatalogue, ScriptedProvider

SMALL = replace(MODEL, name="small", context_tokens=2_000, output_tokens_max=1_000)
LARGE = replace(MODEL, name="large", context_tokens=100_000)


def house(*script: Any, attempts_max: int = 3) -> House:
    """A house that knows three models."""
    built = House(provider=ScriptedProvider(*script), attempts_max=attempts_max)
    catalogue = MemoryCatalogue(MODEL, SMALL, LARGE)
    built.submission = replace(built.submission, catalogue=catalogue)
    built.execution = replace(built.execution, catalogue=catalogue)
    return built


def asked(built: House) -> list[str]:
    """The models that were called, in turn."""
    return [question.model.name for question in built.provider.questions]  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [QuotaExhausted(), Authentication()])
def test_a_refusal_that_another_model_could_serve_goes_to_it_at_once(error: JobFailed) -> None:
    """One call each; the answer names who gave it, and no operator is woken."""
    built = house(error, "from the other")
    job = built.accept(fallback_models=["large"])
    built.settle()
    row = built.job(job.job_id)
    assert row.status is JobStatus.COMPLETED
    assert asked(built) == ["m-1", "large"]
    assert row.result is not None
    assert '"model":"large"' in (row.result.text or "")
    assert [line.model for line in row.log] == ["m-1", "large"]
    assert built.dead_letters.letters == []


def test_overload_goes_to_the_next_model_after_the_retries() -> None:
    """Each model has attempts of its own; then the job is dead."""
    built = house(*[Overloaded() for _ in range(10)], attempts_max=2)
    job = built.accept(fallback_models=["large"])
    built.settle()
    row = built.job(job.job_id)
    assert asked(built) == ["m-1", "m-1", "large", "large"]
    assert (row.status, row.attempts) == (JobStatus.FAILED, 4)
    assert [letter.reason for letter in built.dead_letters.letters] == ["overloaded"]


def test_what_no_other_model_could_mend_is_final() -> None:
    """A filtered answer is filtered."""
    built = house(ContentFiltered())
    built.accept(fallback_models=["large"])
    built.settle()
    assert asked(built) == ["m-1"]


def test_prv_08_a_model_that_the_request_cannot_fit_is_skipped() -> None:
    """By size beforehand; and where the context was too small, only a larger one is asked."""
    built = house(QuotaExhausted(), "fits")
    built.accept(prompt="word " * 2_000, fallback_models=["small", "large"])
    built.settle()
    assert asked(built) == ["m-1", "large"]
    built = house(ContextLengthExceeded())
    job = built.accept(fallback_models=["small"])
    built.settle()
    assert asked(built) == ["m-1"]
    assert built.job(job.job_id).status is JobStatus.FAILED


def test_the_deployments_fallbacks_hold_unless_the_job_names_its_own() -> None:
    """An empty list names none."""
    for own, models in ((None, ["m-1", "large"]), ([], ["m-1"])):
        built = house(QuotaExhausted(), "x")
        built.execution = replace(built.execution, fallback_models=("large",))
        built.accept(fallback_models=own)
        built.settle()
        assert asked(built) == models


def test_an_unknown_fallback_is_refused_by_its_place() -> None:
    """And nothing is stored."""
    built = house()
    with pytest.raises(InvalidRequest) as refused:
        built.accept(fallback_models=["large", "nobody"])
    assert refused.value.field == "fallback_models.1"
    assert not built.store.rows


def test_a_redrive_begins_with_the_model_asked_for() -> None:
    """A new run, with attempts of the first model."""
    built = house(QuotaExhausted(), QuotaExhausted(), "alive")
    job = built.accept(fallback_models=["large"])
    built.settle()
    built.run(built.dead_letters.letters[-1].hint)
    assert asked(built) == ["m-1", "large", "m-1"]
    assert built.job(job.job_id).status is JobStatus.COMPLETED


# ── Calls that go on ─────────────────────────────────────────────────────────────────────────────────────────────────


class _KilledError(BaseException):
    """The worker process is gone."""


def backgrounds(built: House) -> list[Background]:
    """What leave the provider was given."""
    return [given for given in built.provider.backgrounds if given is not None]  # type: ignore[attr-defined]


def test_a_lost_workers_call_is_attached_to() -> None:
    """The name of the call is in the row before it is waited for; the next worker gets it."""
    built = house()
    built.submission = replace(built.submission, background=True)
    job = built.accept()

    def begin_and_die() -> None:
        backgrounds(built)[-1].remember("resp_1")
        raise _KilledError

    built.provider.script.insert(0, begin_and_die)  # type: ignore[attr-defined]
    with pytest.raises(_KilledError):
        built.work()
    assert built.job(job.job_id).handle == "resp_1"
    built.clock.time += LEASE_MS + 1
    built.settle()
    row = built.job(job.job_id)
    assert [given.handle for given in backgrounds(built)] == [None, "resp_1"]
    assert [line.outcome for line in row.log] == ["worker_lost", "completed"]
    assert row.handle is None


@pytest.mark.parametrize("error", [ConnectionLost(), ProviderTimeout(), ZeroDivisionError()])
def test_a_call_that_may_go_on_is_attached_to_after_a_break(error: Exception) -> None:
    """Only what has ended at the provider is asked anew."""
    built = house()

    def begin_and_break() -> None:
        backgrounds(built)[-1].remember("resp_1")
        raise error

    built.provider.script[:] = [begin_and_break, Overloaded(), "at last"]  # type: ignore[attr-defined]
    built.submission = replace(built.submission, background=True)
    built.accept()
    built.settle()
    assert [given.handle for given in backgrounds(built)] == [None, "resp_1", None]


def test_a_cancelled_jobs_call_is_stopped_at_the_provider() -> None:
    """A call that goes on costs until it is told to stop."""
    built = house()
    built.submission = replace(built.submission, background=True)
    job = built.accept()

    def begin_and_be_cancelled() -> None:
        from backburner.errors import Abandoned

        backgrounds(built)[-1].remember("resp_1")
        built.submission.cancel(ALICE, job.job_id)
        built.clock.time += LEASE_MS
        built.leases.tick()
        raise Abandoned

    built.provider.script.insert(0, begin_and_be_cancelled)  # type: ignore[attr-defined]
    built.work()
    assert built.provider.cancelled == ["resp_1"]  # type: ignore[attr-defined]


def test_a_client_may_forbid_or_allow_the_background() -> None:
    """Its data stays at the provider for a while, so its own word counts before the deployment's."""
    for deployment, own, given in ((True, False, 0), (False, True, 1), (True, None, 1), (False, None, 0)):
        built = house()
        built.submission = replace(built.submission, background=deployment)
        built.accept(client=Client("alice", "Alice", background=own))
        built.work()
        assert len(backgrounds(built)) == given


def test_a_deployment_may_fail_what_may_have_been_paid_for() -> None:
    """A worker lost in the middle of a call that cannot be attached to: not asked again, with an honest code."""

    def die() -> None:
        raise _KilledError

    built = house(die)
    object.__setattr__(built.lifecycle, "retry_unknown", False)
    job = built.accept()
    with pytest.raises(_KilledError):
        built.work()
    built.clock.time += LEASE_MS + 1
    built.settle()
    row = built.job(job.job_id)
    assert row.error is not None
    assert (row.status, row.error.code, len(asked(built))) == (JobStatus.FAILED, "outcome_unknown", 1)
