"""Calls to Slack's Web API by the official SDK: one at a time, its failures in our words."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any, Final

from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError, SlackClientError
from slack_sdk.webhook import WebhookClient

from backburner.errors import Untold

SLACK: Final = "https://slack.com/api/"
PASSING: Final = frozenset({
    "accesslimited", "fatal_error", "internal_error", "message_limit_exceeded", "rate_limited", "ratelimited",
    "request_timeout", "service_unavailable", "team_added_to_org", "timeout",
})  # fmt: skip
"""Errors that another try may not meet, although they may come in a 200."""
TOKEN_REFUSED: Final = frozenset({"account_inactive", "invalid_auth", "not_authed", "token_expired", "token_revoked"})
_WORD = re.compile(r"[a-z][a-z0-9_]{2,60}")


class SlackApi:
    """The Web API as the app. Thread-safe. Every failure is an Untold whose reason is Slack's own word for it.

    token: the bot's; renewed: reads it again, and says whether it differs from the one that was refused.
    """

    def __init__(
        self,
        token: Callable[[], str],
        renewed: Callable[[str], bool],
        *,
        base_url: str = "",
        timeout_seconds: int = 10,
    ) -> None:
        self._token, self._renewed = token, renewed
        self._base_url, self._timeout = base_url or SLACK, timeout_seconds
        self._lock = threading.Lock()
        self._web: WebClient | None = None

    def call(self, method: str, **arguments: Any) -> Mapping[str, Any]:
        """Call a method, such as `chat.postMessage`; only once, but for a token that was changed. Raises Untold."""
        token = self._token()
        if not token:
            raise Untold("slack_not_configured")
        try:
            return self._once(token, method, arguments)
        except Untold as error:
            if error.message not in TOKEN_REFUSED or not self._renewed(token):
                raise
        return self._once(self._token(), method, arguments)

    def _once(self, token: str, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        do = getattr(self._client(token), method.replace(".", "_"))
        given = {name: value for name, value in arguments.items() if value is not None}
        try:
            response = do(**given)
        except SlackApiError as error:
            raise _translated(error.response) from error
        except (SlackClientError, HTTPException, OSError, ValueError) as error:
            raise Untold("timeout" if isinstance(error, TimeoutError) else "connection", again=True) from error
        return dict(response.data) if isinstance(response.data, dict) else {}

    def _client(self, token: str) -> WebClient:
        with self._lock:
            if self._web is None or self._web.token != token:
                # No handlers: the SDK's own would post a message again whose reply was lost.
                self._web = WebClient(token, base_url=self._base_url, timeout=self._timeout, retry_handlers=[])
            return self._web

    def post_to_hook(self, url: str, **message: Any) -> None:
        """Post to a `response_url`. Raises Untold."""
        hook = WebhookClient(url, timeout=self._timeout, retry_handlers=[])
        try:
            response = hook.send(**message)
        except (SlackClientError, HTTPException, OSError, ValueError) as error:
            raise Untold("connection", again=True) from error
        if response.status_code != 200:
            reason = response.body if _WORD.fullmatch(response.body or "") else f"http_{response.status_code}"
            passing = response.status_code == 429 or response.status_code >= 500
            raise Untold(reason, again=passing, retry_after_seconds=_retry_after(response.headers))


def _translated(response: Any) -> Untold:
    """The failure in a response: Slack's word for it, and whether another try makes sense."""
    status = int(response.status_code)
    word = response.data.get("error") if isinstance(response.data, dict) else None
    reason = word if isinstance(word, str) and _WORD.fullmatch(word) else f"http_{status}"
    again = status == 429 or status >= 500 or reason in PASSING
    return Untold(reason, again=again, retry_after_seconds=_retry_after(response.headers))


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    value = next((str(value) for name, value in headers.items() if name.lower() == "retry-after"), "")
    return float(value) if re.fullmatch(r"[0-9]{1,6}", value) else None
