"""`backburner`: the operator's tool. Each group of commands is a module of its own; here they meet."""

from __future__ import annotations

import typer

from cli import clients, dlq, doctor, jobs, lanes, limits, load, secrets, size, status, submit, tail, webhooks
from cli.screen import Tool

app = typer.Typer(
    cls=Tool,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Operate a Backburner deployment: the local stack if one is running, `--stack NAME` for another.",
    epilog="Something is wrong? `status`, then `dlq list`, then `jobs show` or `tail`; docs/runbook.md says what to do."
    " A new deployment? `secrets set`, `clients create`, `doctor`, `load`.",
)
app.command()(status.status)
app.command()(submit.submit)
app.command()(tail.tail)
app.add_typer(jobs.app, name="jobs")
app.add_typer(dlq.app, name="dlq")
app.command()(lanes.pause)
app.command()(lanes.resume)
app.command()(lanes.drain)
app.add_typer(clients.app, name="clients")
app.add_typer(limits.app, name="limits")
app.add_typer(secrets.app, name="secrets")
app.add_typer(webhooks.app, name="webhooks")
app.command()(doctor.doctor)
app.command()(size.size)
app.command()(load.load)

if __name__ == "__main__":
    app(prog_name="backburner")
