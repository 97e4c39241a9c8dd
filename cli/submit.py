"""`backburner submit`: requests from a file, stdin or the command line, followed until they have ended."""

from __future__ import annotations

import hashlib
import heapq
import json
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import urllib3

from backburner.errors import InvalidRequest
from backburner.intake import parse_object, validated
from backburner.models import JobRequest
from cli.api import Api, ApiKey, has_ended
from cli.batch import batch_request, is_batch_line
from cli.deployment import Deployment, Profile, Region, StackName
from cli.screen import AsJson, Refused, notes, progress

AT_ONCE = 8
NAME = re.compile(r"[!-~]{1,100}")
POLL_SECONDS, POLL_SECONDS_MAX = 0.5, 5.0
"""Between two looks at a job: short answers are told fast, long waits cost few requests."""


@dataclass(frozen=True)
class Asked:
    """A request, and the key under which it is submitted; line: in its file, from 1."""

    line: int
    request: Mapping[str, Any]
    key: str


def read_requests(text: str, *, by_line: bool = False) -> list[tuple[int, dict[str, Any]]]:
    """The requests in a text, one JSON object or one a line, with their lines; checked, so that all or none are sent.

    Each as `POST /jobs` takes it, or as OpenAI's batch files have it. Raises Refused, naming line and field.
    """
    try:
        whole = None if by_line else json.loads(text)
    except ValueError:
        whole = None
    lines = [(1, text)] if isinstance(whole, dict) else list(enumerate(text.splitlines(), start=1))
    found = []
    for number, line in lines:
        if not line.strip():
            continue
        try:
            fields = parse_object(line, "line")
            if is_batch_line(fields):
                fields = batch_request(fields).model_dump(mode="json", exclude_none=True)
            validated(JobRequest, fields)
        except InvalidRequest as error:
            wrong = "; ".join(f"{name}: {said}" for name, said in error.fields) or error.message
            raise Refused(f"line {number}: {wrong}") from error
        found.append((number, fields))
    if not found:
        raise Refused("There is no request to submit.")
    return found


def keyed(requests: Sequence[tuple[int, dict[str, Any]]], name: str) -> list[Asked]:
    """Each request with an idempotency key made of the name and its content, so that a second run adds no job.

    Equal requests of one file get keys of their own.
    """
    seen: Counter[str] = Counter()
    asked = []
    for line, request in requests:
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:32]
        seen[digest] += 1
        asked.append(Asked(line, request, f"{name}-{digest}-{seen[digest]}"))
    return asked


def submit_all(api: Api, asked: Sequence[Asked], advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Submit the requests, some at once; for each its line and job id, or its line and error."""

    def one(each: Asked) -> dict[str, Any]:
        try:
            reply = api.submit(each.request, each.key)
        except urllib3.exceptions.HTTPError as error:
            return {"line": each.line, "error": f"no reply: {type(error).__name__}"}
        finally:
            advance()
        if reply.status != 202:
            return {"line": each.line, "error": reply.problem}
        return {"line": each.line, "job_id": reply.body["job_id"], "status": reply.body["status"]}

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return list(pool.map(one, asked))


def follow(api: Api, job_ids: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> Iterator[dict[str, Any]]:
    """Each job as the API shows it, as soon as it has ended; one that cannot be seen any more with its error."""
    due = [(0.0, number, POLL_SECONDS, job_id) for number, job_id in enumerate(job_ids)]
    heapq.heapify(due)
    now = 0.0  # of our own: the sum of what was slept
    while due:
        at, number, pause, job_id = heapq.heappop(due)
        if at > now:
            sleep(at - now)
            now = at
        reply = api.job(job_id)
        if reply.status != 200:
            yield {"job_id": job_id, "status": "unknown", "error": {"code": reply.problem}}
        elif has_ended(reply.body):
            yield dict(reply.body)
        else:
            heapq.heappush(due, (now + pause, number, min(POLL_SECONDS_MAX, 1.5 * pause), job_id))


def _requests(file: Path, prompt: str | None, *, by_line: bool) -> tuple[list[tuple[int, dict[str, Any]]], str]:
    """The requests, and the batch's name where none is given. Raises Refused."""
    if prompt is not None:
        return [(1, {"prompt": prompt})], uuid.uuid4().hex[:12]
    if str(file) == "-":
        return read_requests(sys.stdin.read(), by_line=by_line), uuid.uuid4().hex[:12]
    try:
        return read_requests(file.read_text(), by_line=by_line), re.sub(r"[^!-~]", "-", file.stem)[:100]
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{file} cannot be read: {error}") from error


def submit(
    file: Annotated[
        Path,
        typer.Argument(
            help="A request as for POST /jobs, or one a line; also a batch file of OpenAI's. - is stdin.",
            allow_dash=True,
        ),
    ] = Path("-"),
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="A prompt in place of a file.")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Names this batch. The same requests under the same name are the same jobs. Left out: the file's name,"
            " or a new one for stdin and --prompt.",
            show_default=False,
        ),
    ] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="A request a line, even if there is only one.")] = False,
    wait: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait until the jobs have ended.")] = True,
    output: Annotated[Path | None, typer.Option(help="Where results go, a line each; left out: stdout.")] = None,
    key: ApiKey = None,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Submit requests and follow them to their ends. Prints a JSON line for each, or the answer of a single one.

    May be interrupted and begun again: what was accepted is not submitted twice. Ends with 1 if any did not complete.
    A failed job keeps its key; run it again by `backburner jobs retry`, or submit under another --name.
    """
    requests, named = _requests(file, prompt, by_line=jsonl)
    batch = name or named
    if not NAME.fullmatch(batch):
        raise Refused("--name must be 1 to 100 visible ASCII characters.")
    api = Api.of(Deployment.find(stack, profile, region), key)
    asked = keyed(requests, batch)
    plain = len(asked) == 1 and not as_json and output is None
    with _sink(output) as write, _resumable(batch):
        if name is None and prompt is None and str(file) == "-":
            notes.print(f"This batch is called {batch}.", markup=False)
        with progress("Submitting", len(asked)) as advance:
            accepted = submit_all(api, asked, advance)
        refused = [each for each in accepted if "error" in each]
        for each in refused:
            notes.print(f"line {each['line']}: {each['error']}", style="red", markup=False, soft_wrap=True)
            write(each)
        lines = {each["job_id"]: each["line"] for each in accepted if "job_id" in each}
        if wait:
            bad = _followed(api, lines, plain=plain, write=write)
        else:
            bad = 0
            for each in accepted:
                if "job_id" in each:
                    write(each)
    if refused:
        notes.print(_go_on(batch), markup=False, soft_wrap=True)
    if bad or refused:
        raise typer.Exit(1)


def _followed(api: Api, lines: Mapping[str, int], *, plain: bool, write: Callable[[Mapping[str, Any]], None]) -> int:
    """Tell each job's end as it comes; how many did not complete. lines: of the file, by job."""
    bad = 0
    with progress("Waiting", len(lines)) as advance:
        for job in follow(api, list(lines)):
            bad += job["status"] != "completed"
            _tell(job, lines[job["job_id"]], plain=plain, write=write)
            advance()
    return bad


def _go_on(batch: str) -> str:
    return f"Go on by the same command with --name {batch}: what was accepted is not submitted twice."


@contextmanager
def _resumable(batch: str) -> Iterator[None]:
    """Whatever ends the command before its time, the operator is told how to go on."""
    try:
        yield
    except BaseException as error:
        notes.print(_go_on(batch), markup=False, soft_wrap=True)
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(130) from None
        raise


def _tell(job: Mapping[str, Any], line: int, *, plain: bool, write: Callable[[Mapping[str, Any]], None]) -> None:
    if plain and "text" in job.get("result", {}):
        typer.echo(job["result"]["text"])
    elif plain:
        error = job.get("error", {})
        said = f"{job['job_id']} is {job['status']}: {error.get('code', '')} {error.get('message', '')}"
        notes.print(said, style="red", markup=False, soft_wrap=True)
    else:
        write({"line": line, **job})


@contextmanager
def _sink(path: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Where results go: one JSON line each, at once, so that an interrupted run has written what it knew.

    Raises Refused for a file that cannot be written.
    """
    try:
        opened = nullcontext(sys.stdout) if path is None else path.open("w", encoding="utf-8")
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from error
    with opened as file:

        def write(value: Mapping[str, Any]) -> None:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
            file.flush()

        yield write
