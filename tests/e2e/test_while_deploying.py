"""A deployment while a job is in flight: it is neither lost nor paid for twice, and the next one is asked anew.

The last of all tests: the emulator's WebSocket API does not outlive an update of its stack.
"""

from __future__ import annotations

import pytest

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
        until(lambda: patient.job(job_id)["status"] == "queued", 30, lambda: str(patient.job(job_id)))
        stack.make_due(job_id)  # the hint may have gone to the worker that was about to end
        stack.repair()
        job = patient.ended(job_id)
        assert (job["status"], job["result"]["text"]) == ("completed", "word " * 20)
        assert [line["outcome"] for line in job["receipt"]][-1] == "completed"
        assert [call["billed"] for call in fake.calls(mark)] == [True]
        patient.ended(patient.submit(prompt=f"again {mark}")["job_id"])
        asked = [call["request"]["max_output_tokens"] for call in fake.calls(mark)]
        assert asked[1] == int(MAX_TOKENS["DefaultMaxTokens"]) != asked[0]
    finally:
        _deploy(stack, **before)
