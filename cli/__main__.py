"""`backburner`: the operator's tool."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated, Any

import boto3
import typer

from cli.clients import create_client

app = typer.Typer(no_args_is_help=True, help="Operate a Backburner deployment.")
clients = typer.Typer(no_args_is_help=True, help="Clients and their API keys.")
app.add_typer(clients, name="clients")

StackName = Annotated[str, typer.Option("--stack", help="The CloudFormation stack.", envvar="BACKBURNER_STACK_NAME")]
Profile = Annotated[str | None, typer.Option("--profile", help="The AWS profile.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def main() -> None:
    """Operate a Backburner deployment."""


def outputs(session: Any, stack: str) -> dict[str, str]:
    """The stack's outputs. Ends the program with one clear line if there is no such stack."""
    try:
        (described,) = session.client("cloudformation").describe_stacks(StackName=stack)["Stacks"]
    except Exception as error:
        typer.secho(f"There is no stack {stack!r} to be seen: {error}", err=True, fg="red")
        raise typer.Exit(1) from error
    found = {entry["OutputKey"]: entry["OutputValue"] for entry in described["Outputs"]}
    if os.environ.get("AWS_ENDPOINT_URL") and os.environ.get("BACKBURNER_API_URL"):
        found["ApiUrl"] = os.environ["BACKBURNER_API_URL"]  # the local stack's; its output names an address on AWS
    return found


@clients.command("create")
def create(
    client_id: Annotated[str, typer.Argument(help="Lower-case letters, digits and hyphens.")],
    name: Annotated[str, typer.Option(help="What people call it; the id if left out.")] = "",
    background: Annotated[
        bool | None,
        typer.Option(help="Let OpenAI keep its calls going in the background, or not; left out: as deployed."),
    ] = None,
    stack: StackName = "backburner",
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Create a client and print its API key, which is kept nowhere else."""
    session = boto3.Session(profile_name=profile)
    found = outputs(session, stack)
    table = session.resource("dynamodb").Table(found["ClientsTableName"])
    try:
        key = create_client(table, client_id, name or client_id, time.time_ns() // 1_000_000, background=background)
    except ValueError as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps({"client_id": client_id, "api_key": key, "api_url": found["ApiUrl"]}))
        return
    typer.echo(f"Client {client_id} may now use this key. Keep it safe: it is not stored and cannot be shown again.")
    typer.echo(f"\n  {key}\n")
    typer.echo(f"Try it:  curl {found['ApiUrl']}/jobs -H 'Authorization: Bearer {key}' \\\n"
               "           -H 'Content-Type: application/json' -d '{\"prompt\":\"Name a river.\"}'")  # fmt: skip


if __name__ == "__main__":
    app(prog_name="backburner")
