"""What each function asks of AWS in these tests, held against what its policy grants.

moto asks no policy, so a call that the template forgot to grant would pass here and fail once deployed. The other way
round, that each grant is needed, is shown on the deployed stack: tests/e2e/test_permissions.py takes each away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import botocore.client

from tests.template.resolved import Template, functions, mentioned, of_type, referred, shipped

_ACTIONS = {
    "apigatewaymanagementapi:PostToConnection": "execute-api:ManageConnections",
    "s3:HeadObject": "s3:GetObject",
}
"""Operations that IAM calls by another name."""
_OF_TRANSACTIONS = {
    "Put": "PutItem",
    "Update": "UpdateItem",
    "Delete": "DeleteItem",
    "ConditionCheck": "ConditionCheckItem",
}


class Call(NamedTuple):
    """An action, and what it is about: a resource as the template calls it, with index, prefix or path."""

    action: str
    resource: str


@cache
def granted_to(function: str) -> frozenset[Call]:
    """What the shipped template's policies let a function do, by its logical id."""
    return grants(shipped(), function)


def grants(template: Template, function: str) -> frozenset[Call]:
    """What a template's policies let a function do."""
    role = of_type(template, "AWS::IAM::Role")[referred(functions(template)[function]["Role"], "Arn")]
    found = set()
    for policy in role["Policies"]:
        for statement in policy["PolicyDocument"]["Statement"]:
            for action in _many(statement["Action"]):
                found |= {Call(action, _kind(resource)) for resource in _many(statement["Resource"])}
    return frozenset(found)


def _many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _kind(resource: Any) -> str:
    """`${JobsTable.Arn}/index/due` as `JobsTable/index/due`, `${SocketApi}/api/…` as `SocketApi`."""
    (name,) = mentioned(resource) - {"AWS::Partition", "AWS::Region", "AWS::AccountId"}
    text = str(resource.get("Fn::Sub", "")) if isinstance(resource, dict) else ""
    return name + ("" if name == "SocketApi" else re.sub(r".*\$\{[^}]+\}", "", text))


def calls_of(service: str, operation: str, arguments: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[Call]:
    """The actions that an operation is to IAM. names: physical names, URLs and ARNs by logical id."""
    logical = {physical: name for name, physical in names.items()}
    if operation == "TransactWriteItems":
        for item in arguments["TransactItems"]:
            for kind, inner in item.items():
                yield Call(f"dynamodb:{_OF_TRANSACTIONS[kind]}", logical[inner["TableName"]])
        return
    action = _ACTIONS.get(f"{service}:{operation}", f"{service}:{operation}")
    match service:
        case "dynamodb" if operation == "BatchGetItem":
            yield from (Call(action, logical[table]) for table in arguments["RequestItems"])
        case "dynamodb":
            index = f"/index/{arguments['IndexName']}" if "IndexName" in arguments else ""
            yield Call(action, logical[arguments["TableName"]] + index)
        case "sqs":
            yield Call(action, logical[arguments["QueueUrl"]])
        case "s3":
            yield Call(action, f"{logical[arguments['Bucket']]}/{arguments['Key'].partition('/')[0]}/*")
        case "secretsmanager":
            yield Call(action, logical[arguments["SecretId"]])
        case _:
            yield Call(action, "SocketApi")


@contextmanager
def recorded() -> Iterator[list[tuple[str, str, Mapping[str, Any]]]]:
    """What any client calls within the block: service, operation and arguments."""
    made: list[tuple[str, str, Mapping[str, Any]]] = []
    base: Any = botocore.client.BaseClient
    real = base._make_api_call

    def recording(self: Any, operation: str, arguments: Mapping[str, Any]) -> Any:
        made.append((self.meta.service_model.service_name, operation, arguments))
        return real(self, operation, arguments)

    base._make_api_call = recording
    try:
        yield made
    finally:
        base._make_api_call = real


def guarded[H: Callable[..., Any]](handler: H, function: str, names: Mapping[str, str]) -> Callable[..., Any]:
    """The handler, which fails if it called what its policy does not grant."""

    def handle(*arguments: Any) -> Any:
        with recorded() as made:
            answer = handler(*arguments)
        asked = {call for one in made for call in calls_of(*one, names)}
        assert asked <= granted_to(function), f"{function} is not granted {sorted(asked - granted_to(function))}"
        return answer

    return handle
