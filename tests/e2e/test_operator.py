"""The operator's tool on the deployed stack: the night shift's walk, and a short one through the other commands."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.__main__ import app
from tests.e2e.conftest import Fake, Stack, Workspace, until
from tests.fakes.receiver import Receiver

pytestmark = pytest.mark.e2e

SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="
QUOTA: dict[str, Any] = {"status": 429, "body": {"error": {"type": "insufficient_quota", "code": "insufficient_quota"}}}
GONE: dict[str, Any] = {"status": 404, "body": {"error": {"code": "model_not_found"}}}
REFUSED: dict[str, Any] = {"status": 401}
EACH = 10


def run(*arguments: str, exit_code: int = 0, given: str | None = None) -> Any:
    """`backburner` with its arguments; it finds the local stack by itself. What it prints as JSON."""
    done = CliRunner().invoke(app, [*arguments, "--json"], input=given, catch_exceptions=False)
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout) if done.stdout.count("\n") == 1 else [*map(json.loads, done.stdout.splitlines())]


@pytest.fixture
def client(stack: Stack) -> tuple[Stack, str]:
    """The stack as a client of its own, made by the tool; and its id."""
    client_id = f"night-{uuid.uuid4().hex[:12]}"
    return replace(stack, api_key=run("clients", "create", client_id)["api_key"]), client_id


def test_the_night_shift_finds_three_causes_mends_two_and_gives_up_the_third(
    client: tuple[Stack, str], fake: Fake, mark: str, tmp_path: Path
) -> None:
    """Thirty dead jobs; in the end the queue is empty, each run was paid for once, and each end told once."""
    stack, client_id = client
    words = {name: f"{mark}-{name}" for name in ("quota", "gone", "refused")}
    for name, step in (("quota", QUOTA), ("gone", GONE), ("refused", REFUSED)):
        fake.script(words[name], *[step] * EACH)
    with Receiver() as receiver:
        webhook = {"url": receiver.url, "secret": SECRET}
        jobs = {
            name: [stack.submit(prompt=f"{word} {n}", webhook=webhook)["job_id"] for n in range(EACH)]
            for name, word in words.items()
        }

        def told() -> Counter[tuple[str, str]]:
            return Counter((event["data"]["job_id"], event["type"]) for event in map(_body, receiver.requests))

        _until(lambda: len(told()) == 3 * EACH, told)
        listed = run("dlq", "list", "--client", client_id)
        assert listed["total"] == 3 * EACH
        groups = {group["cause"]: group["count"] for group in listed["groups"]}
        assert groups == {"quota_exhausted": EACH, "model_not_found": EACH, "authentication": EACH}

        fake.script(words["quota"], {"text": "paid again"})  # the operator has paid the bill
        done = run("dlq", "retry", "--client", client_id, "--cause", "quota_exhausted", "--yes", "--rate", "50")
        assert sorted(done["retried"]) == sorted(jobs["quota"])
        assert list(done["canaries"].values()) == ["completed"]

        mend = tmp_path / "mend.json"
        mend.write_text(json.dumps({"model": "gpt-5.4", "prompt": f"{mark}-mended"}))
        mended = ("dlq", "retry", "--client", client_id, "--cause", "model_not_found", "--edit-from", str(mend))
        assert sorted(run(*mended, "--yes", "--rate", "50")["retried"]) == sorted(jobs["gone"])

        gone = run("dlq", "discard", "--client", client_id, "--cause", "authentication", "--yes")
        assert sorted(gone["discarded"]) == sorted(jobs["refused"])

        _until(lambda: len(told()) == 5 * EACH, told)
        left = run("dlq", "list", "--client", client_id)
        assert (left["total"], left["settled"]) == (0, 0)
        expected = Counter({(job, "job.failed"): 1 for ids in jobs.values() for job in ids})
        expected += Counter({(job, "job.completed"): 1 for name in ("quota", "gone") for job in jobs[name]})
        assert told() == expected
    for name, runs in (("quota", 2), ("gone", 1), ("refused", 1)):
        assert len(fake.calls(words[name])) == runs * EACH, name
    calls = fake.calls(f"{mark}-mended")
    assert [call["request"]["model"] for call in calls] == ["gpt-5.4"] * EACH


def _body(request: Any) -> Any:
    return json.loads(request.body)


def _until(so: Callable[[], bool], told: Callable[[], object]) -> None:
    until(lambda: so() or None, 90, lambda: str(told()))


def test_an_operators_day(client: tuple[Stack, str], fake: Fake, mark: str, tmp_path: Path) -> None:
    """Submit, look, stop and start a lane, cancel, wait until it is empty, change a key."""
    stack, client_id = client
    batch = tmp_path / f"{mark}.jsonl"
    batch.write_text("".join(json.dumps({"prompt": f"{mark} {n}", "priority": "bulk"}) + "\n" for n in range(4)))
    done = run("submit", str(batch), "--key", stack.api_key)
    assert [job["status"] for job in done] == ["completed"] * 4
    again = run("submit", str(batch), "--key", stack.api_key)
    assert {job["job_id"] for job in again} == {job["job_id"] for job in done}
    assert len(fake.calls(mark)) == 4
    tailed = run("tail", done[0]["job_id"])
    assert [event["event"] for event in tailed][:1] == ["attempt"]

    assert run("pause", "bulk", "--yes") == {"lane": "bulk", "state": "Disabled"}
    try:
        waiting = [stack.submit(prompt=f"{mark} waits", priority="bulk")["job_id"] for _ in range(2)]
        lanes = {lane["lane"]: lane for lane in run("status")["lanes"]}
        assert (lanes["bulk"]["poller"], lanes["bulk"]["waiting"]) == ("Disabled", 2)
        assert (lanes["standard"]["poller"], lanes["bulk"]["concurrency"]) == ("Enabled", 2)
        run("jobs", "cancel", waiting[0], "--yes")
        listed = run("jobs", "list", "--client", client_id, "--status", "queued")["jobs"]
        assert [job["job_id"] for job in listed] == waiting[1:]
    finally:
        assert run("resume", "bulk")["state"] == "Enabled"
    assert run("drain", "bulk", "--for", "60s") == {"lane": "bulk", "left": 0}
    assert run("jobs", "show", waiting[1])["status"] == "completed"
    assert len(fake.calls(f"{mark} waits")) == 1

    fresh = replace(stack, api_key=run("clients", "rotate", client_id)["api_key"])
    assert run("clients", "disable", client_id, "--old-keys", "--yes")["disabled"] == 1
    assert fresh.submit(prompt=mark)["status"] == "queued"
    run("secrets", "set", "openai_api_key", given="fake-openai-key")


def test_the_doctor_looks_at_all_of_it_and_finds_what_is_wrong(stack: Stack, slack: Workspace) -> None:
    """A row for each check, for people and as JSON. Exit status 0 if nothing is wrong, else 1."""
    found = {row["what"]: row for row in run("doctor")}
    expected = {
        "AWS credentials": True, "the API": True, "the secret": True, "openai": True, "anthropic": True,
        "the signing secret's form": None, "Slack's signing secret": True, "Slack's bot token": True,
        "Slack's scopes": True, "Lambda's quota": True, "alarms are told to": True,
    }  # fmt: skip
    assert {what: row["ok"] for what, row in found.items()} == expected, found
    shown = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert all(what in shown.stdout for what in expected)
    assert "WRONG" not in shown.stdout
    slack.control("POST", "scripts", json={"method": "auth.test", "steps": [{"error": "account_inactive"}] * 2})
    wrong = [row for row in run("doctor", exit_code=1) if row["ok"] is False]
    assert [(row["what"], row["detail"]) for row in wrong] == [
        ("Slack's bot token", "Slack refuses it: account_inactive")
    ]
    shown = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert (shown.exit_code, shown.stdout.count("WRONG")) == (1, 1), shown.output
