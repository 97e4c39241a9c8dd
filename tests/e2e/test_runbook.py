"""The runbook's commands, run as they stand on the deployed stack; and every alarm, told in the operators' channel."""

from __future__ import annotations

import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Fake, Stack, Workspace, until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs" / "runbook.md"
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>.+) -->\n)?```sh\n(?P<commands>.*?)```", re.DOTALL)
NOT_RUN_MAX = 5
SECONDS_MAX = 60
HERE = 'aws() { command aws --endpoint-url "$AWS_ENDPOINT_URL" "$@"; }'
"""The CLI takes SQS's address from nowhere else."""
OPS = "C0000OPS1"
STACK_NAME = "backburner-local"


@dataclass(frozen=True)
class Block:
    """The commands of a code block, the heading that they stand under, and why they cannot be run here, if so."""

    heading: str
    commands: str
    why_not: str | None


def blocks() -> list[Block]:
    """All code blocks that are commands, in their order."""
    found = []
    for section in re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        found += [Block(heading, block["commands"], block["why"]) for block in BLOCK.finditer(section)]
    return found


def named(block: Block) -> str:
    """For pytest."""
    return f"{block.heading}: {block.commands.strip().splitlines()[0][:40]}"


PREAMBLE, *COMMANDS = blocks()


@pytest.fixture(scope="module")
def shell(stack: Stack, fake: Fake) -> Iterator[dict[str, str]]:
    """What the commands find: the tools on the path, the stack, and the job, client and model that they are about."""
    mark = f"mark-{uuid.uuid4().hex}"
    fake.script(mark, {"text": "an answer"})
    job_id = stack.submit(prompt=mark)["job_id"]
    stack.ended(job_id)
    found = {
        "PATH": f"{ROOT / '.local' / 'bin'}:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/tmp"),
        "BACKBURNER_STACK_FILE": os.environ["BACKBURNER_STACK_FILE"],
        "BACKBURNER_STACK_NAME": STACK_NAME,
        "AWS_ENDPOINT_URL": stack.endpoint_url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": stack.region,
        "AWS_PAGER": "",
        "JOB": job_id,
        "CLIENT": "runbook",
        "MODEL": "gpt-5.4",
        "NEW_KEY": "fake-openai-key",
        "PATIENCE": "5s",
        "RESTORED": stack.outputs["JobsTableName"],
    }
    looked_up = run('printf %s "$resources"', found)
    assert looked_up.returncode == 0, looked_up.stderr
    yield found | {"resources": looked_up.stdout}  # once for all commands
    for lane in ("bulk",):
        _resume(stack, lane)


def _resume(stack: Stack, lane: str) -> None:
    functions = stack.aws("lambda")
    mappings = functions.list_event_source_mappings(FunctionName=stack.outputs["WorkerFunctionName"])
    for mapping in mappings["EventSourceMappings"]:
        queue = stack.outputs[f"{lane.capitalize()}QueueUrl"].rpartition("/")[2]
        if mapping["EventSourceArn"].endswith(f":{queue}") and mapping["State"] != "Enabled":
            functions.update_event_source_mapping(UUID=mapping["UUID"], Enabled=True)


def run(commands: str, shell: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run commands after those that all begin with."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{HERE}\n{PREAMBLE.commands}\n{commands}"],
        env=shell,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_few_commands_are_left_out_and_each_says_why() -> None:
    """A command that nobody has run is a guess."""
    left_out = [block for block in COMMANDS if block.why_not]
    assert PREAMBLE.why_not is None
    assert len(left_out) <= NOT_RUN_MAX
    assert len(COMMANDS) - len(left_out) >= 20


@pytest.fixture(scope="module")
def known_client(stack: Stack, shell: dict[str, str]) -> None:
    """The client that commands are about."""
    done = run('backburner clients create "$CLIENT"', shell)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("known_client")
@pytest.mark.parametrize("block", [block for block in COMMANDS if not block.why_not], ids=named)
def test_a_runbooks_commands_do_what_they_say(block: Block, shell: dict[str, str]) -> None:
    """They end well, and what should be shown is shown."""
    done = run(block.commands, shell)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    if block.heading == "Queries":
        told = [
            message for message in ("job_accepted", "job_claimed", "call_ended", "job_ended") if message in done.stdout
        ]
        assert told == ["job_accepted", "job_claimed", "call_ended", "job_ended"], done.stdout
    assert done.stdout.strip() or "purge-queue" in block.commands, "nothing is shown"


# ── Alarms ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_alarm_is_told_in_the_operators_channel(
    stack: Stack, slack: Workspace, request: pytest.FixtureRequest
) -> None:
    """Set by hand, as CloudWatch would: each leads to one message at least, of its own."""
    ops, cloudwatch = replace(slack, channel=OPS), stack.aws("cloudwatch")
    described: dict[str, Any] = cloudwatch.describe_alarms(AlarmTypes=["MetricAlarm", "CompositeAlarm"], MaxRecords=100)
    meanings = {
        alarm["AlarmName"]: alarm["AlarmDescription"].partition(" Runbook: ")[0]
        # Those made of others first: later, the others would have raised them already.
        for alarm in (*described["CompositeAlarms"], *described["MetricAlarms"])
        if alarm["AlarmName"].startswith(STACK_NAME)
    }
    assert len(described["CompositeAlarms"]) == 2
    assert len(meanings) > 30

    ops.control("PUT", "config", json={"messages_per_second": 100.0})  # else it takes a second each
    request.addfinalizer(lambda: ops.control("PUT", "config", json={"messages_per_second": 1.0}))

    def told(*texts: str) -> bool:
        return any(all(text in message["markdown"] for text in texts) for message in ops.messages())

    for name, meaning in meanings.items():  # one after the other: all at once, each would start a process of its own
        cloudwatch.set_alarm_state(AlarmName=name, StateValue="ALARM", StateReason=f"tried out: {name}.")
        until(partial(told, meaning, f"tried out: {name}."), 30, f"not told: {name}".format)
