"""The storage and queues of template.yaml on moto, and the environment that the template gives each function.

Nothing is repeated here: moto's CloudFormation makes the resources, and stack outputs resolve the variables.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import boto3
from samtranslator.yaml_helper import yaml_parse

ROOT = Path(__file__).resolve().parents[2]
STACK = "backburner-test"
STATEFUL = {"AWS::DynamoDB::Table", "AWS::SQS::Queue", "AWS::S3::Bucket"}
APIS = ("AWS::Serverless::Api", "AWS::Serverless::WebSocketApi")
"""Not made here; what names them gets a name of that shape."""
SECRET = "AWS::SecretsManager::Secret"
FUNCTION = "AWS::Serverless::Function"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_SESSION_TOKEN": "testing",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_REGION": "eu-central-1",
}
"""None of the developer's own may be used, whatever a test forgets to mock."""


@cache
def template() -> dict[str, Any]:
    """template.yaml with the short forms of intrinsics spelled out."""
    content: dict[str, Any] = yaml_parse((ROOT / "template.yaml").read_text())
    return content


def resources(*kinds: str) -> dict[str, dict[str, Any]]:
    """The resources of some types, by logical id."""
    return {name: body for name, body in template()["Resources"].items() if body["Type"] in kinds}


@dataclass(frozen=True)
class Deployed:
    """`names` gives physical names (of queues: URLs, of the secret: the ARN) by logical id."""

    names: Mapping[str, str]
    environments: Mapping[str, Mapping[str, str]]


def _with_refs(value: Any, known: Mapping[str, str]) -> Any:
    """The value with references to `known` logical ids (also to an attribute of theirs) replaced."""
    if isinstance(value, dict) and isinstance(text := value.get("Fn::Sub"), str):
        for name, stand_in in known.items():
            text = text.replace(f"${{{name}}}", stand_in)
        return {"Fn::Sub": text}
    if isinstance(value, dict):
        name = value.get("Ref") or next(iter(value.get("Fn::GetAtt", ())), "")
        if name in known:
            return known[name]
        return {name: _with_refs(item, known) for name, item in value.items()}
    return [_with_refs(item, known) for item in value] if isinstance(value, list) else value


def _secrets() -> dict[str, str]:
    """Make the secrets, which moto's CloudFormation cannot; their ARNs by logical id."""
    client: Any = boto3.client("secretsmanager")
    arns = {}
    for name, body in resources(SECRET).items():
        text = body["Properties"].get("SecretString")
        if text is None:
            text = client.get_random_password(**body["Properties"]["GenerateSecretString"])["RandomPassword"]
        arns[name] = client.create_secret(Name=f"{STACK}-{name}", SecretString=text)["ARN"]
    return arns


def _switch_on_ttl(names: Mapping[str, str]) -> None:
    """What moto's CloudFormation leaves out of a table."""
    for name, body in resources("AWS::DynamoDB::Table").items():
        if "TimeToLiveSpecification" in body["Properties"]:
            boto3.client("dynamodb").update_time_to_live(
                TableName=names[name], TimeToLiveSpecification=body["Properties"]["TimeToLiveSpecification"]
            )


def deploy(**parameters: str) -> Deployed:
    """Make what the template declares, inside an active `mock_aws`."""
    secrets = _secrets()
    known = secrets | {name: name.lower() for name in resources(*APIS)}
    shared = template()["Globals"]["Function"]["Environment"]["Variables"]
    outputs: dict[str, Any] = {}
    variables: list[tuple[str, str]] = []
    for function, body in resources(FUNCTION).items():
        for variable, value in {**shared, **body["Properties"]["Environment"]["Variables"]}.items():
            outputs[f"Variable{len(variables)}"] = {"Value": _with_refs(value, known)}
            variables.append((function, variable))
    stateful = resources(*STATEFUL)
    outputs |= {f"Name{name}": {"Value": {"Ref": name}} for name in stateful}
    elsewhere = {name: name for name in template()["Resources"] if name not in stateful} | known
    outputs |= {name: {"Value": _with_refs(body["Value"], elsewhere)} for name, body in template()["Outputs"].items()}
    reduced = {
        **{part: template()[part] for part in ("AWSTemplateFormatVersion", "Parameters", "Mappings")},
        "Resources": stateful,
        "Outputs": outputs,
    }
    cloudformation = boto3.client("cloudformation")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # moto warns of what it leaves out
        cloudformation.create_stack(
            StackName=STACK,
            TemplateBody=json.dumps(reduced),
            Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
        )
    [stack] = cloudformation.describe_stacks(StackName=STACK)["Stacks"]
    found = {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}
    names = {name: found[f"Name{name}"] for name in stateful} | secrets
    _switch_on_ttl(names)
    environments: dict[str, dict[str, str]] = {}
    for number, (function, variable) in enumerate(variables):
        environments.setdefault(function, {})[variable] = found[f"Variable{number}"]
    return Deployed(names, environments)
