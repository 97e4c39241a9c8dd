"""A stack of its own with a fake provider that the real SDKs talk to, for tests and for breaking things.

It lies in a state folder of its own and on free ports, so that it disturbs no running `make up`, and is always taken
down again.
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


def end_to_end(pytest_arguments: Sequence[str]) -> int:
    """Exit status of tests/e2e."""
    return run("e2e", ["-m", "pytest", "tests/e2e", "-m", "e2e", *pytest_arguments])


def chaos(arguments: Sequence[str]) -> int:
    """Exit status of bench/chaos.py: 1 if a job was lost or is stuck."""
    # Eight calls at once, in as many processes as can be killed one by one.
    os.environ.setdefault("BACKBURNER_PARAMETERS", "StandardConcurrency=8")
    return run("chaos", ["-m", "bench.chaos", *arguments])


def telling(arguments: Sequence[str]) -> int:
    """Exit status of bench/telling.py: 1 if some job's end was never told."""
    return run("telling", ["-m", "bench.telling", *arguments])


def run(name: str, python_arguments: Sequence[str]) -> int:
    """Exit status of a Python program run beside a fresh stack, which it finds by BACKBURNER_STACK_FILE."""
    state = State(HOME / name)
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
        command = [sys.executable, *python_arguments]
        return subprocess.run(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    finally:
        console.print(f"Taking the {name} stack down; its logs stay in .local/{name}/logs", style="dim")
        stack.down(state)
        processes.stop(state, NAME)
