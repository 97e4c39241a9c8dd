"""Gradual deployments: a new version gets a part of the traffic first, and alarms take it back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cfnlint.decode import decode  # type: ignore[import-untyped]

from local.gradual import GRADUAL, ROLLBACK_ALARMS, SHIFT, gradual
from tests.template import resolved
from tests.template.resolved import PATH, Template, code_folder, functions, of_type, referred, transformed
from tests.template.test_interface import faults


def made(folder: Path, release: str) -> Template:
    """What SAM makes of the changed template."""
    path = folder / f"{release}.yaml"
    path.write_text(gradual(PATH.read_text(), release))
    found, errors = decode(str(path))
    assert found is not None
    assert not errors
    text = json.dumps(found)
    with pytest.MonkeyPatch.context() as patch:
        reading: Callable[[], str] = lambda: text
        patch.setattr(resolved, "_text", reading)
        return transformed()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """The template of a release."""
    return made(tmp_path_factory.mktemp("gradual"), "a1b2c3d4e5f6")


def test_cfn_lint_finds_nothing(template: Template) -> None:
    """Neither a reference to nothing nor a circle of alarms and functions."""
    assert faults(template) == []


def test_every_function_with_events_has_an_alias_that_shifts_gradually(template: Template) -> None:
    """And is rolled back by the alarms."""
    for name in functions(template):
        if code_folder(template, name).name not in GRADUAL:
            continue
        alias: Any = template["Resources"][f"{name}Aliaslive"]
        update = alias["UpdatePolicy"]["CodeDeployLambdaAliasUpdate"]
        group = of_type(template, "AWS::CodeDeploy::DeploymentGroup")[update["DeploymentGroupName"]["Ref"]]
        assert group["AutoRollbackConfiguration"]["Enabled"] is True
        assert "DEPLOYMENT_STOP_ON_ALARM" in group["AutoRollbackConfiguration"]["Events"]
        assert [referred(alarm["Name"]) for alarm in group["AlarmConfiguration"]["Alarms"]] == list(ROLLBACK_ALARMS)
        assert SHIFT in json.dumps(group["DeploymentConfigName"])


def test_queues_and_paths_lead_to_the_alias(template: Template) -> None:
    """Not to the function itself, which is the newest version from the first second."""
    aliases = of_type(template, "AWS::Lambda::Alias")
    sources = of_type(template, "AWS::Lambda::EventSourceMapping").values()
    assert all(referred(source["FunctionName"]) in aliases for source in sources)
    body = json.dumps(next(iter(of_type(template, "AWS::ApiGateway::RestApi").values()))["Body"]["paths"])
    for name in ("IngestFunction", "StatusFunction", "SlackFunction"):
        assert f"${{{name}.Arn}}" not in body
        assert f"${{{name}Aliaslive}}" in body


def test_each_release_is_a_new_version_of_every_function(template: Template, tmp_path: Path) -> None:
    """Also where only a layer has changed, or a parameter: SAM itself sees neither, and the alias would stay behind."""
    versions = set(of_type(template, "AWS::Lambda::Version"))
    assert len(versions) == len(GRADUAL)
    assert versions.isdisjoint(of_type(made(tmp_path, "f6e5d4c3b2a1"), "AWS::Lambda::Version"))


def test_the_template_as_shipped_has_none_of_it() -> None:
    """A fresh account deploys in one step, and so does the local stack."""
    kinds = {body["Type"] for body in transformed()["Resources"].values()}
    assert not {kind for kind in kinds if "CodeDeploy" in kind or kind == "AWS::Lambda::Alias"}


def test_a_function_that_is_not_found_is_an_error() -> None:
    """Rather than a template without what was asked for."""
    with pytest.raises(ValueError, match="functions found"):
        gradual(PATH.read_text().replace("functions/worker", "functions/workers"), "a1")
