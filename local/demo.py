"""One job, all the way, on screen: submitted over HTTP, followed, answered; then how to go on by hand."""

import shlex
import time
from typing import Any

import httpx2
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from local import stack as local_stack
from local.screen import LocalError, console
from local.state import State

# Short and factual: the local model has 135 million parameters.
JOB = {
    "system_prompt": "You are a helpful assistant. Answer in one short sentence.",
    "prompt": "What is the capital of France?",
    "max_tokens": 60,
}
FINAL = {"completed", "failed", "cancelled", "expired"}
ANSWER_SECONDS_MAX = 120.0
POLL_SECONDS = 0.2


def run(state: State) -> None:
    """The demo; an error says which step failed."""
    console.print("\n[bold]1. The stack[/]")
    stack = local_stack.up(state)
    console.print("\n[bold]2. A job[/]")
    console.print(f"  POST {stack['api_url']}/jobs", markup=False)
    console.print(f"  {JOB['system_prompt']} {JOB['prompt']}\n", style="dim", markup=False)
    job = _follow(stack)
    if job["status"] != "completed":
        error = job.get("error") or {}
        reason = f"{error.get('code', 'no code')}: {error.get('message', 'no message')}"
        raise LocalError(f"The job ended as {job['status']} ({reason}).", state.log("emulator"))
    console.print("\n\n[bold]3. The answer[/]")
    console.print(f"  {job['result']['text'].strip()}", style="green bold", markup=False)
    console.print("\n[bold]4. Go on by hand[/]")
    for line in commands(stack, str(job["job_id"])):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _follow(stack: dict[str, Any]) -> dict[str, Any]:
    """Submit the job and watch it until it is final."""
    headers = {"Authorization": f"Bearer {stack['api_key']}"}
    began = time.monotonic()
    seen: dict[str, float] = {}
    with httpx2.Client(headers=headers, timeout=30, trust_env=False) as client, Live(console=console) as live:
        try:
            answer = client.post(f"{stack['api_url']}/jobs", json=JOB)
            if answer.status_code != 202:
                raise LocalError(f"POST /jobs answered {answer.status_code}: {answer.text[:500]}")
            job: dict[str, Any] = answer.json()
            seen["accepted"] = time.monotonic() - began
            while True:
                seen.setdefault(str(job["status"]), time.monotonic() - began)
                live.update(_view(job, seen, time.monotonic() - began), refresh=True)
                if job["status"] in FINAL:
                    return job
                if time.monotonic() - began > ANSWER_SECONDS_MAX:
                    raise LocalError(f"The job is still {job['status']} after {ANSWER_SECONDS_MAX:.0f} s.")
                time.sleep(POLL_SECONDS)
                answer = client.get(f"{stack['api_url']}/jobs/{job['job_id']}")
                if answer.status_code != 200:
                    raise LocalError(f"GET /jobs/{job['job_id']} answered {answer.status_code}: {answer.text[:500]}")
                job = answer.json()
        except httpx2.HTTPError as error:
            raise LocalError(f"The API did not answer: {error!r}") from error


def _view(job: dict[str, Any], seen: dict[str, float], elapsed: float) -> Table:
    """The job's way so far: states with the time at which each was seen, then tokens."""
    view = Table.grid(padding=(0, 2))
    view.add_row("  job", escape(str(job["job_id"])))
    for status, at in seen.items():
        view.add_row(f"  {status}", f"[dim]after {at:.2f} s[/]")
    usage = job.get("usage") or {}
    if usage:
        result = job.get("result") or {}
        tokens = f"{usage.get('input_tokens')} in, {usage.get('output_tokens')} out"
        view.add_row("  tokens", f"{tokens} [dim]({escape(str(result.get('model')))})[/]")
    if job["status"] not in FINAL:
        view.add_row("", Spinner("dots", f"{elapsed:.1f} s"))
    return view


def commands(stack: dict[str, Any], job_id: str) -> list[str]:
    """Shell lines that can be pasted as they are."""
    key = shlex.quote(f"Authorization: Bearer {stack['api_key']}")
    body = '{"prompt": "Name three colours.", "system_prompt": "Answer in a few words.", "max_tokens": 60}'
    url = f"{stack['api_url']}/jobs"
    return [
        f"curl -sS -X POST {url} -H {key} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        f"curl -sS {url}/{job_id} -H {key}",
        "make logs    # what the functions, the local AWS and the model say",
        "make down    # end everything",
    ]
