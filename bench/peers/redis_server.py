"""A Redis on loopback that keeps nothing: the one on the path, or Debian's, unpacked into `.local/redis`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from local.install import HOME
from local.processes import answers, free_port

FOLDER = HOME / "redis"
PACKAGES = ("redis-tools", "redis-server", "libjemalloc2", "liblzf1")
"""Redis, and of what it links to that which a small system lacks."""


def program() -> tuple[str, dict[str, str]]:
    """The server and the environment it needs."""
    found = shutil.which("redis-server")
    if found:
        return found, dict(os.environ)
    server = FOLDER / "usr" / "bin" / "redis-server"
    if not server.exists():
        _fetch()
    libraries = ":".join(str(folder) for folder in sorted((FOLDER / "usr" / "lib").glob("*-linux-gnu*")))
    return str(server), {**os.environ, "LD_LIBRARY_PATH": libraries}


def _fetch() -> None:
    """Unpack Debian's packages; nothing is installed."""
    if not shutil.which("apt-get"):
        raise SystemExit("There is no redis-server on the path, and no apt-get to fetch one with. Install Redis.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    fetched = subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=FOLDER, check=False, capture_output=True)
    if fetched.returncode != 0:
        raise SystemExit("Redis could not be fetched; `apt-get update` may help. " + fetched.stderr.decode())
    for package in sorted(FOLDER.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(FOLDER)], check=True)


@contextmanager
def redis_server(scratch: Path) -> Iterator[str]:
    """Start one, and give its URL, without a database."""
    server, environment = program()
    port = free_port(())
    command = [server, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    command += ["--dir", str(scratch), "--maxmemory-policy", "noeviction", "--loglevel", "warning"]
    with (scratch / "redis.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 10
        while not answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"Redis did not start:\n{(scratch / 'redis.log').read_text()}")
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
