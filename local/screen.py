"""What the commands print: one line for each step, with its time."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from local.state import shown

console = Console(highlight=False)


class LocalError(Exception):
    """Something about the local stack failed; the message says what, `log` holds the details."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Show that something is going on, and afterwards how long it took."""
    began = time.monotonic()
    with console.status(escape(title)):
        try:
            yield
        except KeyboardInterrupt:
            console.print(f"  [yellow]stopped[/] {escape(title)}; what was started goes on: make status, make down")
            raise
        except BaseException:
            console.print(f"  [red]failed[/]  {escape(title)}")
            raise
    console.print(f"  [green]done[/]    {escape(title)} [dim]({time.monotonic() - began:.1f} s)[/]")


def note(text: str) -> None:
    """A line of information between the steps."""
    console.print(f"          {escape(text)}", style="dim")


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file, none if there is no such file."""
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def show_failure(error: LocalError, lines: int = 25) -> None:
    """Say what failed, the end of its log, and where the rest is."""
    console.print(f"\n[red bold]{escape(str(error))}[/]")
    if error.log is not None:
        console.print(f"\nThe last lines of {shown(error.log)}:", style="dim")
        for line in tail(error.log, lines):
            console.print("  " + line, style="dim", markup=False)
    console.print("\nMore: [bold]make logs[/], [bold]make status[/]; from the beginning: [bold]make down up[/]")
