"""A stack of its own with a fake provider and Slack that the real SDKs talk to, for tests and for breaking things.

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

PROVIDER, SLACK = "provider", "slack"
START_SECONDS_MAX = 30


def end_to_end(pytest_arguments: Sequence[str]) -> int:
    """Exit status of tests/e2e."""
    return run("e2e", ["-m", "pytest", "tests/e2e", "-m", "e2e", *pytest_arguments])


BENCHES = {
    # Eight calls at once, in as many processes as can be killed one by one.
    "chaos": (["-m", "bench.chaos"], "StandardConcurrency=8"),
    "growth": (["-m", "bench.growth"], ""),
    # As many workers as any of its scenarios needs.
    "peers": (["-m", "bench.peers"], "StandardConcurrency=5"),
    "slack": (["-m", "bench.slack"], ""),
    "telling": (["-m", "bench.telling"], ""),
    "worker": (["-m", "bench.worker"], ""),
}
"""Programs that measure a stack of their own, with the template's parameters unless the environment names some."""


def bench(name: str, arguments: Sequence[str]) -> int:
    """Exit status of one of BENCHES."""
    program, parameters = BENCHES[name]
    if parameters:
        os.environ.setdefault("BACKBURNER_PARAMETERS", parameters)
    return run(name, [*program, *arguments])


def run(name: str, python_arguments: Sequence[str]) -> int:
    """Exit status of a Python program run beside a fresh stack, which it finds by BACKBURNER_STACK_FILE."""
    state = State(HOME / name)
    _end(state)  # what an interrupted run may have left
    try:
        with step("Starting the fake provider and the fake Slack"):
            address = _start(state, PROVIDER)
            slack = _start(state, SLACK)
        os.environ.update(
            OPENAI_BASE_URL=f"{address}/v1",
            OPENAI_API_KEY="fake-openai-key",
            ANTHROPIC_BASE_URL=address,
            ANTHROPIC_API_KEY="fake-anthropic-key",
            SLACK_API_BASE_URL=f"{slack}/api/",
            SLACK_SIGNING_SECRET="fake-slack-signing-secret",  # noqa: S106
            SLACK_BOT_TOKEN="xoxb-fake-slack-token",  # noqa: S106
            SLACK_ALERTS_CHANNEL="C0000OPS1",
        )
        stack.up(state)
        env = {
            **os.environ,
            "BACKBURNER_STACK_FILE": str(state.stack_file),
            "BACKBURNER_FAKE_PROVIDER": address,
            "BACKBURNER_FAKE_SLACK": slack,
        }
        command = [sys.executable, *python_arguments]
        return subprocess.run(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    finally:
        console.print(f"Taking the {name} stack down; its logs stay in .local/{name}/logs", style="dim")
        _end(state)


def _start(state: State, fake: str) -> str:
    """Start a fake of tests/fakes in a process of its own; its address."""
    port = processes.free_port(())
    running = processes.start(
        state,
        fake,
        [sys.executable, "-m", f"tests.fakes.{fake}", "--port", str(port)],
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"},
        port=port,
        is_ready=lambda: processes.answers(port),
        seconds_max=START_SECONDS_MAX,
    )
    return f"http://127.0.0.1:{running.port}"


def _end(state: State) -> None:
    stack.down(state)
    for fake in (PROVIDER, SLACK):
        processes.stop(state, fake)
