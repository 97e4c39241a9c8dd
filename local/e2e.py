"""Run tests/e2e against a stack of their own, with a fake provider that the real SDKs talk to. Always
cleans up.

The stack lies in a state folder of its own and on free ports, so that it disturbs no running `make up`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from local import processes, stack
from local.screen import console, step
from local.state import HOME, ROOT, State

NAME = "provider"
START_SECONDS_MAX = 30


def run(pytest_arguments: Sequence[str]) -> int:
    """Exit status of pytest."""
    state = State(HOME / "e2e")
    stack.down(state)  # what an interrupted run may have left
    processes.stop(state, NAME)
    try:
        with step("Starting the fake provider"):
            port = processes.free_port(())
            provider = processes.start(
                state,
                NAME,
                [sys.executable, "-m", "tests.fakes.provider", "--port", str(port)],
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"},
                port=port,
                is_ready=lambda: processes.answers(port),
                seconds_max=START_SECONDS_MAX,
            )
        address = f"http://127.0.0.1:{provider.port}"
        os.environ.update(
            OPENAI_BASE_URL=f"{address}/v1",
            OPENAI_API_KEY="fake-openai-key",
            ANTHROPIC_BASE_URL=address,
            ANTHROPIC_API_KEY="fake-anthropic-key",
        )
        stack.up(state)
        env = {
            **os.environ,
            "BACKBURNER_STACK_FILE": str(state.stack_file),
            "BACKBURNER_FAKE_PROVIDER": address,
        }
        command = [sys.executable, "-m", "pytest", "tests/e2e", "-m", "e2e", *pytest_arguments]
        return subprocess.run(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    finally:
        console.print("Taking the e2e stack down; its logs stay in .local/e2e/logs", style="dim")
        stack.down(state)
        processes.stop(state, NAME)
