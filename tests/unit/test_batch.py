"""OpenAI's batch files, a line each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backburner.errors import InvalidRequest
from cli.batch import batch_request, is_batch_line
from cli.screen import Refused
from cli.submit import read_requests


def line(url: str = "/v1/responses", **body: Any) -> dict[str, Any]:
    return {"custom_id": "row-7", "method": "POST", "url": url, "body": {"model": "gpt-5.4-mini", **body}}


def test_a_response_is_a_job_that_carries_its_custom_id() -> None:
    """`background` is what a batch is, so a line need not say so."""
    request = batch_request(line(input="Name a river.", metadata={"team": "maps"}, service_tier="flex"))
    assert request.model_dump(exclude_none=True) == {
        "prompt": "Name a river.",
        "model": "gpt-5.4-mini",
        "metadata": {"team": "maps", "custom_id": "row-7"},
        "priority": "bulk",
    }


def test_a_chat_completion_is_one_too() -> None:
    """As most batch files have it."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    request = batch_request(
        line(
            "/v1/chat/completions",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Name a river."}]},
                {"role": "assistant", "content": "The Danube."},
                {"role": "user", "content": "Another."},
            ],
            max_completion_tokens=50,
            response_format={"type": "json_schema", "json_schema": {"name": "river", "schema": schema, "strict": True}},
        )
    )
    assert (request.system_prompt, request.max_tokens) == ("Be brief.", 50)
    assert [turn.content for turn in request.messages or ()] == ["Name a river.", "The Danube.", "Another."]
    assert request.response_format is not None
    assert request.response_format.json_schema == schema


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"custom_id": ""}, "custom_id"),
        ({"custom_id": 7}, "custom_id"),
        ({"method": "GET"}, "method"),
        ({"url": "/v1/embeddings"}, "url"),
        ({"body": "x"}, "body"),
        ({"body": {"input": "x", "tools": [{"type": "web_search"}]}}, "tools"),
        ({"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}], "n": 2}}, "n"),
        ({"priority": "bulk"}, "priority"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], named: str) -> None:
    """Nothing is left out silently."""
    with pytest.raises(InvalidRequest) as raised:
        batch_request(line(input="x") | changed)
    assert named in (dict(raised.value.fields) or {raised.value.field})


def test_a_file_of_such_lines_is_submitted_and_a_wrong_line_is_named() -> None:
    """As jobs of `POST /jobs`; all or none."""
    good = json.dumps(line(input="Name a river."))
    requests = read_requests(f"{good}\n{good}\n")
    assert [number for number, _ in requests] == [1, 2]
    assert requests[0][1] == {
        "prompt": "Name a river.", "model": "gpt-5.4-mini", "metadata": {"custom_id": "row-7"}
    }  # fmt: skip
    assert read_requests(good, by_line=True) == requests[:1]
    bad = json.dumps(line(input="x", stream=True))
    with pytest.raises(Refused, match="line 2: stream: not supported"):
        read_requests(f"{good}\n{bad}\n")


def test_other_lines_are_not_taken_for_such() -> None:
    """They go to POST /jobs as they are."""
    assert is_batch_line(line())
    assert not is_batch_line({"prompt": "Name a river."})
