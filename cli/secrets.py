"""`backburner secrets`: the keys of providers and of Slack, which lie in one secret; and the key that seals others."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from backburner.adapters.dynamodb import ClientsTable
from cli.deployment import Deployment, Profile, Region, StackName
from cli.screen import AsJson, Refused, Yes, confirm, show
from cli.sealing import rotate_key

app = typer.Typer(no_args_is_help=True, help="Keys of providers and of Slack, and the key that seals webhook secrets.")

NAMES = ("openai_api_key", "anthropic_api_key", "slack_signing_secret", "slack_bot_token")
"""What the secret holds, as template.yaml makes it."""


def read_secret(at: Deployment) -> dict[str, str]:
    """The deployment's keys by name. Raises Refused if the secret is not a JSON object."""
    arn = at.outputs["ProviderSecretArn"]
    text = at.client("secretsmanager").get_secret_value(SecretId=arn)["SecretString"]
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Refused(
            "The deployment's secret is not a JSON object; see ProviderSecret in template.yaml for its shape."
        )
    return {str(name): str(value) for name, value in found.items()}


def _is_asked() -> bool:
    """Whether somebody is at the keyboard. What comes by a pipe was decided before; there is nobody to ask."""
    return sys.stdin.isatty()


@app.command("set")
def set_(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(NAMES)}.")],
    yes: Yes = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Set one of the deployment's keys; the others stay. It is asked for without echo, or read from stdin.

    At a terminal, asks before it replaces one. Functions take the new key by themselves, as soon as the old one is
    refused, and at their next start.
    """
    if name not in NAMES:
        raise Refused(f"There is no key {name!r}; there are: {', '.join(NAMES)}.")
    at = Deployment.find(stack, profile, region)
    secret = read_secret(at)
    asked = _is_asked()
    if asked and secret.get(name, "").strip():
        confirm(f"{name} of {at.name} is set already. Replace it?", yes=yes)
    value = (typer.prompt(name, hide_input=True) if asked else sys.stdin.read()).strip()
    if not value or not value.isascii() or any(character.isspace() for character in value):
        raise Refused("That is no key: it is empty, or holds spaces or characters that no key has.")
    at.client("secretsmanager").put_secret_value(
        SecretId=at.outputs["ProviderSecretArn"], SecretString=json.dumps({**secret, name: value})
    )
    said = "Functions take it by themselves, as soon as the old one is refused; `backburner doctor` tries it out."
    show({"set": name}, f"{name}: set. {said}", as_json=as_json)


@app.command("rotate-sealing-key")
def rotate_sealing_key(
    keep: Annotated[
        int | None,
        typer.Option(min=0, help="How many keys before it go on opening; left out: all.", show_default=False),
    ] = None,
    yes: Yes = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Seal webhook secrets with a fresh key from now on, and the clients' own with it anew.

    A job keeps the secret that came with it as it was sealed, so keep a key while jobs accepted under it are kept.
    """
    at = Deployment.find(stack, profile, region)
    if keep is not None:
        confirm(f"Drop all but {keep} of the sealing keys of {at.name}? What they sealed is lost.", yes=yes)
    clients = ClientsTable(at.client("dynamodb"), at.outputs["ClientsTableName"])
    keys, count = rotate_key(at.client("secretsmanager"), at.outputs["WebhookKeySecretArn"], clients, keep=keep)
    said = f"A fresh key seals; {keys} open. The secrets of {count} clients were sealed anew."
    show({"keys": keys, "clients": count}, said, as_json=as_json)
