"""Webhooks: the clients' own secrets, and sending again."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from backburner.adapters.dynamodb import ClientsTable, JobsTable
from backburner.adapters.sqs import DeadLetters, LaneQueues, NoticesQueue
from backburner.adapters.tallies import TalliesTable
from backburner.bootstrap import SystemChance, SystemClock
from backburner.lifecycle import Lifecycle
from backburner.models import WEBHOOK, WEBHOOK_SECRET_PREFIX, EpochMs, Job, Lane
from backburner.ports import Seals


def new_secret() -> str:
    """A fresh webhook secret: 256 random bits."""
    return WEBHOOK_SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def rotate(table: ClientsTable, seals: Seals, client_id: str, *, now: EpochMs, grace_ms: int) -> str:
    """Give a client a new webhook secret and return it; the one before stays valid for so long.

    It is kept sealed only. Raises ValueError if there is no such client.
    """
    if not table.knows(client_id):
        raise ValueError(f"there is no client {client_id!r}")
    secret = new_secret()
    table.put_webhook_secret(client_id, seals.seal(secret), now, previous_until=now + grace_ms)
    return secret


class _Silence:
    """A journal that nobody reads."""

    def note(self, event: str, **fields: Any) -> None:
        """Say nothing."""

    def about(self, **fields: Any) -> AbstractContextManager[None]:  # noqa: ARG002
        """Of nothing."""
        return nullcontext()


def lifecycle_of(session: Any, outputs: Mapping[str, str]) -> Lifecycle:
    """The life cycle of a deployed stack's jobs, with the operator's rights."""
    sqs = session.client("sqs")
    return Lifecycle(
        store=JobsTable(session.client("dynamodb"), outputs["JobsTableName"]),
        hints=LaneQueues(sqs, {Lane.STANDARD: outputs["StandardQueueUrl"]}),
        dead_letters=DeadLetters(sqs, outputs["DeadLetterQueueUrl"]),
        notices=NoticesQueue(sqs, outputs["NotificationsQueueUrl"]),
        tallies=TalliesTable(session.client("dynamodb"), outputs["LimitsTableName"], outputs["JobsTableName"]),
        clock=SystemClock(),
        chance=SystemChance(),
        journal=_Silence(),
    )


def resend(lifecycle: Lifecycle, job_id: str) -> Job:
    """Send a job's webhook again, whatever became of it before. Raises ValueError if there is none to send."""
    job = lifecycle.store.get(job_id)
    if job is None or job.has_expired(lifecycle.clock.now()):
        raise ValueError(f"there is no job {job_id!r}")
    if job.webhook is None:
        raise ValueError(f"{job_id} has no webhook")
    if not job.status.is_final:
        raise ValueError(f"{job_id} is {job.status}; its webhook is sent when it ends")
    return lifecycle.retell(job, WEBHOOK)
