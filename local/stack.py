"""The local stack as a whole: bring it up, take it down. Both may be repeated, also on a half-made stack."""

import json
import os
import shlex
import shutil
import time
from dataclasses import dataclass
from typing import Any

import boto3
import httpx2

from cli.clients import create_client
from local import deployment, dropped, emulator, model, processes, template
from local.deployment import Deployed
from local.processes import Running
from local.screen import LocalError, note, step
from local.state import HOME, REGION, STACK_NAME, State, read_json, write_json, write_private

CLIENT_ID = "local"
# A provider that asks for no key gets this one: the SDKs refuse to start without.
NO_KEY = "local"


@dataclass(frozen=True)
class Providers:
    """Who answers the prompts: the addresses given in the environment, the local model for those not given.

    And who asks: a Slack app, or what stands for Slack.
    """

    openai_base_url: str | None
    anthropic_base_url: str | None
    openai_api_key: str
    anthropic_api_key: str
    slack_api_base_url: str = ""
    slack_signing_secret: str = ""
    slack_bot_token: str = ""
    slack_alerts_channel: str = ""
    slack_streaming: str = ""

    @property
    def needs_local_model(self) -> bool:
        """Whether one of the two is left to the local model."""
        return not (self.openai_base_url and self.anthropic_base_url)

    @property
    def secret(self) -> dict[str, str]:
        """The content of the deployment's secret."""
        return {
            "openai_api_key": self.openai_api_key,
            "anthropic_api_key": self.anthropic_api_key,
            "slack_signing_secret": self.slack_signing_secret,
            "slack_bot_token": self.slack_bot_token,
        }


def providers_from_environment() -> Providers:
    """Addresses and keys as given in the environment.

    A key goes only to an address that was named with it: the local model needs none, and a paid call is never
    made because a key happens to lie around.
    """
    addresses, keys = {}, {}
    for name, real in (("OPENAI", "https://api.openai.com/v1"), ("ANTHROPIC", "https://api.anthropic.com")):
        address = addresses[name] = os.environ.get(f"{name}_BASE_URL") or None
        key = os.environ.get(f"{name}_API_KEY")
        keys[name] = key if key and address else NO_KEY
        if key and not address:
            note(f"{name}_API_KEY is not used: the local model answers.")
            note(f"For the real one: {name}_BASE_URL={real} make up")
    slack = {f"slack_{name}": os.environ.get(f"SLACK_{name.upper()}", "")
             for name in ("api_base_url", "signing_secret", "bot_token", "alerts_channel", "streaming")}  # fmt: skip
    return Providers(addresses["OPENAI"], addresses["ANTHROPIC"], keys["OPENAI"], keys["ANTHROPIC"], **slack)


def up(state: State) -> dict[str, Any]:
    """Bring everything up and return what stack.json holds."""
    with state.alone():
        providers = providers_from_environment()
        with step("Starting the local AWS"):
            aws = emulator.ensure(state)
        local_model_port = _ensure_model(state, providers)
        session = emulator.session()
        parameters = _parameters(providers, local_model_port)
        deployed = deployment.ensure(state, session, aws, parameters)
        endpoint_url = emulator.endpoint_url(aws)
        with step("Putting provider keys and the first client in place"):
            dropped.reapply(session, endpoint_url, deployed.physical_ids)
            _put_provider_keys(session, endpoint_url, deployed, providers)
            api_key = _ensure_client(state, session, aws, deployed)
        api_url = deployment.api_url(deployed.outputs, endpoint_url)
        with step("Asking the API for a sign of life"):
            _check_api(state, api_url, api_key)
        stack = {
            "api_url": api_url,
            "socket_url": deployment.api_url(deployed.outputs, endpoint_url, "SocketUrl"),
            "api_key": api_key,
            "endpoint_url": endpoint_url,
            "region": REGION,
            "stack_name": STACK_NAME,
            "emulator": aws.identity,
            "parameters": parameters,
            "outputs": deployed.outputs,
        }
        write_json(state.stack_file, stack)
        _write_shell_file(state, stack)
        return stack


def down(state: State) -> list[str]:
    """End what `up` started, and forget what died with it. Returns the names of what was ended."""
    with state.alone():
        ended = [name for name in (emulator.NAME, model.NAME) if processes.stop(state, name)]
        for file in (state.stack_file, state.deployed_file, state.shell_file):
            file.unlink(missing_ok=True)
        shutil.rmtree(state.scratch, ignore_errors=True)
        return ended


def _ensure_model(state: State, providers: Providers) -> int | None:
    """The local model's port, if it has anything to do."""
    if not providers.needs_local_model:
        processes.stop(state, model.NAME)
        return None
    with step("Starting the local model"):
        return model.ensure(state).port


def _parameters(providers: Providers, model_port: int | None) -> dict[str, str]:
    """The template's parameters that depend on who answers."""
    local = f"http://127.0.0.1:{model_port}"
    by_openai, by_anthropic = providers.openai_base_url, providers.anthropic_base_url
    return {
        "OpenAIBaseUrl": by_openai or f"{local}/v1",
        "AnthropicBaseUrl": by_anthropic or local,
        "DefaultModel": template.parameter_defaults()["DefaultModel"] if by_openai else model.MODEL,
        "SlackApiBaseUrl": providers.slack_api_base_url,
        "SlackAlertsChannel": providers.slack_alerts_channel,
        "SlackStreaming": providers.slack_streaming or "false",
        "ExtraModels": json.dumps(model.catalogue(openai=not by_openai, anthropic=not by_anthropic)),
    }


def _put_provider_keys(session: boto3.Session, endpoint_url: str, deployed: Deployed, providers: Providers) -> None:
    """Write the secret, as an operator does once after the first deployment; only if it changes."""
    secrets = session.client("secretsmanager", endpoint_url=endpoint_url, config=emulator.CLIENT_CONFIG)
    arn = deployed.outputs["ProviderSecretArn"]
    try:
        current = json.loads(secrets.get_secret_value(SecretId=arn)["SecretString"])
    except (secrets.exceptions.ResourceNotFoundException, KeyError, ValueError):
        current = {}
    wanted = {**current, **providers.secret} if isinstance(current, dict) else providers.secret
    if wanted != current:
        secrets.put_secret_value(SecretId=arn, SecretString=json.dumps(wanted))


def _ensure_client(state: State, session: boto3.Session, aws: Running, deployed: Deployed) -> str:
    """The first client's key: the same one as long as the table lives that holds its hash."""
    last = read_json(state.stack_file)
    table_name = deployed.outputs["ClientsTableName"]
    if last.get("emulator") == aws.identity and last.get("outputs", {}).get("ClientsTableName") == table_name:
        return str(last["api_key"])
    endpoint_url = emulator.endpoint_url(aws)
    dynamodb = session.resource("dynamodb", endpoint_url=endpoint_url, config=emulator.CLIENT_CONFIG)
    return create_client(dynamodb.Table(table_name), CLIENT_ID, "local client", now_ms=int(time.time() * 1000))


def _check_api(state: State, api_url: str, api_key: str) -> None:
    """An unknown job must be answered 404: gateway, function, layers, policy and the client's key all work.

    It also starts the status function's first process, which takes a second or two to unpack its layers.
    """
    headers = {"Authorization": f"Bearer {api_key}"}
    try:
        answer = httpx2.get(f"{api_url}/jobs/no-such-job", headers=headers, timeout=60, trust_env=False)
    except httpx2.HTTPError as error:
        raise LocalError(f"The API does not answer: {error!r}", state.log(emulator.NAME)) from error
    if answer.status_code != 404:
        reason = f"The API answers {answer.status_code} where 404 is due: {answer.text[:300]}"
        raise LocalError(reason, state.log(emulator.NAME))


def _write_shell_file(state: State, stack: dict[str, Any]) -> None:
    """For work by hand: `. .local/env`, then sam, backburner, curl or any AWS tool."""
    variables = {
        **deployment.shell_variables(stack["endpoint_url"]),
        "BACKBURNER_API_URL": stack["api_url"],
        "BACKBURNER_SOCKET_URL": stack["socket_url"],
        "BACKBURNER_API_KEY": stack["api_key"],
        "BACKBURNER_STACK_NAME": stack["stack_name"],
        "BACKBURNER_STACK_FILE": str(state.stack_file),
    }
    lines = ["# Made by `make up`: points a shell at the local stack.", "unset AWS_PROFILE AWS_SESSION_TOKEN"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [f'export PATH={shlex.quote(str(HOME / "bin"))}:"$PATH"']
    write_private(state.shell_file, "\n".join(lines) + "\n")


def running_stack(state: State) -> dict[str, Any]:
    """stack.json of a stack that runs; an error that says what to do otherwise."""
    stack = read_json(state.stack_file)
    aws = processes.find(state, emulator.NAME)
    if not stack or aws is None or aws.identity != stack.get("emulator"):
        raise LocalError("The local stack is not running; start it with `make up`.")
    return stack
