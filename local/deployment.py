"""Build and deploy the shipped template with the SAM CLI, as an engineer would, but only when something
changed.
"""

import hashlib
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

import boto3
from botocore.exceptions import ClientError

from local import template
from local.emulator import CLIENT_CONFIG, CREDENTIALS
from local.processes import Running
from local.screen import LocalError, step
from local.state import (
    LAYER_CACHE,
    REGION,
    ROOT,
    STACK_NAME,
    VENVS,
    State,
    architecture,
    build_architecture,
    read_json,
    write_json,
)

SOURCES = ("template.yaml", "samconfig.toml", "functions", "layers")
COMMAND_SECONDS_MAX = 600
# A stack in one of these states cannot be updated, only deleted.
DEAD_STATES = (
    "ROLLBACK_COMPLETE",
    "ROLLBACK_FAILED",
    "CREATE_FAILED",
    "DELETE_FAILED",
    "UPDATE_ROLLBACK_FAILED",
)


@dataclass(frozen=True)
class Deployed:
    """A finished deployment."""

    outputs: dict[str, str]
    physical_ids: dict[str, str]


def tool_environment(endpoint_url: str) -> dict[str, str]:
    """The caller's environment without its AWS account: a deployment from here can only reach the emulator."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SAM_CLI_"))}
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PYTHONPATH", "VIRTUAL_ENV"):
        env.pop(name, None)
    return {**env, **shell_variables(endpoint_url)}


def shell_variables(endpoint_url: str) -> dict[str, str]:
    """What `sam build` and `sam deploy` need to work against the emulator, by hand as well."""
    return {
        **CREDENTIALS,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint_url,
        "SAM_CLI_TELEMETRY": "0",
        "BACKBURNER_ARCHITECTURE": build_architecture(),
        "BACKBURNER_CACHE": str(LAYER_CACHE),
        "BACKBURNER_PYTHON": str(VENVS / "dev" / "bin" / "python"),
    }


def source_hash(parameters: Mapping[str, str], emulator: Running) -> str:
    """Changes with anything that a deployment depends on."""
    digest = hashlib.sha256(repr((sorted(parameters.items()), emulator.identity, build_architecture())).encode())
    for source in SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(ROOT)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def chosen_parameters(wanted: Mapping[str, str]) -> dict[str, str]:
    """A value for each of the template's parameters.

    All of them, because CloudFormation keeps the last deployment's value of one that is not given. Later ones win:
    the template's default, samconfig.toml's `local`, the host's architecture, what the caller wants, and
    BACKBURNER_PARAMETERS ("Name=Value Name=Value").
    """
    by_hand = dict(_name_and_value(word) for word in shlex.split(os.environ.get("BACKBURNER_PARAMETERS", "")))
    defaults = template.parameter_defaults()
    chosen = {**defaults, **_samconfig_parameters(), "Architecture": architecture(), **wanted, **by_hand}
    unknown = sorted(chosen.keys() - defaults.keys())
    if unknown:
        raise LocalError(f"template.yaml has no parameter named {', '.join(unknown)}.")
    return chosen


def _samconfig_parameters() -> dict[str, str]:
    """What samconfig.toml says for the environment `local`; the command line would replace it as a whole."""
    config = tomllib.loads((ROOT / "samconfig.toml").read_text())
    words = config.get("local", {}).get("deploy", {}).get("parameters", {}).get("parameter_overrides", [])
    return dict(_name_and_value(word) for word in (shlex.split(words) if isinstance(words, str) else words))


def _name_and_value(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def ensure(state: State, session: boto3.Session, emulator: Running, wanted: Mapping[str, str]) -> Deployed:
    """Build and deploy unless the running emulator holds just this already."""
    endpoint_url = f"http://127.0.0.1:{emulator.port}"
    parameters = chosen_parameters(wanted)
    sources = source_hash(parameters, emulator)
    if read_json(state.deployed_file).get("sources") != sources:
        state.deployed_file.unlink(missing_ok=True)
        env = tool_environment(endpoint_url)
        with step("Building functions and layers (sam build)"):
            _sam(state, "build", ["build", "--no-cached", "--build-dir", str(state.build)], env)
        _delete_dead_stack(session, endpoint_url)
        with step("Deploying template.yaml to the local AWS (sam deploy)"):
            # A file needs none of the command line's quoting; JSON is YAML.
            values = state.folder / "parameters.yaml"
            write_json(values, parameters)
            arguments = ["deploy", "--config-env", "local", "--config-file", str(ROOT / "samconfig.toml")]
            arguments += ["--template-file", str(state.build / "template.yaml"), "--stack-name", STACK_NAME]
            arguments += ["--region", REGION, "--resolve-s3", "--capabilities", "CAPABILITY_IAM"]
            arguments += ["--no-confirm-changeset", "--no-fail-on-empty-changeset", "--no-progressbar"]
            _sam(state, "deploy", [*arguments, "--parameter-overrides", f"file://{values}"], env)
        write_json(state.deployed_file, {"sources": sources})
    return Deployed(outputs=_outputs(session, endpoint_url), physical_ids=_physical_ids(session, endpoint_url))


def api_url(outputs: Mapping[str, str], endpoint_url: str, name: str = "ApiUrl") -> str:
    """Where the emulator serves the API whose address on AWS the template outputs."""
    address = outputs.get(name, "")
    local = local_address(address, endpoint_url)
    if local == address:
        raise LocalError(f"The stack's output {name} is no API address: {address!r}")
    return local


def local_address(address: str, endpoint_url: str) -> str:
    """The emulator's address (http or ws) for an API's on AWS (https or wss); any other text as it is."""
    match = re.fullmatch(r"(http|ws)s://([^./]+)\.execute-api\.[^/]+/([^/?]+)", address)
    if match is None:
        return address
    scheme, api_id, stage = match.groups()
    return f"{scheme}{endpoint_url.removeprefix('http')}/_aws/execute-api/{api_id}/{stage}"


def _sam(state: State, name: str, arguments: list[str], env: Mapping[str, str]) -> None:
    """Run the SAM CLI with its output in a log file."""
    state.logs.mkdir(parents=True, exist_ok=True)
    state.scratch.mkdir(parents=True, exist_ok=True)
    log = state.log(f"sam-{name}")
    command = [str(VENVS / "sam" / "bin" / "sam"), *arguments]
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command,
                env={**env, "TMPDIR": str(state.scratch)},  # it leaves its folders behind; `down` removes them
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise LocalError(f"sam {name} did not end within {COMMAND_SECONDS_MAX} s.", log) from error
    if done.returncode != 0:
        raise LocalError(f"sam {name} failed.", log)


def _delete_dead_stack(session: boto3.Session, endpoint_url: str) -> None:
    """A deployment that failed half-way must not stand in the way of the next one."""
    cloudformation = session.client("cloudformation", endpoint_url=endpoint_url, config=CLIENT_CONFIG)
    try:
        stack = cloudformation.describe_stacks(StackName=STACK_NAME)["Stacks"][0]
    except ClientError:
        return
    if stack["StackStatus"] in DEAD_STATES:
        cloudformation.delete_stack(StackName=STACK_NAME)
        cloudformation.get_waiter("stack_delete_complete").wait(
            StackName=STACK_NAME, WaiterConfig={"Delay": 1, "MaxAttempts": 60}
        )


def _outputs(session: boto3.Session, endpoint_url: str) -> dict[str, str]:
    cloudformation = session.client("cloudformation", endpoint_url=endpoint_url, config=CLIENT_CONFIG)
    stack = cloudformation.describe_stacks(StackName=STACK_NAME)["Stacks"][0]
    return {output["OutputKey"]: output["OutputValue"] for output in stack.get("Outputs", [])}


def _physical_ids(session: boto3.Session, endpoint_url: str) -> dict[str, str]:
    cloudformation = session.client("cloudformation", endpoint_url=endpoint_url, config=CLIENT_CONFIG)
    resources = cloudformation.describe_stack_resources(StackName=STACK_NAME)["StackResources"]
    return {resource["LogicalResourceId"]: resource.get("PhysicalResourceId", "") for resource in resources}
