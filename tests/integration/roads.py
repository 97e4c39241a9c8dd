"""The three roads to an answer, each with the official SDK on it: what the contract suite runs over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from backburner.models import Message, ModelInfo, Question
from backburner.ports import Provider
from backburner.providers.account import Account
from backburner.providers.anthropic import Anthropic
from backburner.providers.openai import OpenAI
from tests.fakes.provider import anthropic_error, openai_error

KEY = "sk-test-0123456789abcdef"


OPENED: list[Any] = []
"""Providers whose connections are to be closed when their test is over."""


def close_all() -> None:
    """Close the connections of every provider opened since."""
    while OPENED:
        OPENED.pop()._client.close()


@dataclass
class Keyring:
    """The secret: `keys` are handed out one after the other, each refresh bringing the next."""

    keys: list[str] = field(default_factory=lambda: [KEY])
    refreshes: list[str] = field(default_factory=list)

    def key(self) -> str:
        return self.keys[0]

    def refresh(self, refused: str) -> bool:
        self.refreshes.append(refused)
        if len(self.keys) > 1:
            self.keys.pop(0)
        return self.keys[0] != refused


@dataclass(frozen=True)
class Road:
    """One API of one provider. `path` is what the server sees."""

    name: str
    path: str
    provider: str
    api: str

    @property
    def is_anthropic(self) -> bool:
        return self.provider == "anthropic"

    def open(self, base_url: str, keyring: Keyring | None = None) -> Provider:
        """The provider as bootstrap would make it."""
        keyring = keyring or Keyring()
        account = Account(self.provider, keyring.key, keyring.refresh)
        made = Anthropic(account, base_url) if self.is_anthropic else OpenAI(account, f"{base_url}/v1")
        OPENED.append(made)
        return made

    def error(self, message: str, kind: str, code: str | None = None) -> dict[str, Any]:
        """An error body in this provider's shape."""
        return anthropic_error(message, kind, code) if self.is_anthropic else openai_error(message, kind, code)

    def sse(self, *events: dict[str, Any] | str) -> bytes:
        """The bytes of a stream of these events; a text stands for itself."""
        lines: list[str] = []
        for event in events:
            name = event.get("type") if isinstance(event, dict) else None
            prefix = f"event: {name}\n" if name and self.api != "chat" else ""
            lines.append(f"{prefix}data: {event if isinstance(event, str) else json.dumps(event)}\n\n")
        return "".join(lines).encode()

    def stream(self, texts: Iterable[str]) -> list[dict[str, Any]]:
        """The events of a whole answer, as small as the provider's may be."""
        if self.api == "chat":
            parts = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None}
            return [*parts, last, {"choices": [], "usage": usage}]
        if self.is_anthropic:
            deltas = [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
                      for text in texts]  # fmt: skip
            message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [],
                       "usage": {"input_tokens": 3, "output_tokens": 1}}  # fmt: skip
            return [{"type": "message_start", "message": message}, *deltas,
                    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
                    {"type": "message_stop"}]  # fmt: skip
        texts = list(texts)
        deltas = [{"type": "response.output_text.delta", "delta": text} for text in texts]
        content = [{"type": "output_text", "text": "".join(texts), "annotations": []}]
        response = {"id": "resp_1", "status": "completed", "error": None, "incomplete_details": None,
                    "output": [{"type": "message", "role": "assistant", "content": content}],
                    "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5,
                              "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}}  # fmt: skip
        return [*deltas, {"type": "response.completed", "response": response}]


RESPONSES = Road("openai-responses", "/v1/responses", "openai", "responses")
CHAT = Road("openai-chat", "/v1/chat/completions", "openai", "chat")
MESSAGES = Road("anthropic-messages", "/v1/messages", "anthropic", "responses")
ROADS = (RESPONSES, CHAT, MESSAGES)


def question(road: Road, prompt: str = "Name a river.", **changes: Any) -> Question:
    """A small question for a model of that road."""
    model = ModelInfo(
        name="m-1",
        provider=road.provider,
        context_tokens=200_000,
        output_tokens_max=4_096,
        input_price=1_000_000,
        cached_price=100_000,
        cache_write_price=1_250_000,
        output_price=5_000_000,
        api=road.api,
    )
    asked: dict[str, Any] = {"system_prompt": None, "max_tokens": 100, **changes}
    return Question(model=model, messages=asked.pop("messages", (Message(role="user", content=prompt),)), **asked)


def never() -> bool:
    """A job that nobody withdraws."""
    return False


def ask(provider: Provider, asked: Question, seconds: float = 5.0, abandoned: Callable[[], bool] = never) -> Any:
    """One call with a time limit that a test can wait for."""
    return provider.ask(asked, timeout_seconds=seconds, abandoned=abandoned)
