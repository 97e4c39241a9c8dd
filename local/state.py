"""Where the local stack keeps what it knows: one folder for each stack.

It is `.local`, unless BACKBURNER_STATE names another.
"""

import contextlib
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".local"
VENVS = HOME / "venvs"
# Shared by all stacks of the clone: finished layers are named after what they are made of.
LAYER_CACHE = HOME / "cache" / "layers"

REGION = "us-east-1"
STACK_NAME = "backburner-local"


@dataclass(frozen=True)
class State:
    """Files of one local stack."""

    folder: Path

    @property
    def is_default(self) -> bool:
        """Whether this is the developer's own stack, which gets the well-known ports."""
        return self.folder == HOME

    @property
    def stack_file(self) -> Path:
        """What a client of the stack needs: address, key, outputs."""
        return self.folder / "stack.json"

    @property
    def shell_file(self) -> Path:
        """The same as shell variables."""
        return self.folder / "env"

    @property
    def deployed_file(self) -> Path:
        """What was deployed last, and to which emulator."""
        return self.folder / "deployed.json"

    @property
    def build(self) -> Path:
        """Output of `sam build`."""
        return self.folder / "build"

    @property
    def logs(self) -> Path:
        """Log files of the background processes and of the last deployment."""
        return self.folder / "logs"

    @property
    def processes(self) -> Path:
        """One file for each background process."""
        return self.folder / "processes"

    @property
    def scratch(self) -> Path:
        """Temporary files of the emulator and its functions; gone after `down`."""
        return self.folder / "scratch"

    def log(self, name: str) -> Path:
        """The log file of a process or a step."""
        return self.logs / f"{name}.log"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep two commands from changing the same stack at once: the second waits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "stack.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def current_state() -> State:
    """The stack that this command is about."""
    return State((ROOT / os.environ.get("BACKBURNER_STATE", ".local")).resolve())


def shown(path: Path) -> str:
    """A path as one would type it at the root of the clone."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def read_json(path: Path) -> dict[str, Any]:
    """A file's object; empty where the file is missing or broken off."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a file in one step, readable by its owner only: it may hold an API key."""
    write_private(path, json.dumps(value, indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(path)


def architecture() -> str:
    """The host's processor as the template's parameter Architecture names it."""
    return "arm64" if platform.machine().lower() in {"arm64", "aarch64"} else "x86_64"


def build_architecture() -> str:
    """What the layers are built for: the emulator runs functions on this machine, which need not be Linux."""
    return architecture() if platform.system() == "Linux" else "host"
