"""What commands print, what they ask, and how they end when something is wrong.

Results go to stdout, as tables or as JSON; everything else goes to stderr, so that output can be piped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

import typer
from botocore.exceptions import BotoCoreError, ClientError
from rich.console import Console, RenderableType
from rich.table import Table
from typer.core import TyperGroup

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
        except (BackburnerError, BotoCoreError, ClientError) as error:
            status, text = FAILED, str(error)
        notes.print(text, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(status)


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
    """An empty table; a column whose name begins with `#` holds numbers."""
    made = Table()
    for column in columns:
        made.add_column(column.removeprefix("#"), justify="right" if column.startswith("#") else "left")
    return made


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if the operator says so. Ends the command otherwise."""
    if not yes and not typer.confirm(question, err=True):
        raise typer.Abort
