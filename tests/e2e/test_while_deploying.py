"""A deployment while a job is in flight: it is neither lost nor paid for twice, and the next one is asked anew.

The last of all tests: the emulator's WebSocket API does not outlive an update of its stack.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from local import dropped, emulator
from local.deployment import api_url
from local.state import STACK_NAME
from tests.e2e.conftest import Fake, Stack, until

pytestmark = pytest.mark.e2e

MAX_TOKENS = {"DefaultMaxTokens": "777"}


def _deploy(stack: Stack, **changed: str) -> dict[str, str]:
    """Deploy the same template with other parameters; those that they replace."""
    cloudformation = stack.aws("cloudformation")
    name = STACK_NAME
    (deployed,) = cloudformation.describe_stacks(StackName=name)["Stacks"]
    before = {each["ParameterKey"]: each["ParameterValue"] for each in deployed["Parameters"]}
    cloudformation.update_stack(
        StackName=name,
        UsePreviousTemplate=True,
        Capabilities=["CAPABILITY_IAM", "CAPABILITY_AUTO_EXPAND"],
        Parameters=[
            {"ParameterKey": key, "ParameterValue": changed[key]}
            if key in changed
            else {"ParameterKey": key, "UsePreviousValue": True}
            for key in before
        ],
    )

    def status() -> str:
        return str(cloudformation.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"])

    until(lambda: not status().endswith("IN_PROGRESS"), 60, status)
    assert status() == "UPDATE_COMPLETE"
    physical_ids = {each["LogicalResourceId"]: each["PhysicalResourceId"] for each in _resources(stack)}
    dropped.reapply_any_methods(emulator.session(), stack.endpoint_url, physical_ids)
    dropped.reapply_concurrency(emulator.session(), stack.endpoint_url)
    return {key: before[key] for key in changed}


def test_a_job_in_flight_outlives_a_deployment(stack: Stack, fake: Fake, mark: str) -> None:
    """Lambda lets a running invocation end; the emulator terminates it, which its worker must survive as well.

    Either way the one call brings the answer, and what is asked afterwards is asked by the new configuration.
    """
    patient = stack.patient()
    fake.script(mark, {"text": "word " * 20, "chunk_delay_seconds": 3.0})  # 18 s; a deployment takes fewer
    job_id = patient.submit(prompt=mark)["job_id"]
    until(lambda: fake.calls(mark), 30, lambda: "the call did not begin")
    before = _deploy(stack, **MAX_TOKENS)
    try:
        job = _brought_to_its_end(patient, job_id)
        assert (job["status"], job["result"]["text"]) == ("completed", "word " * 20)
        assert [line["outcome"] for line in job["receipt"]][-1] == "completed"
        assert [call["billed"] for call in fake.calls(mark)] == [True]
        patient.ended(patient.submit(prompt=f"again {mark}")["job_id"])
        asked = [call["request"]["max_output_tokens"] for call in fake.calls(mark)]
        assert asked[1] == int(MAX_TOKENS["DefaultMaxTokens"]) != asked[0]
    finally:
        _deploy(stack, **before)


def test_a_job_in_flight_outlives_versions_switched_on_and_off(stack: Stack, fake: Fake, mark: str) -> None:
    """And a release after another: what led to the functions leads to their aliases, and back."""
    patient = stack.patient()
    steps = (
        ("on", {"DeploymentPreference": "AllAtOnce", "Release": "one"}),
        ("next", {"Release": "two"}),
        ("off", {"DeploymentPreference": "None"}),
    )
    for step, changed in steps:
        slow, quick = f"{mark} {step} slow", f"{mark} {step} quick"
        fake.script(slow, {"text": "word " * 20, "chunk_delay_seconds": 3.0})
        job_id = patient.submit(prompt=slow)["job_id"]
        until(partial(fake.calls, slow), 30, f"{step}: the call did not begin".__str__)
        _deploy(stack, **changed)
        patient = replace(patient, api_url=_api_url(stack))  # another one in the emulator; AWS keeps it
        job = _brought_to_its_end(patient, job_id)
        assert (job["status"], job["result"]["text"]) == ("completed", "word " * 20), step
        assert [call["billed"] for call in fake.calls(slow)] == [True], step
        assert patient.ended(patient.submit(prompt=quick)["job_id"])["status"] == "completed", step
        names = {each["LogicalResourceId"] for each in _resources(stack)}
        assert ("WorkerAlias" in names) is (step != "off")


def _brought_to_its_end(stack: Stack, job_id: str) -> dict[str, Any]:
    """The job once it has ended, in spite of an emulator that ends its worker when the function is changed."""
    until(lambda: stack.job(job_id)["status"] != "processing", 60, lambda: str(stack.job(job_id)))
    if stack.job(job_id)["status"] == "queued":
        stack.make_due(job_id)  # the hint may have gone to the worker that was about to end
        stack.repair()
    return stack.ended(job_id)


def _api_url(stack: Stack) -> str:
    [described] = stack.aws("cloudformation").describe_stacks(StackName=STACK_NAME)["Stacks"]
    return api_url({each["OutputKey"]: each["OutputValue"] for each in described["Outputs"]}, stack.endpoint_url)


def _resources(stack: Stack) -> list[Any]:
    return list(stack.aws("cloudformation").describe_stack_resources(StackName=STACK_NAME)["StackResources"])
