"""`python -m local`: the commands behind `make up`, `down`, `logs`, `status`, `demo`, `e2e` and the benches."""

import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from local import demo as local_demo
from local import emulator, model, processes, trial
from local import logs as local_logs
from local import stack as local_stack
from local.screen import LocalError, console, show_failure
from local.state import current_state, read_json, shown

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def up() -> None:
    """Start everything and deploy; does only what is not done yet."""
    state = current_state()
    stack = local_stack.up(state)
    console.print(f"\nThe API:          {stack['api_url']}", soft_wrap=True)
    console.print(f"Everything else:  {shown(state.stack_file)}", soft_wrap=True)
    console.print(f"For work by hand: . {shown(state.shell_file)}", soft_wrap=True)


@app.command()
def down() -> None:
    """End what `up` started; nothing of it goes on running."""
    ended = local_stack.down(current_state())
    console.print(f"Ended: {', '.join(ended)}." if ended else "Nothing was running.")


@app.command()
def logs(
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of each.")] = 40,
) -> None:
    """Show the logs of the functions, the local AWS and the model."""
    local_logs.show(current_state(), lines=lines, follow=follow)


@app.command()
def status() -> None:
    """Say what is running and where."""
    state = current_state()
    for name in (emulator.NAME, model.NAME):
        running = processes.find(state, name)
        where = f"process {running.pid}, port {running.port}" if running else "not running"
        console.print(f"{name:>9}: {where}")
    stack = read_json(state.stack_file)
    console.print(f"{'API':>9}: {stack.get('api_url', 'not deployed')}")


@app.command()
def demo() -> None:
    """Bring the stack up, run one job and show its way."""
    local_demo.run(current_state())


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def e2e(context: typer.Context) -> None:
    """Run the end-to-end tests on a stack of their own; arguments go to pytest."""
    raise typer.Exit(trial.end_to_end(context.args))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context, name: Annotated[str, typer.Argument(help=", ".join(trial.BENCHES), show_default=False)]
) -> None:
    """Measure a stack of its own; arguments go to the bench."""
    if name not in trial.BENCHES:
        raise typer.BadParameter(f"{name} is none of {', '.join(trial.BENCHES)}")
    raise typer.Exit(trial.bench(name, context.args))


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that `finally` runs and nothing is left behind."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: a failure of the stack is a message, not a traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(standalone_mode=True)
    except LocalError as error:
        show_failure(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
