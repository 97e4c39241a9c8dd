"""`backburner submit` and `load` over HTTP: what is sent, what is sent again, and what is made of the ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from typer.testing import CliRunner

from cli import submit as submitting
from cli.__main__ import app
from cli.api import Api
from cli.deployment import Deployment
from cli.load import Burst, percentiles, verdict
from tests.fakes.api import KEY, FakeApi

type Tool = Callable[..., Any]


@pytest.fixture
def api() -> Iterator[FakeApi]:
    """Listening."""
    with FakeApi() as fake:
        yield fake


@pytest.fixture
def tool(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """`backburner` against it, with its client's key; looks come without pauses."""
    found = Deployment("fake", None, {"endpoint_url": "", "stack_name": "fake", "api_url": api.url, "api_key": KEY})  # type: ignore[arg-type]
    found.__dict__["outputs"] = {"ApiUrl": api.url}
    monkeypatch.setattr(Deployment, "find", lambda *_: found)
    monkeypatch.setattr(submitting, "POLL_SECONDS", 0.01)
    monkeypatch.setattr("cli.load.POLL_SECONDS", 0.01)
    return lambda *arguments, **given: CliRunner().invoke(app, arguments, catch_exceptions=False, **given)


def lines(result: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def jsonl(path: Path, *requests: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return str(path)


def test_a_prompt_is_answered_with_the_answer(api: FakeApi, tool: Tool) -> None:
    """And nothing else, so that it can be piped; twice asked is two jobs."""
    for _ in range(2):
        done = tool("submit", "--prompt", "Name a river.")
        assert (done.exit_code, done.stdout) == (0, "re: Name a river.\n")
    assert len(api.jobs) == 2


def test_a_batch_is_told_line_by_line_and_a_second_run_adds_no_job(api: FakeApi, tool: Tool, tmp_path: Path) -> None:
    """Equal lines are jobs of their own; a line that was added is one more."""
    file = tmp_path / "night.jsonl"
    asked: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": "b", "max_tokens": 5}, {"prompt": "a"}]
    done = tool("submit", jsonl(file, *asked))
    assert done.exit_code == 0
    assert {line["line"]: line["result"]["text"] for line in lines(done)} == {1: "re: a", 2: "re: b", 3: "re: a"}
    assert len({line["job_id"] for line in lines(done)}) == 3
    again = tool("submit", jsonl(file, *asked, {"prompt": "c"}))
    assert {line["job_id"] for line in lines(done)} < {line["job_id"] for line in lines(again)}
    assert len(api.jobs) == 4
    assert len(lines(tool("submit", str(file), "--name", "another", "--no-follow"))) == 4
    assert len(api.jobs) == 8


def test_requests_come_from_stdin_and_results_go_to_a_file(api: FakeApi, tool: Tool, tmp_path: Path) -> None:
    """One object over several lines is one request."""
    out = tmp_path / "out.jsonl"
    done = tool("submit", "-", "--output", str(out), input='{\n "prompt": "a",\n "metadata": {"n": 1}\n}\n')
    assert (done.exit_code, done.stdout) == (0, "")
    assert json.loads(out.read_text())["result"]["text"] == "re: a"
    assert api.posts == [{"prompt": "a", "metadata": {"n": 1}}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"promt": "b"}\n', "line 2: promt: unknown field"),
        ('{"prompt": "a"}\n\n{"prompt": "b", "x": 1}\n', "line 3: x: unknown field"),
        ('{"prompt": "a"}\nno json\n', "line 2: the line is not JSON"),
        ("", "no request"),
        ("[1]", "line 1: the line must be a JSON object"),
    ],
)
def test_a_line_that_is_wrong_is_named_before_anything_is_sent(api: FakeApi, tool: Tool, text: str, said: str) -> None:
    """All or none."""
    refused = tool("submit", "-", input=text)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert api.posts == []


def test_what_is_refused_for_now_is_sent_again_under_its_key(api: FakeApi, tool: Tool) -> None:
    """503, 429 with Retry-After, 500: one job in the end."""
    api.faults = [(503, {"Retry-After": "0"}), (429, {"Retry-After": "0"}), (500, {"Retry-After": "0"})]
    assert tool("submit", "-p", "a").stdout == "re: a\n"
    assert (len(api.posts), len(api.jobs)) == (4, 1)


def test_what_is_refused_for_good_and_what_does_not_complete_is_told_by_the_status(
    api: FakeApi, tool: Tool, tmp_path: Path
) -> None:
    """The others are not kept from their ends."""
    api.ends = {"b": "failed"}
    api.faults = [(422, {})]
    done = tool("submit", jsonl(tmp_path / "x.jsonl", {"prompt": "b"}, {"prompt": "c"}, {"prompt": "d"}))
    assert done.exit_code == 1
    told = lines(done)
    assert len(told) == 3
    assert sum("fault_422" in str(line.get("error")) for line in told) == 1
    api.ends = {"e": "failed"}
    single = tool("submit", "-p", "e")
    assert (single.exit_code, "overloaded" in single.stderr, single.stdout) == (1, True, "")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_sent(
    api: FakeApi, tool: Tool, tmp_path: Path
) -> None:
    """In one line; a job without a place for its answer would be paid for in vain."""
    refused = tool("submit", "-p", "a", "--output", str(tmp_path / "no" / "such" / "x"))
    assert (refused.exit_code, len(refused.stderr.strip().splitlines())) == (2, 1)
    assert "cannot be written" in refused.stderr
    assert api.posts == []


GO_ON = re.compile(r"Go on by the same command with --name (\w+)")


def test_a_batch_from_stdin_is_told_its_name_before_anything_is_sent(
    api: FakeApi, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whatever ends the command, how to go on: then nothing is submitted twice."""
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'
    submit_all = submitting.submit_all

    def die(*given: Any) -> Any:
        submit_all(*given)
        raise urllib3.exceptions.HTTPError("the network is gone")

    monkeypatch.setattr(submitting, "submit_all", die)
    broken = tool("submit", "-", input=text)
    first, *_, go_on, error = broken.stderr.splitlines()
    name = GO_ON.match(go_on)[1]  # type: ignore[index]
    assert (broken.exit_code, first, error) == (1, f"This batch is called {name}.", "the network is gone")
    monkeypatch.setattr(submitting, "submit_all", submit_all)
    resumed = tool("submit", "-", "--name", name, input=text)
    assert (resumed.exit_code, len(lines(resumed)), len(api.jobs), resumed.stderr) == (0, 2, 2, "")


def test_a_batch_that_is_interrupted_or_partly_refused_says_how_to_go_on(
    api: FakeApi, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, whether that was given or made."""
    api.faults = [(422, {})]
    partly = tool("submit", "-", input='{"prompt": "a"}\n{"prompt": "b"}\n')
    assert (partly.exit_code, bool(GO_ON.search(partly.stderr))) == (1, True)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(submitting, "follow", interrupted)
    stopped = tool("submit", "-", "--name", "night", input='{"prompt": "a"}\n')
    assert (stopped.exit_code, GO_ON.search(stopped.stderr)[1]) == (130, "night")  # type: ignore[index]


def test_no_key_is_an_error_that_says_how_to_get_one() -> None:
    """Before anything is sent."""
    nowhere = Deployment("fake", None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clients create"):
        Api.of(nowhere, None)


# ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_burst_is_twice_the_peak_and_passes_if_all_goes_well(api: FakeApi, tool: Tool) -> None:
    """So many requests, each its own job, seen to its end."""
    done = tool("load", "--rps", "20", "--for", "1s", "--json", "--ack-ms", "5000")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["verdict"], told["lost"]) == (0, "passed", [])
    assert (told["sent"], told["accepted"], told["statuses"], told["rate"]) == (40, 40, {"completed": 40}, 40)
    assert len(api.jobs) == 40
    assert told["completion_seconds"] == {"p50": 3, "p95": 3, "p99": 3, "max": 3}
    assert set(told["ack_ms"]) == {"p50", "p95", "p99", "max"}
    assert {post["priority"] for post in api.posts} == {"standard"}


def test_lost_jobs_are_named_and_fail_it(api: FakeApi, tool: Tool) -> None:
    """Those that never end, and those that are not there."""
    api.ends = {"Say yes.": None}
    done = tool("load", "--rps", "5", "--times", "1", "--for", "1s", "--lost-after", "0.1s", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["verdict"]) == (1, "failed")
    assert sorted(told["lost"]) == sorted(api.jobs)
    assert "5 of 5 accepted jobs are lost" in told["reasons"]
    shown = tool("load", "--rps", "1", "--times", "1", "--for", "1s", "--lost-after", "0.1s")
    assert "lost: job_5" in shown.stdout


def test_refusals_and_failures_fail_it_and_are_not_sent_again(api: FakeApi, tool: Tool) -> None:
    """A load test that retries would hide what it is to find."""
    api.faults = [(503, {}), (429, {"Retry-After": "1"})]
    api.ends = {"Say yes.": "failed"}
    done = tool("load", "--rps", "5", "--times", "1", "--for", "1s", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, len(api.posts), told["accepted"]) == (1, 5, 3)
    assert (sum(told["refused"].values()), told["failures"]) == (2, {"overloaded": 3})


def test_a_slow_acceptance_fails_it() -> None:
    """By the 99th percentile."""
    burst = Burst(sent=100, acks_ms=[10.0] * 90 + [2_000.0] * 10, job_ids=["a"] * 100)
    assert verdict(burst, 2_500) == []
    assert len(verdict(burst, 500)) == 1
    assert percentiles([5.0]) == {"p50": 5, "p95": 5, "p99": 5, "max": 5}
    assert percentiles([]) == {}
