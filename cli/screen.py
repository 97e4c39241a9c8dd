"""What commands print, what they ask, and how they end when something is wrong.

Results go to stdout, as tables or as JSON; everything else goes to stderr, so that output can be piped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

import typer
from botocore.exceptions import BotoCoreError, ClientError
from pydantic import ValidationError
from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup
from urllib3.exceptions import HTTPError

from backburner.errors import BackburnerError, Refusal

WRONG_USE, FAILED = 2, 1
"""Exit statuses: what was asked for cannot be done; it could be, but was not."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

console = Console(highlight=False)
notes = Console(stderr=True, highlight=False)


class Refused(ValueError):
    """What was asked for cannot be done; the text says why, and what to do."""


class Tool(TyperGroup):
    """The program as a whole: what goes wrong is one line on stderr, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except (Refused, Refusal) as error:
            status, text = WRONG_USE, str(error)
        except (BackburnerError, BotoCoreError, ClientError, HTTPError) as error:
            status, text = FAILED, str(error)
        notes.print(text, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(status)


def first_fault(error: ValidationError) -> str:
    """The first of what is wrong, with its place, and without the value."""
    fault = error.errors(include_url=False, include_input=False)[0]
    return ": ".join([".".join(str(part) for part in fault["loc"]), fault["msg"]]).removeprefix(": ")


def show(value: Any, *shown: RenderableType, as_json: bool) -> None:
    """Print a result: as JSON, or as people read it. Text is printed as it stands, without markup."""
    if as_json:
        typer.echo(json.dumps(value, default=_plain, ensure_ascii=False))
        return
    for part in shown:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def _plain(value: Any) -> Any:
    """Dataclasses as objects, sets as lists, anything else as its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def table(*columns: str) -> Table:
    """An empty table. A column whose name begins with `#` holds numbers, one with `!` is never shortened."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(
            column.lstrip("#!"),
            justify="right" if column.startswith("#") else "left",
            no_wrap=column.startswith("!"),
            overflow="fold",
        )
    return made


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if the operator says so. Ends the command otherwise."""
    if not yes and not typer.confirm(question, err=True):
        raise typer.Abort


class Bar:
    """A progress bar; called once for each step."""

    def __init__(self, drawn: Progress, what: str, total: int | None) -> None:
        self._drawn, self._what = drawn, what
        self._task = drawn.add_task(what, total=total)

    def __call__(self) -> None:
        """One step more is done."""
        self._drawn.advance(self._task)

    @contextmanager
    def saying(self, what: str) -> Iterator[Callable[[str], None]]:
        """For a while it says something else; what this gives changes it again."""

        def say(words: str) -> None:
            self._drawn.update(self._task, description=words)

        say(what)
        yield say
        say(self._what)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """For a while the terminal is somebody else's: an editor's, which the bar would be drawn over."""
        if self._drawn.disable:
            yield
            return
        self._drawn.stop()
        yield
        self._drawn.start()


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Bar]:
    """A progress bar on stderr, where that is a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as drawn:
        yield Bar(drawn, what, total)
