"""`backburner webhooks`: webhooks that were sent, or were to be."""

from __future__ import annotations

from typing import Annotated

import typer

from backburner.models import WEBHOOK
from cli.deployment import Deployment, Profile, Region, StackName
from cli.desk import Desk, desk_of
from cli.jobs import find_job, tell_again
from cli.screen import AsJson, Refused, show

app = typer.Typer(no_args_is_help=True, help="Webhooks that were sent, or were to be.")


def resend(desk: Desk, job_id: str) -> None:
    """Send a job's webhook again, whatever became of it before. Raises Refused if there is none to send."""
    job = find_job(desk, job_id)
    if job.webhook is None:
        raise Refused(f"{job_id} has no webhook")
    if not job.status.is_final:
        raise Refused(f"{job_id} is {job.status}; its webhook is sent when it ends")
    tell_again(desk, job, [WEBHOOK])


@app.command("resend")
def resend_webhook(
    job_id: Annotated[str, typer.Argument(help="A job that has ended.")],
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Send a job's webhook again, with the same webhook-id, whatever became of it before."""
    resend(desk_of(Deployment.find(stack, profile, region)), job_id)
    show(
        {"job_id": job_id, "resent": True},
        f"{job_id}: its webhook is on its way. `backburner jobs show {job_id}` tells what becomes of it.",
        as_json=as_json,
    )
