"""What the template sets and what the code reads are the same variables, with values that the code accepts.

Which settings class belongs to a function is not listed here but observed: its builder in `bootstrap` asks for it.
"""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
from pydantic import ValidationError

from backburner import bootstrap
from backburner.settings import Settings
from tests.template.resolved import (
    Edit,
    Template,
    code_folder,
    drop,
    environment,
    functions,
    parameter_extremes,
    put,
    shipped,
    source,
)

NOT_OURS = ("POWERTOOLS_", "AWS_")
"""Variables that a library or the runtime reads."""

# ── Rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def variables(template: Template) -> list[str]:
    """Each variable that a function's settings know is set, and no other."""
    problems = []
    for name in functions(template):
        settings = settings_class(template, name)
        known = {field.upper() for field in settings.model_fields} if settings else set()
        given = {variable for variable in environment(template, name) if not variable.startswith(NOT_OURS)}
        problems += [f"{name}: {variable} is not set" for variable in sorted(known - given)]
        problems += [f"{name}: nothing reads {variable}" for variable in sorted(given - known)]
    return problems


def values(template: Template) -> list[str]:
    """A function's settings accept its variables' values: else the deployment is fine and every invocation fails."""
    problems = []
    for name in functions(template):
        settings = settings_class(template, name)
        try:
            if settings is not None:
                settings.from_environment(environment(template, name))
        except ValidationError as error:
            problems += [f"{name}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    return problems


class _AskedFor(Exception):
    def __init__(self, settings: type[Settings]) -> None:
        self.settings = settings


def settings_class(template: Template, function: str) -> type[Settings] | None:
    """The settings that a function's builder reads first; None if it reads none."""

    def ask(cls: type[Settings], _environment: Mapping[str, str]) -> Any:
        raise _AskedFor(cls)

    with patch.object(Settings, "from_environment", classmethod(ask)):
        try:
            getattr(bootstrap, code_folder(template, function).name)()
        except _AskedFor as asked:
            return asked.settings
    return None


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_template_sets_exactly_what_the_settings_read() -> None:
    """Template and settings name the same variables for every function."""
    assert variables(shipped()) == []


@pytest.mark.parametrize("parameters", list(parameter_extremes(source())), ids=str)
def test_every_accepted_parameter_value_is_accepted_by_the_code(parameters: dict[str, Any]) -> None:
    """At the edges of what the parameters allow, every function still starts."""
    assert values(shipped(**parameters)) == []


VARIABLE = "Resources.WorkerFunction.Properties.Environment.Variables.{}".format


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (put(VARIABLE("NEW_ONE"), "1"), "NEW_ONE"),
        (put("Globals.Function.Environment.Variables.FOR_ALL", "1"), "FOR_ALL"),
        (drop(VARIABLE("PROVIDER_SECRET_ARN")), "PROVIDER_SECRET_ARN"),
        (drop(VARIABLE("EXTRA_MODELS")), "EXTRA_MODELS"),
        (drop("Globals.Function.Environment.Variables.JOBS_TABLE"), "JOBS_TABLE"),
    ],
    ids=["added", "added-for-all", "removed", "optional-one-removed", "removed-for-all"],
)
def test_a_variable_added_or_removed_is_found(edit: Edit, named: str) -> None:
    """A variable that no settings know, or one missing, is named."""
    assert any(named in problem for problem in variables(shipped(edit)))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (put("Parameters.MaxAttempts.Default", 11), "max_attempts"),
        (put("Mappings.Timeouts.Seconds.Call", 900), "call_timeout_seconds"),
        (put(VARIABLE("DEFAULT_MODEL"), ""), "default_model"),
        (put(VARIABLE("DEFAULT_MAX_TOKENS"), "many"), "default_max_tokens"),
    ],
    ids=["parameter", "mapping", "empty", "no-number"],
)
def test_a_value_that_the_code_refuses_is_found(edit: Edit, named: str) -> None:
    """A value beyond what the settings accept is named, wherever it comes from."""
    assert any(named in problem for problem in values(shipped(edit)))
