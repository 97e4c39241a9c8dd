"""Build a layer of third-party packages: install from the lock for the target, trim, compile. Standard library only.

There are two: `providers` has the LLM SDKs and what only they need, `dependencies` has the rest. The SDKs are nine
tenths of all files, and only the worker needs them.

A finished layer is kept in the cache under a name made of everything it depends on, so that an unchanged one is copied
in a second. Wheels only and by hash: nothing is compiled or run here that the lock does not name.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "requirements.txt"
PYTHON_VERSION = "3.13"
# Lambda's Python 3.13 runs on Amazon Linux 2023 (glibc 2.34); pip wants each older name spelled out.
MACHINES = {"arm64": "aarch64", "x86_64": "x86_64"}
# This machine's own system, for a local stack that runs on macOS: its Python cannot load Linux's libraries.
HOST = "host"
GLIBC_TAGS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014")

# botocore carries a description of every AWS service (25 MB); these are the ones that the functions call.
SERVICES = {
    "apigatewaymanagementapi",
    "cloudwatch",
    "dynamodb",
    "lambda",
    "s3",
    "secretsmanager",
    "sns",
    "sqs",
    "sts",
}
# The distributions of the providers layer; what a new version of an SDK needs besides lands in the other, and works.
PROVIDERS = {
    "anthropic",
    "anyio",
    "docstring-parser",
    "httpx2",
    "idna",
    "jiter",
    "openai",
    "opentelemetry-api",
    "sniffio",
}
PARTS = ("dependencies", "providers")
# Of an installed package's description only this is read at run time (importlib.metadata), or owed (licences).
METADATA_KEPT = {"METADATA", "entry_points.txt"}
SOURCE_ONLY_SUFFIXES = {".pyi", ".pyx", ".pxd", ".c", ".h"}


def find_python() -> str | None:
    """A Python of the target's version: its byte code is the only one that the target reads."""
    check = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{PYTHON_VERSION}')"
    for candidate in (
        os.environ.get("BACKBURNER_PYTHON"),
        sys.executable,
        f"python{PYTHON_VERSION}",
        "python3",
    ):
        path = shutil.which(candidate) if candidate else None
        if path and subprocess.run([path, "-c", check], capture_output=True, check=False).returncode == 0:
            return path
    return None


def find_uv(clone: Path) -> str | None:
    """uv, if there is one: the caller's, the clone's, or one on the path."""
    for candidate in (os.environ.get("UV"), str(clone / ".local" / "tools" / "bin" / "uv"), "uv"):
        path = shutil.which(candidate) if candidate else None
        if path:
            return path
    return None


def install(target: Path, architecture: str, uv: str | None, cache: Path) -> None:
    """Unpack the locked wheels for the target; any Python can do this for any other."""
    common = ["--target", str(target), "--only-binary", ":all:", "--require-hashes", "--no-deps", "--quiet"]
    if uv:
        command = [uv, "pip", "install", *common, "--python", sys.executable, "--link-mode", "copy"]
        if architecture != HOST:
            command += ["--python-version", PYTHON_VERSION]
            command += ["--python-platform", f"{MACHINES[architecture]}-manylinux_2_34"]
    else:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            *common,
            "--no-compile",
            "--disable-pip-version-check",
        ]
        if architecture != HOST:
            command += ["--implementation", "cp", "--python-version", PYTHON_VERSION]
            platforms = [f"{tag}_{MACHINES[architecture]}" for tag in GLIBC_TAGS]
            command += [word for platform in platforms for word in ("--platform", platform)]
    # What is downloaded stays beside the finished layers, not in the user's home.
    environment = {**os.environ, "UV_CACHE_DIR": str(cache / "uv"), "PIP_CACHE_DIR": str(cache / "pip")}
    subprocess.run([*command, "--requirement", str(LOCK)], check=True, stdin=subprocess.DEVNULL, env=environment)


def keep_part(target: Path, part: str) -> None:
    """Remove the distributions that belong to the other layer, by their own lists of files (PEP 376)."""
    for info in list(target.glob("*.dist-info")):
        distribution = info.name.partition("-")[0].lower().replace("_", "-")
        if (distribution in PROVIDERS) == (part == "providers"):
            continue
        for line in (info / "RECORD").read_text().splitlines():
            (target / line.split(",")[0].strip('"')).unlink(missing_ok=True)
    for folder in sorted((path for path in target.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def trim(target: Path) -> None:
    """Remove what no function reads: it costs download and unpacking at each cold start."""
    shutil.rmtree(target / "bin", ignore_errors=True)
    (target / ".lock").unlink(missing_ok=True)
    for data in (target / "botocore" / "data", target / "boto3" / "data"):
        for folder in data.iterdir() if data.is_dir() else ():
            if folder.is_dir() and folder.name not in SERVICES:
                shutil.rmtree(folder)
    for info in target.glob("*.dist-info"):
        for file in info.iterdir():
            if file.is_file() and file.name not in METADATA_KEPT and not file.name.upper().startswith("LICEN"):
                file.unlink()
    for path in sorted(target.rglob("*")):
        if path.is_dir() and path.name in {"tests", "__pycache__"}:
            shutil.rmtree(path)
        elif path.is_file() and path.suffix in SOURCE_ONLY_SUFFIXES:
            path.unlink()


def compile_all(target: Path, python: str) -> None:
    """Byte code that is used without looking at file times, under the names the files have on Lambda."""
    command = [python, "-m", "compileall", "-q", "-f", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*command, "-s", str(target), "-p", "/opt/python", str(target)], check=True)


def mebibytes(folder: Path) -> float:
    """Size of the files of a folder in MiB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Build a layer of third-party packages.")
    parser.add_argument("--part", choices=PARTS, required=True, help="which of the two")
    parser.add_argument("--clone", type=Path, required=True, help="root of the repository")
    parser.add_argument("--output", type=Path, required=True, help="the layer's python folder")
    arguments = parser.parse_args()
    architecture = os.environ.get("BACKBURNER_ARCHITECTURE") or "arm64"
    if architecture not in {*MACHINES, HOST}:
        print(f"BACKBURNER_ARCHITECTURE is {architecture!r}; it must be arm64, x86_64 or host", file=sys.stderr)
        return 2

    python = find_python()
    if python is None:
        print(
            f"{arguments.part} layer: no Python {PYTHON_VERSION} found, so without byte code: functions will"
            " start about a second slower. Run `make setup`, or name one in BACKBURNER_PYTHON.",
            file=sys.stderr,
        )
    key = hashlib.sha256(LOCK.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
    name = f"{arguments.part}-{architecture}-{key}-{'compiled' if python else 'source'}"
    default_cache = arguments.clone / ".local" / "cache" / "layers"
    cache = Path(os.environ.get("BACKBURNER_CACHE") or default_cache)
    cache.mkdir(parents=True, exist_ok=True)
    finished = cache / name
    if not finished.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            layer = Path(scratch) / "layer"
            install(layer, architecture, find_uv(arguments.clone), cache)
            keep_part(layer, arguments.part)
            trim(layer)
            if python:
                compile_all(layer, python)
            try:
                layer.rename(finished)
            except OSError:
                if not finished.is_dir():  # else: a build beside this one was first
                    raise
    shutil.copytree(finished, arguments.output, dirs_exist_ok=True)
    print(f"{arguments.part} layer: {architecture}, {mebibytes(arguments.output):.0f} MiB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
