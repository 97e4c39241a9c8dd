"""Slack's markup, both ways: what people write into plain text, what models write into messages that Slack takes.

Slack sends and takes `&`, `<` and `>` as entities; `<…>` is a mention, a channel, a broadcast or a link.
Source: https://docs.slack.dev/messaging/formatting-message-text
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate
from typing import Final
from urllib.parse import urlsplit

MESSAGE_CHARACTERS_MAX: Final = 12_000
"""Of the markdown of one message, as Slack counts it (its limit for a markdown block and for `markdown_text`)."""
FENCE_CHARACTERS_MAX: Final = 16
"""A longer run of backticks or tildes is no fence to us: repeating it at each split would eat up the message."""
INFO_CHARACTERS_MAX: Final = 24
"""A fence's language is repeated at a split up to this length."""

STOP: Final = "backburner_stop"
RETRY: Final = "backburner_retry"
"""`action_id` of the buttons; their `value` is the job's id."""


def is_slacks(url: str, api_base_url: str) -> bool:
    """Whether a `response_url` leads to Slack, or to what stands for it (`SlackApiBaseUrl`)."""
    stand_in = urlsplit(api_base_url)
    own = f"{stand_in.scheme}://{stand_in.netloc}/" if stand_in.netloc else "https://hooks.slack.com/"
    return url.startswith(own)


# ── What people write ────────────────────────────────────────────────────────────────────────────────────────────────

_INBOUND = re.compile(r"<([^<>\n]*)>|&(amp|lt|gt);")
_ENTITIES: Final = {"amp": "&", "lt": "<", "gt": ">"}
_BROADCASTS: Final = frozenset({"here", "channel", "everyone"})
_ID = re.compile(r"(?<![\w/])(@(?=[UW])|#(?=[CG]))([A-Z][A-Z0-9]{6,20})\b")


def plain_text(text: str, own: AbstractSet[str] = frozenset()) -> str:
    """Slack's text as people read it: mentions of `own` user ids gone, tokens readable, entities decoded once."""
    decoded = _INBOUND.sub(lambda match: _decoded(match, own), text)
    return decoded.strip() if _says_something(decoded) else ""


def _decoded(match: re.Match[str], own: AbstractSet[str] = frozenset()) -> str:
    token, entity = match.groups()
    return _ENTITIES[entity] if token is None else _token(token, own)


def _token(token: str, own: AbstractSet[str]) -> str:
    target, label = (_INBOUND.sub(_decoded, half).strip() for half in token.partition("|")[::2])
    match target[:1]:
        case "@" if target[1:] in own:
            return ""
        case "@" | "#":
            return target[0] + (label.lstrip("@#") or target[1:])
        case "!":
            name = target[1:].partition("^")[0]
            return label if label and name not in _BROADCASTS else f"@{name}"
        case _:
            address = re.sub(r"^(mailto|tel):", "", target)
            shown = (address, address.rstrip("/"), re.sub(r"^https?://|/$", "", address))
            return address if label in ("", *shown) else f"[{label}]({address})"


def _says_something(text: str) -> bool:
    """Whether there is anything to read: white space, control and format characters alone are nothing."""
    return any(unicodedata.category(character)[0] not in "ZC" for character in text)


def ids_in(text: str) -> list[str]:
    """The ids of users and channels that `plain_text` had no name for, each once, in order."""
    return list(dict.fromkeys(match[2] for match in _ID.finditer(text)))


def with_names(text: str, names: Mapping[str, str]) -> str:
    """The text with names for the ids that `plain_text` had none for."""
    return _ID.sub(lambda match: match[1] + names[match[2]] if match[2] in names else match[0], text)


# ── What models write ────────────────────────────────────────────────────────────────────────────────────────────────

_READ_AS_ENTITY = re.compile(r"&(?=#?\w{1,31};)")
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})([^\n]*)")


def escaped(text: str) -> str:
    """Markdown that Slack shows as it stands: no mention, broadcast or hidden link in it is alive.

    Slack reads its own `<…>` tokens inside markdown too; without `<` there are none. An ampersand is escaped only where
    it would be read as an entity, since Slack does not decode the addresses of links; `>` stays, for quotations.
    """
    return _READ_AS_ENTITY.sub("&amp;", text).replace("<", "&lt;")


def escaped_plainly(text: str) -> str:
    """Text for a place that is no markdown (mrkdwn, notifications), by Slack's own rule."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def size(text: str) -> int:
    """Characters as Slack may count them: UTF-16 units, never fewer than code points."""
    return len(text) + sum(character > "\uffff" for character in text)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a long text. The `raw` of all parts, joined, is the text; `sent` is what goes into a message."""

    raw: str
    opening: str = ""
    closing: str = ""

    @property
    def sent(self) -> str:
        """The message: escaped, with the code fence it was cut out of opened and closed again."""
        return escaped(f"{self.opening}{self.raw}{self.closing}")


@dataclass(frozen=True, slots=True)
class Fence:
    """A code block that is open: the mark that ends it, and the line that opens it again."""

    mark: str
    opening: str

    def closing(self, raw: str) -> str:
        """What ends it after this text."""
        return self.mark if raw.endswith("\n") else f"\n{self.mark}"


def split(text: str, limit: int = MESSAGE_CHARACTERS_MAX) -> list[Part]:
    """Cut a text into messages of at most `limit` characters after escaping.

    It is cut between paragraphs where that leaves no message less than half full, else between lines, else at a space,
    else anywhere but inside a character with its marks.
    """
    costs = [0, *accumulate(_costs(text))]
    parts: list[Part] = []
    fence: Fence | None = None
    start = 0
    while start < len(text):
        opening = fence.opening if fence else ""
        room = limit - size(escaped(opening)) - FENCE_CHARACTERS_MAX - 1
        end = max(start + 1, bisect_right(costs, costs[start] + room) - 1)
        if end < len(text):
            end = _boundary(text, start, end)
        raw = text[start:end]
        fence = _fence_after(text, start, end, fence)
        parts.append(Part(raw, opening, fence.closing(raw) if fence else ""))
        start = end
    return parts


def open_fence(text: str) -> Fence | None:
    """The code block that is open at the end of a message."""
    return _fence_after(text, 0, len(text), None)


def fitting(text: str, room: int) -> int:
    """How many characters of a text fit into so much room once they are escaped."""
    costs = [0, *accumulate(_costs(text))]
    return bisect_right(costs, room) - 1


def _costs(text: str) -> list[int]:
    """What each character adds to the size once it is escaped."""
    costs = [4 if character == "<" else 2 if character > "\uffff" else 1 for character in text]
    for match in _READ_AS_ENTITY.finditer(text):
        costs[match.start()] = 5
    return costs


def _boundary(text: str, start: int, end: int) -> int:
    """The best place to cut at or before `end`, after `start`."""
    half = start + (end - start) // 2
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, half, end)
        if found >= 0 and not (mark == " " and _in_fence_line(text, found)):
            return found + len(mark)
    cut = end
    while cut > half and (unicodedata.combining(text[cut]) or text[cut] in _JOINED or text[cut - 1] == "\u200d"):
        cut -= 1
    return cut if cut > half else end


_JOINED: Final = frozenset({"\u200d", "\ufe0e", "\ufe0f", "\u20e3", *map(chr, range(0x1F3FB, 0x1F400))})
"""Characters that change the one before: joiners, variation selectors, key caps, skin tones."""


def _in_fence_line(text: str, at: int) -> bool:
    return _FENCE.match(text, text.rfind("\n", 0, at) + 1) is not None


def _fence_after(text: str, start: int, end: int, fence: Fence | None) -> Fence | None:
    """The code fence that is open at `end`, if `fence` was open at `start`."""
    at = start  # a line begins here for whoever reads this message alone
    while at < end:
        line_end = text.find("\n", at, end)
        line_end = end if line_end < 0 else line_end
        found = _FENCE.match(text, at, line_end)
        if found and len(found[1]) <= FENCE_CHARACTERS_MAX:
            mark, info = found[1], found[2].strip()
            if fence is None:
                if not (mark[0] == "`" and "`" in info):  # inline code otherwise
                    fence = Fence(mark, f"{mark}{info[:INFO_CHARACTERS_MAX]}\n")
            elif not info and mark.startswith(fence.mark):
                fence = None
        at = line_end + 1
    return fence
