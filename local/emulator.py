"""The local AWS: ministack, in its own environment, with nothing of the caller's around it, and with IAM
enforced.
"""

import os

import boto3
import httpx2
from botocore.config import Config

from local.processes import Running, find, free_port, start
from local.state import REGION, VENVS, State

NAME = "emulator"
PORTS = range(4566, 4576)
START_SECONDS_MAX = 60

# The emulator takes this key for the account's root user; functions get sessions of their roles, which it
# enforces.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}

# A function must reach a real provider from behind a company's proxy or certificate; nothing else of the
# caller's environment may reach it, or a test could pass here that fails on AWS.
PASSED_ON = ("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTPS_PROXY", "https_proxy")


def environment(state: State, port: int) -> dict[str, str]:
    """All that the emulator, and with it each function, finds in its environment."""
    scratch = str(state.scratch)
    return {
        **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "PYTHONUNBUFFERED": "1",
        "AUTH": "true",  # the functions' IAM policies are enforced
        "BIND_HOST": "127.0.0.1",
        "MINISTACK_HOST": "127.0.0.1",  # in queue addresses: "localhost" may resolve to ::1 first
        "MINISTACK_REGION": REGION,
        "GATEWAY_PORT": str(port),
        "LAMBDA_WARM_TTL_SECONDS": "3600",  # an idle function's process; a new one takes seconds to unpack its layers
        # Beyond it calls are throttled, as at an account's limit: a burst of new processes, each of which unpacks
        # its layers, would keep a small machine busy for minutes.
        "LAMBDA_ACCOUNT_CONCURRENCY": "24",
        "IOT_MTLS_ENABLED": "0",  # opens a second port otherwise
        "S3_DATA_DIR": f"{scratch}/s3",
        "STATE_DIR": f"{scratch}/state",
    }


def endpoint_url(running: Running) -> str:
    """Where it answers."""
    return f"http://127.0.0.1:{running.port}"


def ensure(state: State) -> Running:
    """The running emulator, started if need be, on its usual port if that is free."""
    running = find(state, NAME)
    if running is not None and is_healthy(running.port):
        return running
    port = free_port(PORTS if state.is_default else ())
    return start(
        state,
        NAME,
        [str(VENVS / "emulator" / "bin" / "python"), "-m", "ministack"],
        env=environment(state, port),
        port=port,
        is_ready=lambda: is_healthy(port),
        seconds_max=START_SECONDS_MAX,
    )


def is_healthy(port: int) -> bool:
    """Whether it answers to its health check."""
    try:
        answer = httpx2.get(f"http://127.0.0.1:{port}/_ministack/health", timeout=2, trust_env=False)
    except httpx2.HTTPError:
        return False
    return answer.status_code == 200


def session() -> boto3.Session:
    """AWS calls as the emulator's root user, whatever the caller's own configuration says."""
    return boto3.Session(
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region_name=REGION,
    )


CLIENT_CONFIG = Config(proxies={}, retries={"mode": "standard", "total_max_attempts": 2}, connect_timeout=5)
