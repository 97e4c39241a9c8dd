"""`backburner dlq` and `jobs`: dead jobs of the deployed functions, as the night shift finds and mends them."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from backburner import bootstrap
from cli import dlq, retries, screen
from tests.fakes.provider import Behaviour, FakeProvider, openai_error
from tests.integration.deployed import Deployed
from tests.integration.functions import Stack, sigterm_kept


@pytest.fixture
def stack(deployed: Deployed, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """The functions; nothing waits by chance."""
    monkeypatch.setattr(bootstrap.SystemChance, "uniform", lambda _self, low, _high: low)
    functions = Stack(deployed)
    functions.provider_keys()
    with sigterm_kept():
        yield functions


CAUSES = {
    "quota_exhausted": Behaviour(status=429, body=openai_error("q", "insufficient_quota", "insufficient_quota")),
    "model_not_found": Behaviour(status=404, body=openai_error("no", "invalid_request_error", "model_not_found")),
    "authentication": Behaviour(status=401),
}


def status(stack: Stack, job_id: str) -> str:
    """As the row has it."""
    return str(stack.row(job_id)["status"]["S"])


def die(stack: Stack, provider: FakeProvider, code: str, count: int, client: str = "alice", **fields: Any) -> list[str]:
    """Jobs that die of the provider's refusal, as often as they are run until the provider is well again."""
    mark = f"mark-{code}"
    provider.script(mark, *[CAUSES[code]] * 50)
    key = stack.client(client)
    ids = [stack.post(key, {"prompt": f"{mark} {number}", **fields}).json["job_id"] for number in range(count)]
    while stack.work():
        pass
    assert {status(stack, job_id) for job_id in ids} == {"failed"}
    return ids


def heal(provider: FakeProvider, code: str) -> None:
    """The provider answers these again."""
    provider.script(f"mark-{code}", Behaviour(text="Fulda"))


def printed(result: Any, exit_code: int = 0) -> Any:
    """What a command has printed as JSON."""
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout.splitlines()[-1])  # before it, what workers log who share this process


def letters(stack: Stack) -> int:
    """How many lie in the dead-letter queue, in whosever hand."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    reply = stack.sqs.get_queue_attributes(QueueUrl=stack.deployed.names["DeadLetterQueue"], AttributeNames=names)
    return sum(int(count) for count in reply["Attributes"].values())


class Night:
    """Workers that go on while the tool waits for its canary: one pass over the queue each time it sleeps."""

    def __init__(self, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept: list[float] = []
        self._stack = stack
        monkeypatch.setattr(bootstrap.SystemClock, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._stack.work()


def test_dead_jobs_are_listed_by_cause_and_stay_where_they_are(stack: Stack, tool: Any, provider: FakeProvider) -> None:
    """With counts, ages, lanes and clients; filters narrow it down."""
    die(stack, provider, "quota_exhausted", 12)
    die(stack, provider, "model_not_found", 3, "bob", priority="standard")
    for listed in (printed(tool("dlq", "list", "--json")) for _ in range(2)):
        assert (listed["total"], listed["settled"]) == (15, 0)
        assert [(group["cause"], group["count"]) for group in listed["groups"]] == [
            ("quota_exhausted", 12),
            ("model_not_found", 3),
        ]
        first = listed["groups"][0]
        assert (first["lanes"], first["clients"]) == ({"standard": 12}, {"alice": 12})
        assert 0 <= first["newest_seconds"] <= first["oldest_seconds"] < 600
        assert status(stack, first["example"]) == "failed"
        assert (len(set(first["job_ids"])), first["job_ids_left_out"]) == (12, 0)
    assert letters(stack) == 15
    for option, total in (("--cause=model_not_found", 3), ("--client=alice", 12), ("--lane=bulk", 0),
                          ("--older-than=1h", 0), ("--match=credit", 12)):  # fmt: skip
        assert printed(tool("dlq", "list", option, "--json"))["total"] == total, option
    assert "quota_exhausted" in tool("dlq", "list").stdout


def test_a_groups_jobs_are_named_up_to_a_bound(
    stack: Stack, tool: Any, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With how many more there are."""
    ids = die(stack, provider, "quota_exhausted", 5)
    monkeypatch.setattr(dlq, "JOB_IDS_MAX", 3)
    [group] = printed(tool("dlq", "list", "--json"))["groups"]
    assert (len(group["job_ids"]), group["job_ids_left_out"], group["count"]) == (3, 2, 5)
    assert set(group["job_ids"]) < set(ids)


def test_a_failed_job_without_a_letter_is_not_called_dead(stack: Stack, tool: Any, provider: FakeProvider) -> None:
    """A request that a provider will never take is its caller's business."""
    provider.script("mark-bad", Behaviour(status=400, body=openai_error("bad", "invalid_request_error", "bad")))
    job_id = stack.post(stack.client(), {"prompt": "mark-bad"}).json["job_id"]
    stack.work()
    assert printed(tool("dlq", "show", job_id, "--json"))["letter"].startswith("none: ")
    [dead] = die(stack, provider, "quota_exhausted", 1)
    assert printed(tool("dlq", "show", dead, "--json"))["letter"] == "sent"
    printed(tool("dlq", "discard", dead, "--yes", "--json"))
    assert printed(tool("dlq", "show", dead, "--json"))["letter"] == "discarded"


def test_the_canary_goes_first_and_the_others_follow(
    stack: Stack, tool: Any, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All run once more, and the queue is empty of them."""
    ids = die(stack, provider, "quota_exhausted", 5)
    others = die(stack, provider, "model_not_found", 2, "bob")
    heal(provider, "quota_exhausted")
    Night(stack, monkeypatch)
    done = printed(tool("dlq", "retry", "--cause", "quota_exhausted", "--yes", "--rate", "100", "--json"))
    assert sorted(done["retried"]) == sorted(ids)
    assert done["left"] == {}
    assert list(done["canaries"].values()) == ["completed"]
    stack.work()
    assert {status(stack, job_id) for job_id in ids} == {"completed"}
    assert letters(stack) == len(others)


def test_a_canary_that_dies_again_keeps_the_others_from_it(
    stack: Stack, tool: Any, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its cause only; and the tool says so by its status."""
    ids = die(stack, provider, "quota_exhausted", 4)
    die(stack, provider, "model_not_found", 2, "bob")
    heal(provider, "model_not_found")
    Night(stack, monkeypatch)
    calls = len(provider.ledger)
    done = printed(tool("dlq", "retry", "--all", "--yes", "--rate", "100", "--json"), exit_code=1)
    assert len(done["retried"]) == 3
    assert len(done["left"]) == 3
    assert set(done["left"]) < set(ids)
    assert "quota_exhausted" in next(iter(done["left"].values()))
    stack.work()
    assert len(provider.ledger) == calls + 3
    assert letters(stack) == 4


def test_a_canary_that_does_not_end_is_not_waited_for_for_ever(
    stack: Stack, tool: Any, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody works."""
    die(stack, provider, "quota_exhausted", 2)
    monkeypatch.setattr(bootstrap.SystemClock, "sleep", lambda _self, _seconds: None)
    done = printed(tool("dlq", "retry", "--all", "--yes", "--canary-for", "0.2s", "--json"), exit_code=1)
    assert (len(done["retried"]), len(done["left"])) == (1, 1)
    assert "has not ended" in next(iter(done["left"].values()))


def test_jobs_are_retried_no_faster_than_asked(
    stack: Stack, tool: Any, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what comes back from the dead does not overwhelm the living."""
    die(stack, provider, "quota_exhausted", 4)
    night = Night(stack, monkeypatch)
    printed(tool("dlq", "retry", "--all", "--yes", "--no-canary", "--rate", "2", "--json"))
    assert night.slept == [0.5] * 4


def test_a_request_is_mended_from_a_file(stack: Stack, tool: Any, provider: FakeProvider, tmp_path: Path) -> None:
    """Its fields replace the job's; a field that cannot be mended leaves the job as it is."""
    ids = die(stack, provider, "model_not_found", 3)
    mend = tmp_path / "mend.json"
    mend.write_text('{"model": "no-such-model"}')
    wrong = ("dlq", "retry", "--all", "--yes", "--no-canary", "--edit-from", str(mend), "--json")
    assert all("model: unknown model" in why for why in printed(tool(*wrong), exit_code=1)["left"].values())
    assert letters(stack) == 3
    mend.write_text('{"prompt": "Name a lake.", "model": "gpt-5.4"}')
    printed(tool("dlq", "retry", *ids, "--yes", "--no-canary", "--rate", "100", "--edit-from", str(mend), "--json"))
    stack.work()
    assert {status(stack, job_id) for job_id in ids} == {"completed"}
    assert {call.request["model"] for call in provider.ledger[-3:]} == {"gpt-5.4"}
    assert letters(stack) == 0
    mend.write_text("[]")
    assert tool("dlq", "retry", "--all", "--edit-from", str(mend)).exit_code == 2


def test_a_request_is_mended_in_the_editor(
    stack: Stack, tool: Any, provider: FakeProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is asked; what was taken away is not."""
    [job_id] = die(stack, provider, "model_not_found", 1, max_tokens=9, system_prompt="Be brief.")
    editor = tmp_path / "editor"
    editor.write_text(
        '#!/bin/sh\ngrep -q \'Be brief\' "$1" || exit 1\necho \'{"prompt": "Name a lake.", "max_tokens": 9}\' > "$1"\n'
    )
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    monkeypatch.delenv("VISUAL", raising=False)
    printed(tool("jobs", "retry", job_id, "--yes", "--edit", "--json"))
    assert json.loads(stack.row(job_id)["request"]["S"]) == {"max_tokens": 9, "prompt": "Name a lake."}
    stack.work()
    assert status(stack, job_id) == "completed"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is drawn on stderr, as if that were a terminal."""
    drawn = io.StringIO()
    made = Console(file=drawn, force_terminal=True, width=200, highlight=False)
    for module in (screen, retries):
        monkeypatch.setattr(module, "notes", made)
    return drawn


def test_nothing_is_drawn_over_the_editor(
    stack: Stack, tool: Any, provider: FakeProvider, terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar is taken away while it runs, again for each job, and comes back."""
    ids = die(stack, provider, "model_not_found", 2)
    meanwhile: list[str] = []

    def edit(text: str, **_: Any) -> str:
        before = len(terminal.getvalue())
        time.sleep(0.35)  # a bar is drawn ten times a second
        meanwhile.append(terminal.getvalue()[before:])
        return text.replace("mark", "Name")

    monkeypatch.setattr("click.edit", edit)
    monkeypatch.setattr(bootstrap.SystemClock, "sleep", lambda _self, _seconds: time.sleep(0.15))
    done = printed(tool("jobs", "retry", *ids, "--yes", "--edit", "--json"))
    assert (done["retried"], meanwhile) == (ids, ["", ""])
    assert "2/2" in terminal.getvalue()


def test_what_is_waited_for_and_how_long_is_said(
    stack: Stack, tool: Any, provider: FakeProvider, terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A canary may take minutes."""
    ids = die(stack, provider, "quota_exhausted", 2)
    monkeypatch.setattr(bootstrap.SystemClock, "sleep", lambda _self, _seconds: time.sleep(0.15))
    tool("dlq", "retry", "--all", "--yes", "--canary-for", "1s", "--json")
    drawn = terminal.getvalue()
    canary = next(job_id for job_id in ids if job_id in drawn)
    assert f"Waiting for the canary {canary} (quota_exhausted), for 1 s at most." in drawn
    assert f"canary {canary} (quota_exhausted) is queued, 0 s of 1 s" in drawn


def test_discarded_jobs_are_gone_for_good(stack: Stack, tool: Any, provider: FakeProvider) -> None:
    """They stay failed; the operator is asked first."""
    ids = die(stack, provider, "quota_exhausted", 3)
    heal(provider, "quota_exhausted")
    refused = tool("dlq", "discard", "--cause", "quota_exhausted", input="n\n")
    assert (refused.exit_code, letters(stack)) == (1, 3)
    done = printed(tool("dlq", "discard", "--cause", "quota_exhausted", "--yes", "--json"))
    assert sorted(done["discarded"]) == sorted(ids)
    assert letters(stack) == 0
    assert tool("jobs", "retry", ids[0], "--yes").exit_code == 2
    assert printed(tool("dlq", "list", "--json"))["total"] == 0
    assert {status(stack, job_id) for job_id in ids} == {"failed"}


def test_what_is_no_job_is_discarded_too(stack: Stack, tool: Any) -> None:
    """A message that somebody has typed."""
    stack.run("garbage")
    [group] = printed(tool("dlq", "list", "--json"))["groups"]
    assert (group["cause"], group["count"]) == ("malformed_hint", 1)
    assert printed(tool("dlq", "retry", "--all", "--yes", "--json"))["retried"] == []
    assert len(printed(tool("dlq", "discard", "--all", "--yes", "--json"))["discarded"]) == 1
    assert letters(stack) == 0


@pytest.mark.parametrize("verb", ["retry", "discard"])
def test_all_dead_jobs_are_taken_only_if_asked_for(stack: Stack, tool: Any, provider: FakeProvider, verb: str) -> None:
    """A forgotten filter must not be `all`."""
    die(stack, provider, "quota_exhausted", 1)
    refused = tool("dlq", verb, "--yes")
    assert (refused.exit_code, "--all" in refused.stderr) == (2, True)
    assert letters(stack) == 1
    nothing = printed(tool("dlq", verb, "--cause", "timeout", "--yes", "--json"))
    assert (nothing["left"], letters(stack)) == ({}, 1)
    assert tool("dlq", verb, "job_nobody", "--yes").exit_code == 2


def test_letters_whose_jobs_were_redriven_by_hand_are_swept_up(stack: Stack, tool: Any, provider: FakeProvider) -> None:
    """A copy in the queue asks for nothing any more."""
    [job_id] = die(stack, provider, "quota_exhausted", 1)
    heal(provider, "quota_exhausted")
    stack.run(json.dumps({"job_id": job_id, "died": int(stack.row(job_id)["claims"]["N"]), "v": 1}))
    assert status(stack, job_id) == "completed"
    listed = printed(tool("dlq", "list", "--json"))
    assert (listed["total"], listed["settled"]) == (0, 1)
    printed(tool("dlq", "discard", "--all", "--yes", "--json"))
    assert letters(stack) == 0


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_jobs_of_all_clients_are_listed_the_newest_first(stack: Stack, tool: Any, provider: FakeProvider) -> None:
    """And by client, state and lane."""
    [dead] = die(stack, provider, "quota_exhausted", 1)
    waiting = [stack.post(stack.client("bob"), {"prompt": "a", "priority": "bulk"}).json["job_id"] for _ in range(2)]
    listed = [job["job_id"] for job in printed(tool("jobs", "list", "--json"))["jobs"]]
    assert set(listed[:2]) == set(waiting)
    assert listed[2:] == [dead]
    for option, count in (("--client=bob", 2), ("--status=failed", 1), ("--lane=bulk", 2), ("--limit=1", 1)):
        assert len(printed(tool("jobs", "list", option, "--json"))["jobs"]) == count, option
    assert dead in tool("jobs", "list").stdout.replace("\n", "")


def test_a_job_is_shown_with_its_attempts_and_without_its_content_unless_asked(
    stack: Stack, tool: Any, provider: FakeProvider
) -> None:
    """A prompt is shown to nobody who did not ask for it."""
    [job_id] = die(stack, provider, "quota_exhausted", 1)
    for command in (("jobs", "show"), ("dlq", "show")):
        shown = printed(tool(*command, job_id, "--json"))
        assert (shown["status"], shown["error"]["code"], shown["client_id"]) == ("failed", "quota_exhausted", "alice")
        assert [line["outcome"] for line in shown["receipt"]] == ["quota_exhausted"]
        assert ("dead_letter", "delivered") in {(each["target"], each["status"]) for each in shown["deliveries"]}
        assert "mark-quota" not in json.dumps(shown)
        assert printed(tool(*command, job_id, "--content", "--json"))["request"]["prompt"].startswith("mark-quota")
    heal(provider, "quota_exhausted")
    printed(tool("jobs", "retry", job_id, "--yes", "--json"))
    stack.work()
    assert "result" not in printed(tool("jobs", "show", job_id, "--json"))
    assert printed(tool("jobs", "show", job_id, "--content", "--json"))["result"]["text"] == "Fulda"
    assert tool("dlq", "show", job_id).exit_code == 2
    assert tool("jobs", "show", "job_nobody").stderr == "there is no job 'job_nobody'\n"


def test_a_job_is_cancelled_whosever_it_is(stack: Stack, tool: Any) -> None:
    """Once it has ended it is too late."""
    key = stack.client()
    job_id = stack.post(key, {"prompt": "a"}).json["job_id"]
    assert tool("jobs", "cancel", job_id, input="n\n").exit_code == 1
    printed(tool("jobs", "cancel", job_id, "--yes", "--json"))
    assert stack.get(key, job_id).json["status"] == "cancelled"
    done = stack.post(key, {"prompt": "a"}).json["job_id"]
    stack.work()
    late = tool("jobs", "cancel", done, "--yes")
    assert (late.exit_code, "is completed" in late.stdout) == (1, True)


def test_jobs_that_cannot_be_cancelled_keep_no_other_from_it(stack: Stack, tool: Any) -> None:
    """Each is told of, as JSON too."""
    key = stack.client()
    done = stack.post(key, {"prompt": "a"}).json["job_id"]
    stack.work()
    first, last = (stack.post(key, {"prompt": "a"}).json["job_id"] for _ in range(2))
    told = printed(tool("jobs", "cancel", first, done, "job_nobody", last, "--yes", "--json"), exit_code=1)
    assert told["cancelled"] == [first, last]
    assert told["left"].keys() == {done, "job_nobody"}
    assert "completed" in told["left"][done]
    assert {status(stack, job_id) for job_id in (first, last)} == {"cancelled"}
    waiting = stack.post(key, {"prompt": "a"}).json["job_id"]
    shown = tool("jobs", "cancel", done, waiting, "--yes")
    assert shown.exit_code == 1
    assert f"{waiting}: cancelled\n" in shown.stdout
    assert f"{done}: " in shown.stdout
