"""The stack's logs in one place: the functions' (CloudWatch Logs), the emulator's and the model's files."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from local import emulator, model
from local.screen import console, tail
from local.stack import running_stack
from local.state import State

POLL_SECONDS = 1.0
# CloudWatch may hold many days; older lines than this are of no use to somebody who looks at a local stack.
FUNCTION_LINES_AGE_SECONDS_MAX = 24 * 3600


@dataclass
class LogFile:
    """A file that grows; remembers how far it was read."""

    name: str
    path: Path
    offset: int = 0

    def last(self, lines: int) -> list[str]:
        """The end of the file; later reads go on from here."""
        self.offset = self.path.stat().st_size if self.path.is_file() else 0
        return tail(self.path, lines)

    def new(self) -> list[str]:
        """What was added since; from the start if the file was begun anew."""
        if not self.path.is_file():
            return []
        if self.path.stat().st_size < self.offset:
            self.offset = 0
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return complete.decode(errors="replace").splitlines()


@dataclass
class FunctionLog:
    """The log group of one function. The emulator gives its events no id, so they are counted instead."""

    name: str
    group: str
    client: Any
    since_ms: int
    shown: int = 0

    def new(self) -> list[tuple[int, str]]:
        """Lines not yet shown, with their time in epoch milliseconds."""
        found: list[tuple[int, str]] = []
        pages = self.client.get_paginator("filter_log_events")
        try:
            for page in pages.paginate(logGroupName=self.group, startTime=self.since_ms):
                found += [(int(event["timestamp"]), str(event["message"]).rstrip()) for event in page["events"]]
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceNotFoundException":  # else: nothing logged so far
                raise
        found.sort(key=lambda line: line[0])
        new, self.shown = found[self.shown :], len(found)
        return new


def show(state: State, *, lines: int, follow: bool) -> None:
    """Print the last lines of everything; with `follow`, go on until interrupted."""
    files = [LogFile(name, state.log(name)) for name in (emulator.NAME, model.NAME)]
    for file in files:
        for line in file.last(lines):
            _print(file.name, line)
    functions = list(_function_logs(state))
    _print_functions(functions, lines)
    while follow:
        time.sleep(POLL_SECONDS)
        for file in files:
            for line in file.new():
                _print(file.name, line)
        _print_functions(functions, None)


def _function_logs(state: State) -> Iterator[FunctionLog]:
    stack = running_stack(state)
    session = emulator.session()
    client = session.client("logs", endpoint_url=stack["endpoint_url"], config=emulator.CLIENT_CONFIG)
    functions = session.client("lambda", endpoint_url=stack["endpoint_url"], config=emulator.CLIENT_CONFIG)
    since_ms = int((time.time() - FUNCTION_LINES_AGE_SECONDS_MAX) * 1000)
    for output, name in stack["outputs"].items():
        if output.endswith("FunctionName"):
            configuration = functions.get_function_configuration(FunctionName=name)
            group = configuration.get("LoggingConfig", {}).get("LogGroup") or f"/aws/lambda/{name}"
            yield FunctionLog(output.removesuffix("FunctionName").lower(), group, client, since_ms)


def _print_functions(functions: list[FunctionLog], lines: int | None) -> None:
    """All functions' lines in the order of their time, the last `lines` of them."""
    found = [(at, function.name, line) for function in functions for at, line in function.new()]
    merged = sorted(found, key=lambda line: line[0])
    for at, name, line in merged if lines is None else merged[-lines:]:
        _print(name, f"{time.strftime('%H:%M:%S', time.localtime(at / 1000))} {line}")


def _print(source: str, line: str) -> None:
    console.print(f"{source:>9} | ", style="cyan", end="", markup=False)
    console.print(line, markup=False, soft_wrap=True)
