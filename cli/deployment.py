"""Which deployed stack a command is about, and how to reach it.

Without `--stack`, `--profile` and `--region` that is the local stack if one is running, else the stack `backburner` on
AWS.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import boto3
import typer
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError
from pydantic import ValidationError

from backburner.pricing import PriceList
from cli.screen import Refused, first_fault

StackName = Annotated[
    str | None,
    typer.Option(
        "--stack",
        help="The CloudFormation stack; left out: the running local one, else `backburner`.",
        envvar="BACKBURNER_STACK_NAME",
        show_default=False,
    ),
]
Profile = Annotated[str | None, typer.Option("--profile", help="The AWS profile.", show_default=False)]
Region = Annotated[
    str | None,
    typer.Option(
        "--region", help="The AWS region; left out: the profile's, or AWS_DEFAULT_REGION.", show_default=False
    ),
]

DEFAULT = "backburner"
NO_CREDENTIALS = "There are no AWS credentials; give --profile, or log in."
NO_REGION = "No AWS region is set; give --region, or set AWS_DEFAULT_REGION."


class _Outputs(dict[str, str]):
    """A stack's outputs; asked for one that is not there, it says what is probably wrong with the stack."""

    def __init__(self, stack: str, status: str, outputs: Mapping[str, str]) -> None:
        super().__init__(outputs)
        self._stack, self._status = stack, status

    def __missing__(self, name: str) -> str:
        if self._status.startswith(("ROLLBACK", "CREATE", "DELETE", "REVIEW")) and not self:
            do = "it was never deployed to the end; look at its events, then delete it or deploy again"
        else:
            do = "it is no Backburner, or an older one; name another with --stack, or deploy again"
        raise Refused(f"The stack {self._stack!r} ({self._status}) has no output {name}: {do}.")


class Deployment:
    """A deployed stack, as its operator reaches it. `local` is the local stack's stack.json."""

    def __init__(self, name: str, session: boto3.Session, local: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.session = session
        self.local = local
        self._clients: dict[str, Any] = {}
        self._queue_arns: dict[str, str] = {}

    @classmethod
    def find(cls, stack: str | None, profile: str | None, region: str | None = None) -> Deployment:
        """The stack that the options name."""
        local = None if profile or region else _running_locally()
        if local is not None and stack in (None, local["stack_name"]):
            from local.emulator import session

            return cls(local["stack_name"], session(), local)
        return cls(stack or DEFAULT, boto3.Session(profile_name=profile, region_name=region))

    def client(self, service: str) -> Any:
        """A client of an AWS service, made once."""
        if service not in self._clients:
            endpoint_url = None if self.local is None else self.local["endpoint_url"]
            self._clients[service] = self.session.client(service, endpoint_url=endpoint_url)  # type: ignore[call-overload]
        return self._clients[service]

    @cached_property
    def _described(self) -> Mapping[str, Any]:
        try:
            (described,) = self.client("cloudformation").describe_stacks(StackName=self.name)["Stacks"]
        except NoCredentialsError as error:
            raise Refused(NO_CREDENTIALS) from error
        except NoRegionError as error:
            raise Refused(NO_REGION) from error
        except (BotoCoreError, ClientError) as error:
            where = self.session.region_name
            raise Refused(f"There is no stack {self.name!r} to be seen in {where}: {error}") from error
        return dict(described)

    @cached_property
    def outputs(self) -> Mapping[str, str]:
        """The stack's outputs. Raises Refused if there is no such stack; so does asking for an output that it lacks."""
        outputs = {entry["OutputKey"]: entry["OutputValue"] for entry in self._described.get("Outputs", [])}
        found = _Outputs(self.name, self._described.get("StackStatus", ""), outputs)
        if self.local is not None and found:
            found["ApiUrl"] = self.local["api_url"]  # its output names an address on AWS
        return found

    @cached_property
    def parameters(self) -> Mapping[str, str]:
        """What the stack was deployed with. Raises Refused if there is no such stack."""
        return {entry["ParameterKey"]: entry["ParameterValue"] for entry in self._described.get("Parameters", [])}

    @cached_property
    def catalogue(self) -> PriceList:
        """The models that it knows, with its own. Raises Refused if those cannot be read."""
        try:
            return PriceList.load(self.parameters.get("ExtraModels", ""))
        except ValidationError as error:
            fault = first_fault(error)
            raise Refused(
                f"The parameter ExtraModels of {self.name} is wrong: {fault}. Deploy with it mended."
            ) from error

    def table(self, output: str) -> Any:
        """The boto3 Table that an output names."""
        name = self.outputs[output]
        endpoint_url = None if self.local is None else self.local["endpoint_url"]
        return self.session.resource("dynamodb", endpoint_url=endpoint_url).Table(name)

    def queue_arn(self, output: str) -> str:
        """The ARN of the queue whose URL an output holds, asked for once."""
        if output not in self._queue_arns:
            url = self.outputs[output]
            reply = self.client("sqs").get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
            self._queue_arns[output] = reply["Attributes"]["QueueArn"]
        return self._queue_arns[output]


def _running_locally() -> Mapping[str, Any] | None:
    """stack.json of the local stack, if that runs."""
    from local.screen import LocalError
    from local.stack import running_stack
    from local.state import State, current_state

    named = os.environ.get("BACKBURNER_STACK_FILE")
    try:
        return running_stack(State(Path(named).parent) if named else current_state())
    except LocalError:
        return None
