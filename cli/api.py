"""The deployed HTTP API, as a client of it sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import typer
import urllib3
from urllib3.util import Retry, Timeout

from backburner.models import JobStatus
from cli.deployment import Deployment
from cli.screen import Refused

ApiKey = Annotated[
    str | None,
    typer.Option(
        "--key", envvar="BACKBURNER_API_KEY", help="A client's API key; the local stack's is known.", show_default=False
    ),
]

CONNECTIONS_MAX = 64
PATIENT = Retry(
    total=8,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=None,  # a POST too: with an idempotency key it may be sent again
    backoff_factor=0.5,
    backoff_jitter=0.5,
    backoff_max=30,
    retry_after_max=60,  # a budget that is used up until midnight is not waited for
    raise_on_status=False,
)
"""A burst of refusals and a deployment under way are got over; so is a minute's limit of requests."""
HASTY = Retry(total=0, raise_on_status=False)
"""Each request once: what is measured is the reply to it."""


@dataclass(frozen=True)
class Reply:
    """A reply. body: {} where it was no JSON object."""

    status: int
    body: Mapping[str, Any]

    @property
    def problem(self) -> str:
        """What is wrong, in the server's words."""
        return f"{self.status} {self.body.get('code', '')}: {self.body.get('detail', '')}".rstrip(": ")


class Api:
    """The API with a client's key. Thread-safe. Raises urllib3's HTTPError where there is no reply."""

    def __init__(self, url: str, key: str, retries: Retry = PATIENT) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        parts = urlsplit(url)
        proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
        given: dict[str, Any] = {
            "retries": retries,
            "timeout": Timeout(connect=5, read=30),
            "maxsize": CONNECTIONS_MAX,
            "block": True,
        }
        self._pool = urllib3.ProxyManager(proxy, **given) if proxy else urllib3.PoolManager(**given)

    @classmethod
    def of(cls, at: Deployment, key: str | None, retries: Retry = PATIENT) -> Api:
        """A deployment's. Raises Refused if no key is known."""
        known = key or (at.local or {}).get("api_key")
        if not known:
            raise Refused("Give a client's API key as BACKBURNER_API_KEY; `backburner clients create` makes one.")
        return cls(at.outputs["ApiUrl"], known, retries)

    def submit(self, request: Mapping[str, Any], idempotency_key: str | None = None) -> Reply:
        """POST /jobs."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self._send("POST", "/jobs", json.dumps(request).encode(), headers)

    def job(self, job_id: str) -> Reply:
        """GET /jobs/{id}."""
        return self._send("GET", f"/jobs/{job_id}")

    def _send(self, verb: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Reply:
        reply = self._pool.request(verb, self._url + path, body=body, headers={**self._headers, **(headers or {})})
        try:
            found = json.loads(reply.data)
        except ValueError:
            found = None
        return Reply(reply.status, found if isinstance(found, dict) else {})


def has_ended(job: Mapping[str, Any]) -> bool:
    """Whether a job as the API shows it has ended."""
    return JobStatus(job["status"]).is_final
