"""The runbook's commands, run as they stand on the deployed stack; and every alarm, told in the operators' channel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from local.deployment import api_url, shell_variables
from local.state import build_architecture
from tests.e2e.conftest import Fake, Stack, Workspace, until
from tests.fakes.receiver import Receiver, Step

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs" / "runbook.md"
BLOCK = re.compile(r"```sh\n(?P<commands>.*?)```", re.DOTALL)
SECONDS_MAX = 300
HERE = """aws() {
    local at=$AWS_ENDPOINT_URL
    [[ $1 != service-quotas ]] || at=$QUOTAS_URL
    command aws --endpoint-url "$at" "$@"
}"""
"""The CLI takes SQS's address from nowhere else; and the emulator has no quotas."""
ELSEWHERE = ("sam build", "sam delete", "--name live")
"""Commands that change the stack itself run on one of their own."""
BACK = 'git checkout "$LAST_GOOD" && sam build && sam deploy --config-env prod\n'
BACK_BY_RELEASE = 'Release="$LAST_GOOD'
"""How it takes back a bad deploy; and so with versions."""
SHIFT = "Canary10Percent10Minutes"
"""How the runbook deploys gradually. The emulator has no CodeDeploy, so versions are moved at once."""
GIT = ("git", "-c", "user.name=runbook", "-c", "user.email=runbook@example.com")
SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="
KEPT = ("JobsTable", "ClientsTable", "LimitsTable", "ConnectionsTable")
OPS = "C0000OPS1"
STACK_NAME = "backburner-local"
OWN = "backburner-prod"


@dataclass(frozen=True)
class Block:
    """The commands of a code block, and the heading that they stand under."""

    heading: str
    commands: str


def blocks() -> list[Block]:
    """All code blocks that are commands, in their order."""
    found = []
    for section in re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        found += [Block(heading, block["commands"]) for block in BLOCK.finditer(section)]
    return found


def _is_run_here(block: Block) -> bool:
    return not any(word in block.commands for word in ELSEWHERE)


def named(block: Block) -> str:
    """For pytest."""
    return f"{block.heading}: {block.commands.strip().splitlines()[0][:40]}"


PREAMBLE, *COMMANDS = blocks()


@pytest.fixture(scope="module")
def quotas() -> Iterator[tuple[str, list[Any]]]:
    """What stands for Service Quotas: its address, and what it was asked for."""
    asked: list[Any] = []

    class Quotas(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.headers["X-Amz-Target"], body))
            reply = json.dumps({"RequestedQuota": {**body, "Status": "PENDING"}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Quotas) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the project as its engineers have it, with what `make setup` made."""
    folder = tmp_path_factory.mktemp("checkout") / "backburner"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True, timeout=60)
    (folder / ".local").symlink_to(ROOT / ".local")
    return folder


@pytest.fixture(scope="module")
def shell(
    stack: Stack, fake: Fake, quotas: tuple[str, list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """What the commands find: the tools on the path, the stack, and the jobs, client and model that they are about."""
    mark, refused = (f"mark-{uuid.uuid4().hex}" for _ in range(2))
    fake.script(mark, {"text": "an answer"})
    fake.script(refused, {"status": 401})
    with Receiver() as receiver, Receiver(default=Step(410)) as gone:
        job_id, untold = (
            stack.submit(prompt=mark, webhook={"url": each.url, "secret": SECRET})["job_id"]
            for each in (receiver, gone)
        )
        dead, unwanted = (stack.submit(prompt=refused)["job_id"] for _ in range(2))
        for each in (job_id, untold, dead, unwanted):
            stack.ended(each)
        until(
            lambda: "given_up" in str(stack.job(untold)["deliveries"]), 30, lambda: f"not given up: {stack.job(untold)}"
        )
        secret = json.loads(_secret(stack, "ProviderSecretArn"))
        kept = f"kept-{uuid.uuid4().hex}"
        stack.aws("s3").create_bucket(Bucket=kept)
        stack.aws("s3").put_object(Bucket=kept, Key="results/kept", Body=b"an answer")
        found = {
            **shell_variables(stack.endpoint_url),
            "PATH": f"{ROOT / '.local' / 'bin'}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/tmp"),
            "TMPDIR": str(tmp_path_factory.mktemp("scratch")),
            "BACKBURNER_STACK_FILE": os.environ["BACKBURNER_STACK_FILE"],
            "BACKBURNER_STACK_NAME": STACK_NAME,
            "AWS_PAGER": "",
            "QUOTAS_URL": quotas[0],
            "EDITOR": f"sed -i s/{refused}/{mark}/",
            "JOB": job_id,
            "UNTOLD": untold,
            "DEAD": dead,
            "CLIENT": "runbook",
            "MODEL": "gpt-5.4",
            "NEW_KEY": secret["openai_api_key"],
            "NEW_TOKEN": secret["slack_bot_token"],
            "NEW_SIGNING_SECRET": secret["slack_signing_secret"],
            "KEPT_KEY": stack.outputs["WebhookKeySecretArn"],
            "KEPT_PAYLOADS": kept,
            "PATIENCE": "5s",
            "DAYS": "1",
            "INSTANT": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        looked_up = run('printf %s "$resources"', found)
        assert looked_up.returncode == 0, looked_up.stderr
        yield found | {"resources": looked_up.stdout}  # once for all commands
    for lane in ("bulk",):
        _resume(stack, lane)


def _secret(stack: Stack, output: str) -> str:
    value: str = stack.aws("secretsmanager").get_secret_value(SecretId=stack.outputs[output])["SecretString"]
    return value


def _resume(stack: Stack, lane: str) -> None:
    functions = stack.aws("lambda")
    mappings = functions.list_event_source_mappings(FunctionName=stack.outputs["WorkerFunctionName"])
    for mapping in mappings["EventSourceMappings"]:
        queue = stack.outputs[f"{lane.capitalize()}QueueUrl"].rpartition("/")[2]
        if mapping["EventSourceArn"].endswith(f":{queue}") and mapping["State"] != "Enabled":
            functions.update_event_source_mapping(UUID=mapping["UUID"], Enabled=True)


def run(commands: str, shell: dict[str, str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run commands after those that all begin with."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{HERE}\n{PREAMBLE.commands}\n{commands}"],
        env=shell,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def the_block(words: str) -> Block:
    """The one block that has these words."""
    [found] = [block for block in COMMANDS if words in block.commands]
    return found


def test_no_command_is_left_out() -> None:
    """A command that nobody has run is a guess. Those that are not run with the others have tests of their own."""
    assert len(COMMANDS) >= 20
    elsewhere = [block for block in COMMANDS if not _is_run_here(block)]
    assert elsewhere == [the_block(words) for words in (BACK, BACK_BY_RELEASE, SHIFT, "get-alias", "sam delete")]


@pytest.fixture(scope="module")
def known_client(stack: Stack, shell: dict[str, str]) -> None:
    """The client that commands are about."""
    done = run('backburner clients create "$CLIENT"', shell)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("known_client")
@pytest.mark.parametrize("block", [block for block in COMMANDS if _is_run_here(block)], ids=named)
def test_a_runbooks_commands_do_what_they_say(
    block: Block, shell: dict[str, str], clone: Path, quotas: tuple[str, list[Any]]
) -> None:
    """They end well, and what should be shown is shown."""
    done = run(block.commands, shell, clone)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    if block.heading == "Queries" and "$JOB" in block.commands:
        told = [
            message for message in ("job_accepted", "job_claimed", "call_ended", "job_ended") if message in done.stdout
        ]
        assert told == ["job_accepted", "job_claimed", "call_ended", "job_ended"], done.stdout
    if "request-service-quota-increase" in block.commands:
        wanted = {"ServiceCode": "lambda", "QuotaCode": "L-B99A9384", "DesiredValue": 200.0}
        assert quotas[1] == [("ServiceQuotasV20190624.RequestServiceQuotaIncrease", wanted)]
    assert done.stdout.strip() or "purge-queue" in block.commands, "nothing is shown"


@pytest.fixture(scope="module")
def own(stack: Stack, shell: dict[str, str], clone: Path) -> dict[str, str]:
    """The shell for a stack of its own, and the checkout's samconfig.toml as the emulator needs it."""
    config = clone / "samconfig.toml"
    # What the emulator cannot have, or has otherwise.
    here = f'"CompositeAlarms=false", "Architecture={build_architecture()}",'
    config.write_text(config.read_text().replace('"LogRetentionDays=90",', f'"LogRetentionDays=90", {here}', 1))
    _commit(clone, "Deploys here")
    looked_up = {name: value for name, value in shell.items() if name != "resources"}
    return looked_up | {"BACKBURNER_STACK_NAME": OWN}


def _commit(clone: Path, message: str) -> str:
    """Commit everything there is; the commit's short hash."""
    subprocess.run([*GIT, "commit", "--quiet", "--allow-empty", "-am", message], cwd=clone, check=True, timeout=60)
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=clone, check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


def _resources(stack: Stack) -> dict[str, str]:
    """The own stack's physical ids, by logical id."""
    described = stack.aws("cloudformation").describe_stack_resources(StackName=OWN)["StackResources"]
    return {each["LogicalResourceId"]: each["PhysicalResourceId"] for each in described}


def _well(commands: str, shell: dict[str, str], clone: Path) -> str:
    done = run(commands, shell, clone)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_bad_deploy_is_taken_back(stack: Stack, own: dict[str, str], clone: Path) -> None:
    """From a checkout whose last commit is the bad one."""
    good = _commit(clone, "A good one")
    (clone / "template.yaml").write_text("Resources: {}\n")
    _commit(clone, "A bad one")
    _well(the_block(BACK).commands, own | {"LAST_GOOD": good, "resources": "of no stack yet"}, clone)
    outputs = stack.aws("cloudformation").describe_stacks(StackName=OWN)["Stacks"][0]["Outputs"]
    assert any(each["OutputKey"] == "ApiUrl" for each in outputs)
    assert "WorkerAlias" not in _resources(stack)


def test_versions_are_switched_on_and_each_release_reaches_the_traffic(
    stack: Stack, own: dict[str, str], clone: Path
) -> None:
    """On the stack that had none: what led to the functions leads to their aliases, and those to the release."""
    functions, gateway, logs = (stack.aws(service) for service in ("lambda", "apigateway", "logs"))
    names: dict[str, str] = {}
    release = ""
    for version in ("1", "2", "3"):
        if version == "3":
            _well(the_block(BACK_BY_RELEASE).commands, own | {"LAST_GOOD": release}, clone)
        else:
            release = _commit(clone, f"Version {version}")
            _well(the_block(SHIFT).commands.replace(SHIFT, "AllAtOnce"), own, clone)
        names = _resources(stack)
        alias = json.loads(_well(the_block("get-alias").commands, own, clone))
        assert (alias["AliasArn"], alias["FunctionVersion"]) == (names["WorkerAlias"], version)
        configuration = functions.get_function_configuration(FunctionName=alias["AliasArn"])
        assert configuration["Environment"]["Variables"]["RELEASE"].startswith(f"{release}-")
    kept = functions.list_versions_by_function(FunctionName=names["WorkerFunction"])["Versions"]
    assert [each["Version"] for each in kept] == ["$LATEST", "1", "2", "3"]

    for lane in ("Interactive", "Standard", "Bulk"):
        poller = functions.get_event_source_mapping(UUID=names[f"WorkerFunction{lane}"])
        assert poller["FunctionArn"] == names["WorkerAlias"]
    [path] = [item["id"] for item in gateway.get_resources(restApiId=names["Api"])["items"] if item["path"] == "/jobs"]
    integration = gateway.get_integration(restApiId=names["Api"], resourceId=path, httpMethod="POST")
    assert f"/functions/{names['IngestAlias']}/invocations" in integration["uri"]
    outputs = stack.aws("cloudformation").describe_stacks(StackName=OWN)["Stacks"][0]["Outputs"]
    url = api_url({each["OutputKey"]: each["OutputValue"] for each in outputs}, stack.endpoint_url)
    assert httpx2.post(f"{url}/jobs", trust_env=False, timeout=60).status_code == 401
    streams = logs.describe_log_streams(logGroupName=names["IngestLogs"])["logStreams"]
    assert all("[3]" in each["logStreamName"] for each in streams), streams
    assert streams

    def found() -> list[bool]:
        told = json.loads(run(f"backburner doctor --stack {OWN} --json", own, clone).stdout)
        return [each["ok"] for each in told if each["what"] == "versions"]

    assert found() == [True]
    functions.update_function_configuration(FunctionName=names["NotifierFunction"], MemorySize=640)
    assert found() == [False]  # as with a parameter that was changed under an old release's name


def test_a_stack_is_removed_without_its_data(stack: Stack, own: dict[str, str], clone: Path) -> None:
    """Tables, payloads and keys are kept."""
    names = _resources(stack)
    _well(the_block("sam delete").commands, own, clone)
    tables = stack.aws("dynamodb").list_tables()["TableNames"]
    assert {names[table] for table in KEPT} <= set(tables)
    assert names["PayloadsBucket"] in {bucket["Name"] for bucket in stack.aws("s3").list_buckets()["Buckets"]}
    assert stack.aws("secretsmanager").get_secret_value(SecretId=names["WebhookKeySecret"])["SecretString"]
    functions = stack.aws("lambda").list_functions()["Functions"]
    assert names["WorkerFunction"] not in {function["FunctionName"] for function in functions}


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
