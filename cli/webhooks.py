"""`backburner webhooks`: webhooks that were sent, or were to be."""

from __future__ import annotations

from typing import Annotated

import typer

from backburner.lifecycle import Lifecycle
from backburner.models import WEBHOOK, Job
from backburner.ports import Conflict
from cli.deployment import Deployment, Profile, StackName
from cli.desk import desk_of
from cli.screen import AsJson, Refused, show

app = typer.Typer(no_args_is_help=True, help="Webhooks that were sent, or were to be.")


def resend(lifecycle: Lifecycle, job_id: str) -> Job:
    """Send a job's webhook again, whatever became of it before. Raises Refused if there is none to send."""
    job = lifecycle.store.get(job_id)
    if job is None or job.has_expired(lifecycle.clock.now()):
        raise Refused(f"there is no job {job_id!r}")
    if job.webhook is None:
        raise Refused(f"{job_id} has no webhook")
    if not job.status.is_final:
        raise Refused(f"{job_id} is {job.status}; its webhook is sent when it ends")
    try:
        return lifecycle.retell(job, WEBHOOK)
    except Conflict as error:
        raise Refused(f"{job_id} is being told this very moment; try again.") from error


@app.command("resend")
def resend_webhook(
    job_id: Annotated[str, typer.Argument(help="A job that has ended.")],
    stack: StackName = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Send a job's webhook again, with the same webhook-id, whatever became of it before."""
    resend(desk_of(Deployment.find(stack, profile)).lifecycle, job_id)
    show(
        {"job_id": job_id, "resent": True},
        f"{job_id}: its webhook is on its way. `backburner jobs show {job_id}` tells what becomes of it.",
        as_json=as_json,
    )
