"""A function loads its own part of the house only: SDKs are slow to import, and most jobs need one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.fakes.provider import FakeProvider
from tests.integration.deployed import ROOT

PREPARE = """
import json, sys
from moto import mock_aws
from tests.integration.deployed import deploy
from tests.integration.functions import Context, Stack, event

def loaded():
    return sorted({name.partition(".")[0] for name in sys.modules} & {"openai", "anthropic", "boto3", "pydantic"}
                  | {name for name in sys.modules if name.startswith("backburner.")})

mock = mock_aws()
mock.start()
stack = Stack(deploy(OpenAIBaseUrl=sys.argv[1] + "/v1", AnthropicBaseUrl=sys.argv[1]))
stack.provider_keys()
key = stack.client()
"""
"""In a process of its own, what the test itself imports tells nothing. moto and our helpers import no SDK."""


def loaded_after(script: str, provider: FakeProvider) -> set[str]:
    """Top-level packages and modules of ours that are there when the script is done."""
    process = subprocess.run(
        [sys.executable, "-c", f"{PREPARE}{script}\nprint('MODULES', json.dumps(loaded()))", provider.base_url],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'layers' / 'shared'}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "eu-central-1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    [line] = [line for line in process.stdout.splitlines() if line.startswith("MODULES ")]
    return set(json.loads(line.removeprefix("MODULES ")))


@pytest.mark.parametrize(("model", "sdk", "other"), [
    ("gpt-5.4-mini", "openai", "anthropic"), ("claude-haiku-4-5", "anthropic", "openai"),
])  # fmt: skip
def test_a_worker_imports_the_sdk_that_its_job_needs_and_no_other(
    provider: FakeProvider, model: str, sdk: str, other: str
) -> None:
    """And completes the job with it."""
    loaded = loaded_after(
        f"""
job_id = stack.post(key, {{"prompt": "Name a river.", "model": "{model}"}}).json["job_id"]
assert not {{"openai", "anthropic"}} & set(loaded())
stack.work()
assert stack.get(key, job_id).json["status"] == "completed"
""",
        provider,
    )
    assert sdk in loaded
    assert other not in loaded
    assert f"backburner.providers.{sdk}" in loaded
    assert f"backburner.providers.{other}" not in loaded


def test_a_worker_imports_no_sdk_before_a_job_needs_one(provider: FakeProvider) -> None:
    """Its cold start, and hints that come to nothing, are quick."""
    loaded = loaded_after("stack.run('{\"job_id\":\"job_nobody\"}', 'poison')", provider)
    assert not {"openai", "anthropic"} & loaded


@pytest.mark.parametrize(
    ("script", "own"),
    [
        ("stack.post(key, {'prompt': 'a' * 200_000})", "backburner.http"),
        ("stack.listing(key); stack.get(key, 'job_nobody')", "backburner.http"),
        ("stack.repair()", "backburner.repair"),
    ],
    ids=["ingest", "status", "repair"],
)
def test_no_other_function_imports_an_sdk_or_the_workers_part(provider: FakeProvider, script: str, own: str) -> None:
    """Accepting takes milliseconds, also cold."""
    loaded = loaded_after(script, provider)
    assert own in loaded
    assert not {"openai", "anthropic", "backburner.execution"} & loaded
    assert not {name for name in loaded if name.startswith(("backburner.providers.", "backburner.channels"))}
    if own != "backburner.repair":
        assert "backburner.repair" not in loaded
