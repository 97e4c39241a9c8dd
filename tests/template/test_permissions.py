"""Permissions: each function may do what it does, to what it does it to, and nothing else."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.template.resolved import Edit, Template, drop, functions, mentioned, of_type, put, referred, shipped

ROLE, TABLE, LOG_GROUP = "AWS::IAM::Role", "AWS::DynamoDB::Table", "AWS::Logs::LogGroup"

# ── Rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def actions(template: Template) -> list[str]:
    """Every statement allows single actions, named in full."""
    return [
        f"{role}: {statement.get('Action', 'no Action')}"
        for role, statement in _statements(template)
        if statement["Effect"] != "Allow"
        or "NotAction" in statement
        or not _many(statement.get("Action"))
        or any("*" in action for action in _many(statement.get("Action")))
    ]


OF_NO_RESOURCE = {"cloudwatch:DescribeAlarms"}
"""Actions that IAM knows for all resources only."""


def targets(template: Template) -> list[str]:
    """Every statement is about resources of this template, never about all there are, if its actions know any."""
    own = template["Resources"].keys()
    return [
        f"{role}: {statement.get('Resource', 'no Resource')}"
        for role, statement in _statements(template)
        if statement.get("Resource") != "*" or not set(_many(statement.get("Action"))) <= OF_NO_RESOURCE
        if "NotResource" in statement
        or not _many(statement.get("Resource"))
        or not all(mentioned(resource) & own for resource in _many(statement.get("Resource")))
    ]


NAMES = ("/requests/*", "/results/*", "/@connections/*")
"""What has names of its own, which no template knows: large payloads by their kind, and WebSocket connections."""


def wildcards(template: Template) -> list[str]:
    """No resource is a pattern, but for what has names that nobody knows before."""
    texts = [
        (role, resource["Fn::Sub"] if isinstance(resource, dict) and "Fn::Sub" in resource else resource)
        for role, statement in _statements(template)
        for resource in _many(statement.get("Resource"))
    ]
    return [
        f"{role}: {text}"
        for role, text in texts
        if isinstance(text, str) and text != "*" and ("*" in text or "?" in text)  # of "*", `targets` says
        if not text.endswith(NAMES) or text.count("*") > 1 or "?" in text
    ]


CODE_DEPLOYS = "DeploymentRole"


def roles(template: Template) -> list[str]:
    """Every function has a role of its own, with no managed policy, that only Lambda may take. CodeDeploy has one."""
    used = {name: referred(body.get("Role"), "Arn") for name, body in functions(template).items()}
    shared = {role for role, count in Counter(used.values()).items() if count > 1}
    known = of_type(template, ROLE)
    problems = [f"{name}: no role of its own" for name, role in used.items() if role not in known or role in shared]
    for name, body in known.items():
        principals = [statement.get("Principal") for statement in body["AssumeRolePolicyDocument"]["Statement"]]
        problems += [f"{name}: managed policies"] if body.get("ManagedPolicyArns") else []
        taker = "codedeploy" if name == CODE_DEPLOYS else "lambda"
        problems += [f"{name}: taken by {principals}"] if principals != [{"Service": f"{taker}.amazonaws.com"}] else []
        problems += [f"{name}: no function has it"] if name not in {*used.values(), CODE_DEPLOYS} else []
    return problems + [f"{name}: a policy beside the roles" for name in of_type(template, "AWS::IAM::Policy")]


def indexes(template: Template) -> list[str]:
    """A permission on an index names one that the table has."""
    problems = []
    for role, statement in _statements(template):
        for resource in _many(statement["Resource"]):
            text = str(resource.get("Fn::Sub", "")) if isinstance(resource, dict) else ""
            if "/index/" not in text:
                continue
            body = of_type(template, TABLE)[next(iter(mentioned(resource)))]
            index = text.rpartition("/index/")[2]
            if index not in {found["IndexName"] for found in body.get("GlobalSecondaryIndexes", [])}:
                problems.append(f"{role}: there is no index {index!r}")
    return problems


def callers(template: Template) -> list[str]:
    """Whoever may call a function may do so for one source only, not on behalf of any account."""
    return [
        f"{name}: no SourceArn"
        for name, body in of_type(template, "AWS::Lambda::Permission").items()
        if not mentioned(body.get("SourceArn"))
    ]


def logs(template: Template) -> list[str]:
    """Every function writes to a log group of its own, which it may write to and which forgets."""
    groups = of_type(template, LOG_GROUP)
    used = {name: referred(body.get("LoggingConfig", {}).get("LogGroup")) for name, body in functions(template).items()}
    shared = {group for group, count in Counter(used.values()).items() if count > 1}
    problems = [
        f"{name}: no log group of its own" for name, group in used.items() if group not in groups or group in shared
    ]
    problems += [f"{name}: no RetentionInDays" for name, body in groups.items() if not body.get("RetentionInDays")]
    for name, group in used.items():
        role = referred(functions(template)[name].get("Role"), "Arn")
        allowed = {
            action
            for owner, statement in _statements(template)
            if owner == role and group in mentioned(statement["Resource"])
            for action in _many(statement["Action"])
        }
        problems += [f"{name}: may not {a}" for a in ("logs:CreateLogStream", "logs:PutLogEvents") if a not in allowed]
    return problems


RULES = [actions, targets, wildcards, roles, indexes, callers, logs]


def _statements(template: Template) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, body in of_type(template, ROLE).items():
        for policy in body.get("Policies", []):
            for statement in _many(policy["PolicyDocument"]["Statement"]):
                yield name, statement


def _many(value: Any) -> list[Any]:
    """IAM takes one thing for a list of one."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", RULES)
def test_the_shipped_permissions_are_the_least(rule: Any) -> None:
    """The template as shipped keeps every rule."""
    assert rule(shipped()) == []


def test_tracing_grants_every_function_xrays_two_calls_and_nothing_else() -> None:
    """They know no resources: the one wildcard there is. Without tracing, there is none."""
    traced = shipped(Tracing="Active")
    [policy] = of_type(traced, "AWS::IAM::Policy").values()
    [statement] = policy["PolicyDocument"]["Statement"]
    assert statement["Action"] == ["xray:PutTraceSegments", "xray:PutTelemetryRecords"]
    assert {referred(role) for role in policy["Roles"]} == of_type(traced, ROLE).keys()
    assert {body["TracingConfig"]["Mode"] for body in functions(traced).values()} == {"Active"}
    assert of_type(shipped(), "AWS::IAM::Policy") == {}


STATEMENT = "Resources.WorkerRole.Properties.Policies.0.PolicyDocument.Statement.{}".format
BY_CLIENT = "Resources.StatusRole.Properties.Policies.0.PolicyDocument.Statement.1.Resource"
INDEX_OF_NAMES = {"Fn::Sub": "${JobsTable.Arn}/index/by_name"}
ANY_TABLE = {"Fn::Sub": "arn:${AWS::Partition}:dynamodb:${AWS::Region}:${AWS::AccountId}:table/*"}


@pytest.mark.parametrize(
    ("rule", "edit"),
    [
        (actions, put(STATEMENT("0.Action"), "dynamodb:*")),
        (actions, put(STATEMENT("0.Action.1"), "dynamodb:Update*")),
        (actions, put(STATEMENT("0.NotAction"), "dynamodb:Scan")),
        (targets, put(STATEMENT("0.Resource"), "*")),
        (targets, put(STATEMENT("0.Resource"), ["*", {"Fn::GetAtt": ["JobsTable", "Arn"]}])),
        (targets, put(STATEMENT("0.Resource"), ANY_TABLE)),
        (targets, drop(STATEMENT("0.Resource"))),
        (wildcards, put(STATEMENT("0.Resource"), {"Fn::Sub": "${PayloadsBucket.Arn}/*"})),
        (wildcards, put(STATEMENT("0.Resource"), {"Fn::Sub": "${JobsTable.Arn}*"})),
        (wildcards, put(STATEMENT("0.Resource"), {"Fn::Sub": "arn:aws:dynamodb:*:*:table/${JobsTable}*"})),
        (wildcards, put(STATEMENT("0.Resource"), [{"Fn::Sub": "${PayloadsBucket.Arn}/*/requests/*"}])),
        (wildcards, put(STATEMENT("0.Resource"), {"Fn::Sub": "${JobsTable.Arn}/index/b?_client"})),
        (
            roles,
            put("Resources.WorkerRole.Properties.ManagedPolicyArns", ["arn:aws:iam::aws:policy/AdministratorAccess"]),
        ),
        (roles, put("Resources.RepairFunction.Properties.Role", {"Fn::GetAtt": ["WorkerRole", "Arn"]})),
        (roles, put("Resources.RepairFunction.Properties.Role", "arn:aws:iam::123456789012:role/other")),
        (roles, drop("Resources.RepairFunction.Properties.Role")),
        (roles, put("Resources.WorkerRole.Properties.AssumeRolePolicyDocument.Statement.0.Principal", "*")),
        (indexes, put(BY_CLIENT, INDEX_OF_NAMES)),
        (callers, put("Resources.Open", {"Type": "AWS::Lambda::Permission", "Properties": {}})),
        (logs, drop("Resources.WorkerFunction.Properties.LoggingConfig")),
        (logs, put("Resources.WorkerFunction.Properties.LoggingConfig.LogGroup", {"Ref": "RepairLogs"})),
        (logs, drop("Resources.WorkerLogs.Properties.RetentionInDays")),
        (logs, drop(STATEMENT(-1))),
    ],
)
def test_a_permission_too_many_or_a_missing_one_is_found(rule: Any, edit: Edit) -> None:
    """Each way of widening a permission, sharing a role or losing logs is a problem to its rule."""
    assert rule(shipped(edit)) != []
