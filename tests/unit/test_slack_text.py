"""Slack's markup: what people write is read once and in full; what models write arrives whole and harmless."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from backburner.slack_text import escaped, escaped_plainly, ids_in, plain_text, size, split, with_names

BOT = frozenset({"U0000BOT1"})


def shown(sent: str) -> str:
    """What a reader sees of what was sent: Slack decodes its three entities, once."""
    return re.sub("&(amp|lt|gt);", lambda match: {"amp": "&", "lt": "<", "gt": ">"}[match[1]], sent)


# ── What people write ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("<@U0000BOT1> list three rivers", "list three rivers"),
        ("Hey <@U0000BOT1|helper>, list three rivers", "Hey , list three rivers"),
        ("<@U0000BOT1> ask <@U0000USR2> and <@U0000USR3|maria>", "ask @U0000USR2 and @maria"),
        ("see <#C0000CHN1|general> and <#C0000CHN2> and <#C0000CHN3|>", "see #general and #C0000CHN2 and #C0000CHN3"),
        ("<!here> <!channel|@channel> <!everyone|everyone>", "@here @channel @everyone"),
        ("<!subteam^S0000GRP1|@night-shift> <!subteam^S0000GRP2>", "@night-shift @subteam"),
        ("<!date^1392734382^Posted {date_num}|Posted 2014-02-18>", "Posted 2014-02-18"),
        ("<https://example.test/?a=1&amp;b=2>", "https://example.test/?a=1&b=2"),
        ("<https://example.test/|example.test>", "https://example.test/"),
        ("<https://example.test/a|the &lt;docs&gt;>", "[the <docs>](https://example.test/a)"),
        ("<mailto:a@example.test|a@example.test>", "a@example.test"),
        ("<mailto:a@example.test|write to us>", "[write to us](a@example.test)"),
        ("if a &lt; b &amp;&amp; c &gt; d", "if a < b && c > d"),
        ("&amp;lt; is an entity", "&lt; is an entity"),
        ("&lt;@U0000BOT1&gt; is how to mention me", "<@U0000BOT1> is how to mention me"),
        ("two\n\n  lines", "two\n\n  lines"),
        ("a < b", "a < b"),
    ],
)
def test_slacks_markup_is_read_as_people_read_it(text: str, read: str) -> None:
    """Own mentions gone, names and links readable, entities decoded once."""
    assert plain_text(text, BOT) == read


@pytest.mark.parametrize(
    "text",
    ["", "<@U0000BOT1>", "  <@U0000BOT1>   ", "<@U0000BOT1>\u00a0\u200b", "<@U0000BOT1|helper>", "\u2060\ufeff\n"],
)
def test_a_message_that_says_nothing_is_empty(text: str) -> None:
    """White space and invisible characters are no prompt."""
    assert plain_text(text, BOT) == ""


def test_ids_without_a_name_are_found_and_named() -> None:
    """In text only: not in addresses, and no word that merely looks like one."""
    text = plain_text("<@U0000USR2> and <@U0000USR2> in <#C0000CHN2|>, not @CEO, not x.test/@U0000USR9")
    assert ids_in(text) == ["U0000USR2", "C0000CHN2"]
    named = with_names(text, {"U0000USR2": "Maria", "C0000CHN2": "general"})
    assert named == "@Maria and @Maria in #general, not @CEO, not x.test/@U0000USR9"


# ── What models write ────────────────────────────────────────────────────────────────────────────────────────────────

SLK_16 = [
    "Attention <!channel> and <!here>, ask <@U0000ADM1> or <!subteam^S0000GRP1>",
    "if a < b && c > d: print('&lt;')",
    "<https://evil.example.test|https://bank.example.test>",
    "**bold** and [link](https://example.test/?a=1&b=2)",
    "&lt;!here&gt; typed as entities",
]


@pytest.mark.parametrize("text", SLK_16)
@pytest.mark.parametrize("escape", [escaped, escaped_plainly])
def test_slk_16_no_mention_broadcast_or_hidden_link_of_a_model_is_alive(text: str, escape: object) -> None:
    """What is sent holds no token, and reads back as it was written: escaped once, not twice."""
    assert callable(escape)
    sent = escape(text)
    assert "<" not in sent
    assert shown(sent) == text


def test_markdown_stays_markdown() -> None:
    """The address of a link is sent as it is, since Slack does not decode it there; quotations stay quotations."""
    text = "> **bold** and [link](https://example.test/?a=1&b=2) & so on"
    assert escaped(text) == text


PIECES = st.one_of(
    st.sampled_from(
        [
            "```",
            "```python",
            "~~~",
            "~~~~",
            "`",
            "\n",
            "\n\n",
            "\n",
            " ",
            "<",
            "&",
            "&lt;",
            "&amp;",
            ";",
            "<!here>",
            ">",
        ]
    ),
    st.sampled_from(["e\u0301", "👩\u200d👩\u200d👧", "👍🏽", "🇩🇪", "word", "a longer word", "    ", "- ", "\t", "𝄞"]),
    st.text(max_size=6),
    st.integers(1, 80).map(lambda n: "x" * n),
    st.integers(1, 60).map(lambda n: "<" * n),
)
TEXTS = st.lists(PIECES, max_size=120).map("".join)


@given(TEXTS, st.integers(200, 600))
@example("x" * 1000, 200)
@example("<" * 1000, 200)
@example("```\n" + "<" * 1000 + "\n```\n", 200)
@example("`" * 1000, 200)
@example("```" + "i" * 1000, 200)
@example("```<&lt;<!here><!here>\n" + "x\n" * 300, 200)
@example("&lt;" * 300, 200)
@example("&" * 199 + "lt;" * 100, 200)
def test_the_parts_of_a_text_are_the_text(text: str, limit: int) -> None:
    """Joined they give it back, each reads as its piece of it, fits its message, and holds nothing alive."""
    parts = split(text, limit)
    assert "".join(part.raw for part in parts) == text
    for part in parts:
        assert part.raw
        assert size(part.sent) <= limit
        assert "<" not in part.sent
        assert shown(part.sent) == part.opening + part.raw + part.closing


@given(TEXTS, st.integers(200, 600))
@example("👩\u200d👩\u200d👧" * 100, 200)
@example("e\u0301" * 300, 200)
def test_no_character_is_cut_from_its_marks(text: str, limit: int) -> None:
    """No part begins with a combining mark, a joiner or a variation selector, unless it cannot be helped."""
    parts = split(text, limit)
    for before, after in pairwise(parts):
        at_a_gap = before.raw[-1] in "\n "
        first = after.raw[0]
        if not at_a_gap and not all(unicodedata.combining(c) or c == "\u200d" for c in before.raw[-(limit // 8) :]):
            assert not unicodedata.combining(first)
            assert first not in "\u200d\ufe0f"
            assert before.raw[-1] != "\u200d"


PARAGRAPHS = st.text("abc <&*_", min_size=1, max_size=80).map(lambda text: f"w{text}".strip())
CODE_LINES = st.lists(st.text("xyz <>&;#=()", max_size=60), min_size=1, max_size=12)
FENCES = st.tuples(st.sampled_from(["```", "~~~", "````"]), st.sampled_from(["", "python", "js title=1"]), CODE_LINES)
BLOCKS = st.one_of(
    PARAGRAPHS.map(lambda text: (text, None)),
    FENCES.map(lambda made: (f"{made[0]}{made[1]}\n" + "\n".join(made[2]) + f"\n{made[0]}", made)),
)


def code_in(markdown: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block, by a parser that is not ours."""
    tokens = MarkdownIt().parse(markdown)
    return [(token.info.strip(), token.content) for token in tokens if token.type == "fence"]


@given(st.lists(BLOCKS, min_size=1, max_size=12), st.integers(200, 500))
def test_code_stays_code_across_a_split(blocks: list[tuple[str, object]], limit: int) -> None:
    """Each part closes what it opens, and all parts' code together is the text's, in its language."""
    text = "\n\n".join(block for block, _ in blocks)
    parts = split(text, limit)
    code: list[tuple[str, str]] = []
    for part in parts:
        whole = part.opening + part.raw + part.closing
        assert "<p>after</p>" in MarkdownIt().render(f"{whole}\n\nafter"), "a fence was left open"
        pieces = code_in(whole)
        if part.opening and pieces and code:
            code[-1] = (code[-1][0], code[-1][1] + pieces.pop(0)[1])
        code += pieces
    wanted = code_in(text)
    assert [language for language, _ in code] == [language for language, _ in wanted]
    assert "".join(content for _, content in code) == "".join(content for _, content in wanted)


def test_a_text_is_cut_between_paragraphs_if_it_can_be() -> None:
    """Else between lines, else at a space, else anywhere."""
    paragraphs = "a" * 120 + "\n\n" + "b" * 120
    assert [part.raw for part in split(paragraphs, 200)] == ["a" * 120 + "\n\n", "b" * 120]
    lines = "a" * 120 + "\n" + "b" * 120
    assert [part.raw for part in split(lines, 200)] == ["a" * 120 + "\n", "b" * 120]
    words = "a" * 120 + " " + "b" * 120
    assert [part.raw for part in split(words, 200)] == ["a" * 120 + " ", "b" * 120]
    assert [len(part.raw) for part in split("a" * 240, 200)] == [183, 57]


def test_an_answer_cut_off_within_code_is_closed() -> None:
    """A model that ran out of tokens in the middle of a block does not leave the rest of the thread as code."""
    (part,) = split("Look:\n```python\nprint(1)")
    assert part.sent == "Look:\n```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("text", "closing"),
    [
        ("````\n```\ncode", "\n````"),  # a shorter fence within a longer one is code
        ("```\n~~~\ncode", "\n```"),  # and so is one of another kind
        ("```\ncode\n```` \nafter", ""),  # a longer one ends it
        ("``` inline ``` code", ""),
        ("    ```\n    code in a list", "\n```"),
    ],
)
def test_what_opens_and_ends_code_is_known(text: str, closing: str) -> None:
    """By the rules of CommonMark."""
    assert [part.closing for part in split(text)] == [closing]


def test_a_long_answer_takes_few_messages() -> None:
    """100,000 characters of paragraphs are nine messages, and cutting them takes no time to speak of."""
    text = "\n\n".join("word " * 40 for _ in range(500))
    assert len(split(text)) == 9
