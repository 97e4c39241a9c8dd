"""`backburner`: the operator's tool."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import Annotated, Any

import boto3
import typer
from rich.console import Console
from rich.table import Table

from backburner.errors import BackburnerError
from backburner.models import ClientLimits, Gauge, ModelInfo
from backburner.pricing import PriceList
from cli.clients import create_client, limit_client, micro_usd
from cli.limits import change, gauges, shown, state

app = typer.Typer(no_args_is_help=True, help="Operate a Backburner deployment.")
clients = typer.Typer(no_args_is_help=True, help="Clients and their API keys.")
limits = typer.Typer(no_args_is_help=True, help="The providers' limits, changed while jobs run.")
webhook_secret = typer.Typer(no_args_is_help=True, help="What a client's webhooks are signed with.")
webhooks = typer.Typer(no_args_is_help=True, help="Webhooks that were sent, or were to be.")
clients.add_typer(webhook_secret, name="webhook-secret")
app.add_typer(clients, name="clients")
app.add_typer(webhooks, name="webhooks")
app.add_typer(limits, name="limits")

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


RequestsPerMinute = Annotated[int | None, typer.Option(min=0, help="0 for no limit.", show_default=False)]
TokensPerDay = Annotated[
    int | None, typer.Option(min=0, help="Input and output, by UTC's day; 0 for no limit.", show_default=False)
]
UsdPerDay = Annotated[
    float | None, typer.Option(min=0, help="Dollars, by UTC's day; 0 for no limit.", show_default=False)
]


def limits_given(requests: int | None, tokens: int | None, usd: float | None) -> dict[str, int | None]:
    """The limits that were named, a zero as None."""
    given = {
        "requests_per_minute": requests,
        "tokens_per_day": tokens,
        "micro_usd_per_day": None if usd is None else micro_usd(usd),
    }
    return {name: value or None for name, value in given.items() if value is not None}


@clients.command("create")
def create(
    client_id: Annotated[str, typer.Argument(help="Lower-case letters, digits and hyphens.")],
    name: Annotated[str, typer.Option(help="What people call it; the id if left out.")] = "",
    background: Annotated[
        bool | None,
        typer.Option(help="Let OpenAI keep its calls going in the background, or not; left out: as deployed."),
    ] = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    usd_per_day: UsdPerDay = None,
    stack: StackName = "backburner",
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Create a client and print its API key, which is kept nowhere else."""
    session = boto3.Session(profile_name=profile)
    found = outputs(session, stack)
    table = session.resource("dynamodb").Table(found["ClientsTableName"])
    wanted = ClientLimits(**limits_given(requests_per_minute, tokens_per_day, usd_per_day))
    now = time.time_ns() // 1_000_000
    try:
        key = create_client(table, client_id, name or client_id, now, background=background, limits=wanted)
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


@clients.command("limit")
def limit(
    client_id: Annotated[str, typer.Argument(help="As it was created.")],
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    usd_per_day: UsdPerDay = None,
    stack: StackName = "backburner",
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Set a client's limits, in force within half a minute."""
    wanted = limits_given(requests_per_minute, tokens_per_day, usd_per_day)
    if not wanted:
        typer.secho("Say what to set, such as --requests-per-minute 60.", err=True, fg="red")
        raise typer.Exit(2)
    session = boto3.Session(profile_name=profile)
    table = session.resource("dynamodb").Table(outputs(session, stack)["ClientsTableName"])
    try:
        now = limit_client(table, client_id, wanted)
    except LookupError as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(asdict(now)))
        return
    usd = None if now.micro_usd_per_day is None else now.micro_usd_per_day / 1_000_000
    for name, value in (("requests a minute", now.requests_per_minute), ("tokens a day", now.tokens_per_day),
                        ("dollars a day", usd)):  # fmt: skip
        typer.echo(f"{name}: {'no limit' if value is None else f'{value:,}'}")


@webhook_secret.command("rotate")
def rotate_webhook_secret(
    client_id: Annotated[str, typer.Argument(help="A client that exists.")],
    grace_hours: Annotated[float, typer.Option(min=0, max=720, help="How long the one before stays valid too.")] = 24,
    stack: StackName = "backburner",
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Give a client a new webhook secret and print it, once. Until the one before ends, both sign."""
    from backburner.adapters.dynamodb import ClientsTable
    from backburner.adapters.secrets import FernetSeals
    from cli.webhooks import rotate

    session = boto3.Session(profile_name=profile)
    found = outputs(session, stack)
    table = ClientsTable(session.client("dynamodb"), found["ClientsTableName"])
    seals = FernetSeals(lambda: session.client("secretsmanager"), found["WebhookKeySecretArn"])
    try:
        secret = rotate(
            table, seals, client_id, now=time.time_ns() // 1_000_000, grace_ms=round(grace_hours * 3_600_000)
        )
    except (ValueError, BackburnerError) as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps({"client_id": client_id, "webhook_secret": secret}))
        return
    typer.echo(
        f"Webhooks of {client_id} are now signed with this secret. Give it to the receiver; it is not shown again."
    )
    typer.echo(f"\n  {secret}\n")
    typer.echo(f"The one before, if there was one, signs as well for {grace_hours:g} hours.")


@webhooks.command("resend")
def resend_webhook(
    job_id: Annotated[str, typer.Argument(help="A job that has ended.")],
    stack: StackName = "backburner",
    profile: Profile = None,
) -> None:
    """Send a job's webhook again, with the same webhook-id, whatever became of it before."""
    from backburner.ports import Conflict
    from cli.webhooks import lifecycle_of, resend

    session = boto3.Session(profile_name=profile)
    try:
        resend(lifecycle_of(session, outputs(session, stack)), job_id)
    except (ValueError, BackburnerError) as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(2) from error
    except Conflict as error:
        typer.secho(f"{job_id} is being told this very moment; try again.", err=True, fg="red")
        raise typer.Exit(1) from error
    typer.echo(f"{job_id}: its webhook is on its way. `deliveries` of the job shows what becomes of it.")


PerMinute = Annotated[int | None, typer.Option(min=0, help="Per minute; 0 takes it back.", show_default=False)]


@limits.command("show")
def show_limits(stack: StackName = "backburner", profile: Profile = None, as_json: AsJson = False) -> None:
    """Show each model's limits per minute, where they come from, and what holds it up now."""
    session = boto3.Session(profile_name=profile)
    rows = gauges(session.client("dynamodb"), outputs(session, stack)["LimitsTableName"])
    catalogue, now = PriceList.load(), time.time_ns() // 1_000_000
    models = [catalogue.find(name) or unknown(name) for name in sorted({*catalogue.names(), *rows})]
    lines = [line for model in models for line in shown(model, rows.get(model.name, Gauge(model.name)))]
    if as_json:
        typer.echo(json.dumps({"limits": [asdict(line) for line in lines],
                               "state": {name: state(row, now) for name, row in rows.items()}}))  # fmt: skip
        return
    grid = Table("model", "per minute", "catalogue", "operator", "provider says", "in force")
    for line in lines:
        cells = (line.catalogue, line.operator, line.provider, line.in_force)
        grid.add_row(line.model, line.dimension.replace("_", " "), *(f"{c:,.0f}" if c else "" for c in cells))
    Console().print(grid)
    for name, row in rows.items():
        typer.echo(f"{name}: {state(row, now) or 'nothing reserved'}")


@limits.command("set")
def set_limits(
    model: Annotated[str, typer.Argument(help="As in the catalogue.")],
    requests: PerMinute = None,
    tokens: PerMinute = None,
    input_tokens: PerMinute = None,
    output_tokens: PerMinute = None,
    burst_ms: Annotated[int | None, typer.Option(min=0, max=60_000, help="How far calls may bunch together.")] = None,
    stack: StackName = "backburner",
    profile: Profile = None,
) -> None:
    """Set a model's limits, in force from its next call. `tokens` is input and output together, as OpenAI counts."""
    session = boto3.Session(profile_name=profile)
    table = outputs(session, stack)["LimitsTableName"]
    given = {"requests": requests, "tokens": tokens, "input_tokens": input_tokens, "output_tokens": output_tokens}
    wanted = {name: value or None for name, value in given.items() if value is not None}
    if not wanted and burst_ms is None:
        typer.secho("Say what to set, such as --requests 500.", err=True, fg="red")
        raise typer.Exit(2)
    try:
        change(session.client("dynamodb"), table, model, wanted, burst_ms)
    except ValueError as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(2) from error
    typer.echo(f"{model}: set. `limits show` tells what is in force.")


def unknown(name: str) -> ModelInfo:
    """A model of the deployment's own catalogue, of which only its row is known here."""
    return ModelInfo(name, "", 0, 0, 0, 0, 0, 0)


@app.command()
def doctor(stack: StackName = "backburner", profile: Profile = None, as_json: AsJson = False) -> None:
    """Try out how a deployment is set up, and say what is wrong. Ends with 1 if anything is."""
    from cli.doctor import check_slack

    session = boto3.Session(profile_name=profile)
    found = outputs(session, stack)
    text = session.client("secretsmanager").get_secret_value(SecretId=found["ProviderSecretArn"])["SecretString"]
    (described,) = session.client("cloudformation").describe_stacks(StackName=stack)["Stacks"]
    chosen = {entry["ParameterKey"]: entry["ParameterValue"] for entry in described.get("Parameters", [])}
    findings = check_slack(json.loads(text), found["ApiUrl"], chosen.get("SlackApiBaseUrl", ""))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        table = Table("", "what", "")
        for finding in findings:
            table.add_row({True: "ok", False: "WRONG", None: "-"}[finding.ok], finding.what, finding.detail)
        Console().print(table)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="backburner")
