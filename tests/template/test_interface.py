"""What operators and tools see of the template: parameters, outputs, the environments of samconfig.toml."""

import json
import shlex
import tomllib
from typing import Any

import pytest
from cfnlint.api import lint  # type: ignore[import-untyped]
from cfnlint.template import Template as Linted  # type: ignore[import-untyped]

from tests.template.resolved import PATH, REGION, ROOT, Edit, Template, drop, put, shipped, source, transformed

OUTPUTS = {
    "ApiUrl", "JobsTableName", "ClientsTableName", "PayloadsBucketName", "InteractiveQueueUrl", "StandardQueueUrl",
    "BulkQueueUrl", "DeadLetterQueueUrl",
    "ProviderSecretArn", "AlarmTopicArn", "IngestFunctionName", "StatusFunctionName", "WorkerFunctionName",
    "RepairFunctionName", "NotifierFunctionName", "NotificationsQueueUrl", "NotificationsDeadLetterQueueUrl",
    "SocketUrl", "ConnectionsTableName", "WebsocketFunctionName",
    "WebhookKeySecretArn", "SlackFunctionName", "AlertsFunctionName",
}  # fmt: skip
"""What scripts and documents read; a name once given stays."""
ENVIRONMENTS = {"default": "backburner", "prod": "backburner-prod", "local": "backburner-local"}
"""Environments of samconfig.toml and the stacks that they are for."""

# ── Rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def faults(template: Template) -> list[str]:
    """What cfn-lint finds: wrong properties, dangling references, parameters and mappings without a use."""
    return [str(match) for match in lint(json.dumps(template), regions=[REGION])]


def cycles(template: Template) -> list[str]:
    """Resources that wait for each other, which CloudFormation refuses. SAM adds some, so its output is looked at."""
    linted = Linted(str(PATH), template, [REGION])
    return [f"{needing} needs {needed}" for needing, needed, *_ in linted.graph.get_cycles(linted)]


def outputs(template: Template) -> list[str]:
    """Every promised output is there, whatever the parameters."""
    return [f"no output {name}" for name in sorted(OUTPUTS - template.get("Outputs", {}).keys())]


def groups(template: Template) -> list[str]:
    """The console shows every parameter in a group, once."""
    shown = [
        name
        for group in template["Metadata"]["AWS::CloudFormation::Interface"]["ParameterGroups"]
        for name in group["Parameters"]
    ]
    wanted = template["Parameters"].keys()
    return [f"{name}: shown {shown.count(name)} times" for name in wanted if shown.count(name) != 1]


def defaults(template: Template) -> list[str]:
    """Every parameter has a default that it accepts: `sam deploy` asks for nothing."""
    parameters = template["Parameters"].items()
    missing = [f"{name}: no default" for name, body in parameters if "Default" not in body]
    given = {name: str(body["Default"]) for name, body in parameters if "Default" in body}
    return missing + _refused(given, template)


def environments(config: dict[str, Any], template: Template) -> list[str]:
    """Each environment of samconfig.toml deploys as it stands: its own stack, what SAM needs, values that exist."""
    problems = []
    for name, stack in ENVIRONMENTS.items():
        commands = config.get(name, {})
        settings = {
            key: value
            for command in ("global", "deploy")
            for key, value in commands.get(command, {}).get("parameters", {}).items()
        }
        wanted = {"stack_name": stack, "capabilities": "CAPABILITY_IAM", "resolve_s3": True}
        problems += [f"{name}: {key} is not {value!r}" for key, value in wanted.items() if settings.get(key) != value]
        words = settings.get("parameter_overrides", [])
        pairs = [word.partition("=") for word in (shlex.split(words) if isinstance(words, str) else words)]
        problems += [f"{name}: {problem}" for problem in _refused({key: value for key, _, value in pairs}, template)]
    return problems


def _refused(values: dict[str, str], template: Template) -> list[str]:
    """Which values the parameters do not accept."""
    problems = []
    for name, value in values.items():
        body = template["Parameters"].get(name)
        if body is None:
            problems.append(f"there is no parameter {name}")
            continue
        allowed = [str(each) for each in body.get("AllowedValues", [value])]
        number = float(value) if body["Type"] == "Number" else 0.0
        low, high = body.get("MinValue", number), body.get("MaxValue", number)
        if value not in allowed or not low <= number <= high or len(value) < body.get("MinLength", 0):
            problems.append(f"{name} does not accept {value!r}")
    return problems


def samconfig() -> dict[str, Any]:
    """The shipped samconfig.toml."""
    return tomllib.loads((ROOT / "samconfig.toml").read_text())


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cfn_lint_finds_nothing_in_the_template_and_in_what_sam_makes_of_it() -> None:
    """Both are clean. cfn-lint looks for unused parameters in plain CloudFormation only."""
    assert [str(match) for match in lint(PATH.read_text(), regions=[REGION])] == []
    assert faults(transformed()) == []


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (put("Parameters.Forgotten", {"Type": "String", "Default": ""}), "Forgotten"),
        (put("Mappings.Forgotten", {"a": {"b": 1}}), "Forgotten"),
        (put("Conditions.Forgotten", {"Fn::Equals": [{"Ref": "AlarmEmail"}, "x"]}), "Forgotten"),
        (put("Resources.JobsTable.Properties.Forgotten", 1), "Forgotten"),
        (put("Outputs.JobsTableName.Value", {"Ref": "Forgotten"}), "Forgotten"),
    ],
    ids=["parameter", "mapping", "condition", "property", "reference"],
)
def test_what_has_no_use_or_no_meaning_is_found(edit: Edit, named: str) -> None:
    """A parameter, mapping or condition that nothing uses, and a name that nothing has, are named."""
    assert any(named in fault for fault in faults(transformed(edit)))


def test_no_resources_wait_for_each_other() -> None:
    """The transformed template has no circular reference."""
    assert cycles(transformed()) == []


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (put("Resources.JobsTable.DependsOn", "WorkerFunction"), "JobsTable needs WorkerFunction"),
        (
            put("Resources.WorkerLogs.Properties.LogGroupName", {"Fn::Sub": "/aws/lambda/${WorkerFunction}"}),
            "WorkerLogs needs WorkerFunction",
        ),
        (
            put("Globals.Function.Environment.Variables.API_URL", {"Fn::Sub": "https://${Api}.example.org"}),
            "IngestFunction needs Api",
        ),
        (
            put(
                "Resources.PayloadsBucket.Properties.Tags",
                [{"Key": "k", "Value": {"Fn::GetAtt": ["IngestRole", "Arn"]}}],
            ),
            "PayloadsBucket needs IngestRole",
        ),
    ],
    ids=["depends-on", "log-group-named-after-its-function", "the-api-address-for-its-functions", "get-att"],
)
def test_a_circular_reference_is_found_and_named(edit: Edit, named: str) -> None:
    """A cycle by DependsOn, Ref, GetAtt or Sub is found, also one through what SAM generates."""
    assert named in cycles(transformed(edit))


@pytest.mark.parametrize("email", ["", "ops@example.org"])
def test_every_promised_output_is_there(email: str) -> None:
    """Outputs do not depend on parameters."""
    assert outputs(shipped(AlarmEmail=email)) == []
    assert outputs(shipped(drop("Outputs.ApiUrl"), AlarmEmail=email)) == ["no output ApiUrl"]
    assert outputs(shipped(put("Outputs.ApiUrl.Condition", "HasAlarmEmail"))) == ["no output ApiUrl"]


def test_every_parameter_is_shown_and_has_a_default_that_it_accepts() -> None:
    """`sam deploy` needs no answer, and the console shows all there is to choose."""
    assert groups(source()) == []
    assert defaults(source()) == []
    assert groups(source(put("Parameters.New", {"Type": "String", "Default": ""}))) != []
    assert defaults(source(drop("Parameters.LogLevel.Default"))) != []
    assert defaults(source(put("Parameters.MaxAttempts.Default", 11))) != []


def test_every_environment_of_samconfig_deploys_as_it_stands() -> None:
    """default, prod and local have their own stacks, what SAM needs, and values that the parameters accept."""
    assert environments(samconfig(), source()) == []


@pytest.mark.parametrize(
    "edit",
    [
        drop("prod"),
        drop("default.deploy.parameters.capabilities"),
        drop("local.deploy.parameters.resolve_s3"),
        put("local.global.parameters.stack_name", "backburner"),
        put("prod.deploy.parameters.parameter_overrides", ["LogRetentionDays=31"]),
        put("prod.deploy.parameters.parameter_overrides", ["StandardConcurrency=1"]),
        put("prod.deploy.parameters.parameter_overrides", "StandardConcurrency=20 LogLevel=LOUD"),
        put("prod.deploy.parameters.parameter_overrides", ["Concurrency=20"]),
    ],
    ids=["none", "capabilities", "bucket", "stack", "value", "number", "one-string", "name"],
)
def test_an_environment_that_would_not_deploy_is_found(edit: Edit) -> None:
    """A missing setting, a wrong name and a refused value are found before a deployment finds them."""
    config = samconfig()
    edit(config)
    assert environments(config, source()) != []
