"""Gradual deployments: a new version gets a part of the traffic first, and alarms take it back.

What the template has is held against what SAM makes of its own AutoPublishAlias and DeploymentPreference.
"""

from typing import Any

import pytest

from tests.template import test_alarms, test_permissions, test_queues, test_settings, test_storage, test_timeouts
from tests.template.resolved import (
    Template,
    functions,
    led_to,
    mentioned,
    of_type,
    put,
    queue_sources,
    referred,
    refusals,
    shipped,
    source,
    transformed,
)
from tests.template.test_interface import cycles, faults

GRADUAL = ("Ingest", "Status", "Slack", "Worker", "Notifier", "Repair")
"""Functions of the endpoint and of jobs. A change of the others (WebSocket, alarms in Slack) is at once."""
SHIFT = "Canary10Percent10Minutes"
EVERYWHERE = [
    *test_permissions.RULES,
    *test_timeouts.RULES,
    *test_alarms.RULES,
    *(test_queues.partial_failures, test_queues.redrive, test_queues.encryption),
    *(test_storage.kept, test_storage.tables, test_storage.buckets, test_storage.keys, test_storage.names),
    *(test_settings.variables, test_settings.values),
]
KINDS = ("AWS::Lambda::Version", "AWS::Lambda::Alias", "AWS::CodeDeploy::DeploymentGroup")


@pytest.fixture(scope="module")
def template() -> Template:
    """The template with gradual deployments."""
    return shipped(DeploymentPreference=SHIFT, Release="v2")


@pytest.fixture(scope="module")
def sams() -> Template:
    """What SAM makes of its own properties for the same."""
    edits = [
        put(f"Resources.{name}Function.Properties.{key}", value)
        for name in GRADUAL
        for key, value in {
            "AutoPublishAlias": "live",
            "DeploymentPreference": {"Type": SHIFT, "Alarms": [{"Ref": "WorkerErrorsAlarm"}]},
        }.items()
    ]
    return transformed(*edits)


def alarms(group: Any) -> list[str]:
    """The names of a deployment group's alarms."""
    return [referred(alarm["Name"]) for alarm in group["AlarmConfiguration"]["Alarms"]]


def test_the_template_as_shipped_has_none_of_it() -> None:
    """A fresh account deploys in one step, and so does the local stack."""
    kinds = {body["Type"] for body in shipped()["Resources"].values()}
    assert kinds.isdisjoint({*KINDS, "AWS::CodeDeploy::Application"})
    assert "DeploymentRole" not in shipped()["Resources"]


def test_cfn_lint_finds_nothing() -> None:
    """Neither a reference to nothing nor a circle of alarms and functions."""
    assert faults(transformed()) == []
    assert cycles(transformed()) == []


@pytest.mark.parametrize("name", GRADUAL)
def test_each_function_has_what_sam_would_make(template: Template, sams: Template, name: str) -> None:
    """A version, the alias that leads to it, and a deployment group that shifts it, and takes it back."""
    ours, theirs = template["Resources"], sams["Resources"]
    alias, wanted = ours[f"{name}Alias"], theirs[f"{name}FunctionAliaslive"]
    assert alias["Properties"].keys() == wanted["Properties"].keys()
    assert alias["Properties"]["Name"] == "live"
    assert referred(alias["Properties"]["FunctionName"]) == f"{name}Function"
    version = referred(alias["Properties"]["FunctionVersion"], "Version")
    assert ours[version]["Properties"]["FunctionName"] == {"Ref": f"{name}Function"}
    assert ours[version]["DeletionPolicy"] == ours[version]["UpdateReplacePolicy"] == "Retain"
    update = alias["UpdatePolicy"]["CodeDeployLambdaAliasUpdate"]
    assert update.keys() == wanted["UpdatePolicy"]["CodeDeployLambdaAliasUpdate"].keys()
    assert ours[update["ApplicationName"]["Ref"]]["Properties"] == {"ComputePlatform": "Lambda"}
    group = dict(ours[update["DeploymentGroupName"]["Ref"]]["Properties"])
    other = dict(theirs[f"{name}FunctionDeploymentGroup"]["Properties"])
    assert group.pop("DeploymentConfigName") == {"Fn::Sub": f"CodeDeployDefault.Lambda{SHIFT}"}
    assert other.pop("DeploymentConfigName")["Fn::Sub"][1] == {"ConfigName": SHIFT}
    assert group.pop("AlarmConfiguration").keys() == other.pop("AlarmConfiguration").keys()
    assert ours[referred(group.pop("ServiceRoleArn"), "Arn")]["Type"] == "AWS::IAM::Role"
    assert theirs[referred(other.pop("ServiceRoleArn"), "Arn")]["Type"] == "AWS::IAM::Role"
    assert referred(group.pop("ApplicationName")) == "DeploymentApplication"
    assert referred(other.pop("ApplicationName")) == "ServerlessDeploymentApplication"
    assert group == other


def test_each_function_is_shifted_by_a_group_of_its_own(template: Template) -> None:
    """CodeDeploy has one deployment of a group at a time, and CloudFormation starts all at once."""
    policies = [
        body["UpdatePolicy"]["CodeDeployLambdaAliasUpdate"]
        for body in template["Resources"].values()
        if body["Type"] == "AWS::Lambda::Alias"
    ]
    groups = {referred(policy["DeploymentGroupName"]) for policy in policies}
    assert len(groups) == len(policies) == len(GRADUAL)


def test_every_function_that_jobs_go_through_is_gradual(template: Template) -> None:
    """Whatever a queue, a path of the REST API or a schedule leads to."""
    led = {source.function for source in queue_sources(template)} | {
        led_to(template, target["Arn"])
        for rule in of_type(template, "AWS::Events::Rule").values()
        for target in rule["Targets"]
    }
    [api] = of_type(template, "AWS::ApiGateway::RestApi").values()
    led |= {led_to(template, {"Ref": name}) for name in mentioned(api["Body"]["paths"])}
    assert led == {f"{name}Function" for name in GRADUAL}


def test_queues_paths_and_schedules_lead_to_the_alias(template: Template) -> None:
    """Not to the function itself, which is the newest version from the first second."""
    aliases = of_type(template, "AWS::Lambda::Alias")
    for mapping in of_type(template, "AWS::Lambda::EventSourceMapping").values():
        assert referred(mapping["FunctionName"]) in aliases
    [api] = of_type(template, "AWS::ApiGateway::RestApi").values()
    assert mentioned(api["Body"]["paths"]) <= aliases.keys()
    allowed = {
        referred(body["FunctionName"])
        for body in of_type(template, "AWS::Lambda::Permission").values()
        if "SocketApi" not in mentioned(body["SourceArn"])
    }
    assert allowed == {f"{name}Alias" for name in ("Ingest", "Status", "Slack", "Repair")}


def test_without_versions_all_leads_to_the_function() -> None:
    """In the template as shipped."""
    template = shipped()
    for mapping in of_type(template, "AWS::Lambda::EventSourceMapping").values():
        assert referred(mapping["FunctionName"], "Arn") in functions(template)


def test_a_stage_follows_when_versions_are_switched_on() -> None:
    """SAM makes a new deployment of the API where its text has changed; a parameter's value is not in it."""
    assert source()["Resources"]["Api"]["Properties"]["AlwaysDeploy"] is True


@pytest.mark.parametrize("rule", EVERYWHERE)
def test_the_rules_of_the_template_hold_with_versions(template: Template, rule: Any) -> None:
    """Permissions, timeouts, queues, storage, alarms and variables."""
    assert rule(template) == []


def test_snapshots_are_of_functions_that_people_wait_for() -> None:
    """And of none unless they are asked for."""
    chosen = shipped(DeploymentPreference="AllAtOnce", Release="v2", SnapStart="PublishedVersions")
    applied = {name: body["SnapStart"]["ApplyOn"] for name, body in functions(chosen).items() if "SnapStart" in body}
    assert applied == dict.fromkeys(("IngestFunction", "StatusFunction", "SlackFunction"), "PublishedVersions")
    assert all(body.get("SnapStart", {}).get("ApplyOn", "None") == "None" for body in functions(shipped()).values())


def test_all_at_once_needs_no_shift() -> None:
    """Versions and aliases, which CloudFormation moves by itself."""
    template = shipped(DeploymentPreference="AllAtOnce", Release="v2")
    kinds = {body["Type"] for body in template["Resources"].values()}
    assert {"AWS::Lambda::Version", "AWS::Lambda::Alias"} <= kinds
    assert not {kind for kind in kinds if "CodeDeploy" in kind}
    assert "DeploymentRole" not in template["Resources"]
    assert "UpdatePolicy" not in template["Resources"]["WorkerAlias"]


def test_a_release_changes_functions_and_versions(template: Template) -> None:
    """Lambda publishes nothing where a function is as it was; CloudFormation, where a version's text is."""
    other = shipped(DeploymentPreference=SHIFT, Release="v3")
    for name in GRADUAL:
        assert functions(template)[f"{name}Function"] != functions(other)[f"{name}Function"]
        assert (
            template["Resources"][f"{name}Version"]["Properties"] != other["Resources"][f"{name}Version"]["Properties"]
        )


def test_a_new_layer_is_a_new_version_whatever_the_release_is_called(template: Template) -> None:
    """The program is in layers, so that a name given twice keeps no change of it from its traffic.

    Of no other function: Lambda publishes nothing where a function is as it was, and CloudFormation would fail.
    """
    for version in of_type(template, "AWS::Lambda::Version").values():
        function = functions(template)[referred(version["FunctionName"])]
        assert mentioned(version["Description"]) == {referred(layer) for layer in function["Layers"]}


def test_alarms_of_faults_take_a_version_back_and_not_those_of_load(template: Template) -> None:
    """A burst of jobs is no fault of the version. Each function has its alarm among them, and the endpoint."""
    for group in of_type(template, "AWS::CodeDeploy::DeploymentGroup").values():
        assert set(alarms(group)) == {
            "EndpointErrorsAlarm",
            "EndpointErrorRateAlarm",
            "FaultsAlarm",
            *(f"{name}ErrorsAlarm" for name in GRADUAL),
        }


def test_every_preference_is_one_of_sams_or_none() -> None:
    """CodeDeploy knows them as CodeDeployDefault.Lambda…"""
    values = source()["Parameters"]["DeploymentPreference"]["AllowedValues"]
    assert values[:2] == ["None", "AllAtOnce"]
    for value in values[2:]:
        assert refusals(shipped(DeploymentPreference=value, Release="v2")) == []
        assert value.startswith(("Canary10Percent", "Linear10PercentEvery"))
