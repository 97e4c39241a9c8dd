"""The webhook channel: a signed POST, by Standard Webhooks (https://www.standardwebhooks.com).

    webhook-id          {job_id}-{claims}-{status}: the same for every try of one end, another for a redriven job's next
    webhook-timestamp   Unix seconds, of this try
    webhook-signature   one `v1,…` for each valid secret, with spaces between
    X-Signature-SHA256  hex HMAC-SHA256 of the body alone, for plain receivers; by the newest secret

The key of both is what a secret's base64 stands for.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from standardwebhooks import Webhook as Signer

from backburner import responses
from backburner.addresses import Receivers, endpoint_of
from backburner.channels.outbound import Outbound, Reply, Unreached
from backburner.delivery import WAITS_SECONDS
from backburner.documents import job_document, json_text, stored_result
from backburner.errors import ForbiddenAddress, SealBroken, Untold
from backburner.models import Job, Webhook, webhook_key
from backburner.ports import Clock, PayloadStore, Seals, WebhookSecrets

BODY_VERSION = 1
BODY_BYTES_MAX = 256_000
"""Many receivers refuse more. A larger result comes as `result_url`, as in `GET /jobs/{id}`."""
USER_AGENT = "Backburner/1 (+https://www.standardwebhooks.com)"
AGAIN = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
"""Of the 4xx, what may be otherwise next time."""


class WebhookChannel:
    """Webhooks, as ports.Channel. `outbound` is made when the first one is sent."""

    waits_seconds: Sequence[float] = WAITS_SECONDS

    def __init__(
        self,
        *,
        receivers: Receivers,
        outbound: Outbound,
        payloads: PayloadStore,
        seals: Seals,
        secrets: WebhookSecrets,
        clock: Clock,
    ) -> None:
        self._receivers = receivers
        self._outbound = outbound
        self._payloads = payloads
        self._seals = seals
        self._secrets = secrets
        self._clock = clock

    def tell(self, job: Job) -> None:
        """Send the job's webhook once. Raises Untold."""
        if job.webhook is None:
            raise Untold("no_webhook")
        secrets = self._valid_secrets(job, job.webhook)
        body = body_of(job, self._payloads)
        headers = headers_of(job, body, secrets, self._clock.now() // 1000)
        try:
            reply = self._outbound.post(endpoint_of(job.webhook.url, self._receivers), headers, body)
        except ForbiddenAddress as error:
            raise Untold("forbidden_address") from error
        except Unreached as error:
            raise Untold(error.reason, again=True) from error
        self._judge(reply)

    def _valid_secrets(self, job: Job, webhook: Webhook) -> Sequence[str]:
        """The secrets that count now, the newest first: the job's own, or its client's."""
        own = webhook.sealed_secret
        sealed = (own,) if own is not None else self._secrets.of(job.client_id, self._clock.now())
        if not sealed:
            raise Untold("no_secret", again=True)  # its client had one when the job was accepted
        try:
            return [self._seals.open(each) for each in sealed]
        except SealBroken as error:
            raise Untold("secret_unreadable", again=True) from error

    def _judge(self, reply: Reply) -> None:
        if 200 <= reply.status < 300:
            return
        again = reply.status in AGAIN or reply.status >= 500
        raise Untold(f"http_{reply.status}", again=again, retry_after_seconds=self._asked(reply.retry_after))

    def _asked(self, retry_after: str | None) -> float | None:
        """Retry-After in seconds, given as such or as a date (RFC 9110); None if it says nothing."""
        text = (retry_after or "").strip()
        if text.isascii() and text.isdigit() and len(text) <= 9:
            return float(text)
        try:
            return max(0.0, parsedate_to_datetime(text).timestamp() - self._clock.now() / 1000)
        except (ValueError, OverflowError):
            return None


def body_of(job: Job, payloads: PayloadStore) -> bytes:
    """The event: its type, when it happened, and the job as `GET /jobs/{id}` shows it, without `deliveries`.

    Or OpenAI's event, for those who asked for that.
    """
    if job.webhook is not None and job.webhook.style == "openai":
        return json_text(responses.event(job, webhook_id_of(job), stored_result(job, payloads))).encode()
    happened = datetime.fromtimestamp((job.finished_at or 0) / 1000, UTC)
    envelope = {
        "type": f"job.{job.status}",
        "version": BODY_VERSION,
        "timestamp": happened.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    data = job_document(job, payloads, fits=lambda text: len(text.encode()) <= BODY_BYTES_MAX, without=("deliveries",))
    return f'{json_text(envelope)[:-1]},"data":{data}}}'.encode()


def webhook_id_of(job: Job) -> str:
    """The name of a job's end."""
    return f"{job.job_id}-{job.claims}-{job.status}"


def headers_of(job: Job, body: bytes, secrets: Sequence[str], timestamp: int) -> list[tuple[str, str]]:
    """The headers of one try. `secrets` as their owners know them, the newest first; `timestamp` in Unix seconds."""
    webhook_id = webhook_id_of(job)
    moment = datetime.fromtimestamp(timestamp, UTC)
    signatures = [Signer(webhook_key(secret)).sign(webhook_id, moment, body.decode()) for secret in secrets]
    return [
        ("Content-Type", "application/json; charset=utf-8"),
        ("User-Agent", USER_AGENT),
        ("webhook-id", webhook_id),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", " ".join(signatures)),
        ("X-Signature-SHA256", hmac.new(webhook_key(secrets[0]), body, hashlib.sha256).hexdigest()),
    ]
