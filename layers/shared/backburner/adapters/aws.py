"""What all adapters share: clients with short timeouts, and AWS errors in the core's words.

botocore's clients, which are what boto3 hands out too: its own additions take 20 ms to import, and are not needed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from backburner.errors import PortUnavailable

CONNECTIONS_MAX = 25
"""More than the jobs of one batch, so that no thread waits for a connection."""


def client(
    service: str, *, connect_seconds: float, read_seconds: float, tries: int, endpoint_url: str | None = None
) -> Any:
    """A client whose calls end within about `tries` x (connect + read) seconds; the defaults allow minutes.

    endpoint_url: where the service is, if each deployment has an address of its own.
    """
    config = Config(
        connect_timeout=connect_seconds,
        read_timeout=read_seconds,
        retries={"total_max_attempts": tries, "mode": "standard"},
        max_pool_connections=CONNECTIONS_MAX,
        parameter_validation=False,  # a tenth of a call's CPU time, for faults that AWS refuses as well
    )
    return _session().create_client(service, config=config, endpoint_url=endpoint_url)


@cache
def _session() -> Any:
    """One for all clients: it knows credentials, and has read what describes AWS."""
    return botocore.session.get_session()


@contextmanager
def translated() -> Iterator[None]:
    """Turn what botocore raises into PortUnavailable, which says nothing about whether the call had its effect."""
    try:
        yield
    except ClientError as error:
        raise PortUnavailable(error.response.get("Error", {}).get("Code", "unknown")) from error
    except BotoCoreError as error:
        raise PortUnavailable(type(error).__name__) from error
