"""The core of a deployed stack with its operator's rights: set up as its functions are, over the operator's session."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from backburner import bootstrap
from backburner.lifecycle import Lifecycle
from backburner.redrive import Redrive
from backburner.submission import Submission
from cli.deployment import Deployment
from cli.screen import Refused, first_fault


class _Silence:
    """A journal that nobody reads: the tool says itself what it has done."""

    def note(self, event: str, **fields: Any) -> None:
        """Say nothing."""

    def about(self, **fields: Any) -> AbstractContextManager[None]:  # noqa: ARG002
        """Of nothing."""
        return nullcontext()


@dataclass(frozen=True)
class Desk:
    """What an operator works with."""

    submission: Submission
    redrive: Redrive

    @property
    def lifecycle(self) -> Lifecycle:
        """The verbs over rows."""
        return self.submission.lifecycle


def desk_of(at: Deployment) -> Desk:
    """The core, with the settings that the deployed functions have. Raises Refused if these cannot be read."""
    name, _ = at.outputs["StatusFunctionName"], at.catalogue  # the latter says what is wrong in the parameter's name
    deployed = at.client("lambda").get_function_configuration(FunctionName=name)
    try:
        return Desk(*bootstrap.operator(deployed.get("Environment", {}).get("Variables", {}), at.client, _Silence()))
    except ValidationError as error:
        fault = first_fault(error)
        raise Refused(f"The settings of {name} are not as expected: {fault}. Deploy again, this version.") from error
