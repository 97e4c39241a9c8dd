"""OpenAI's background responses: attached to rather than paid for again. And structured output on each road."""

from collections.abc import Callable

import pytest
from pydantic import JsonValue

from backburner import errors
from backburner.models import ResponseFormat
from backburner.ports import Background, Provider
from tests.fakes.provider import Behaviour, FakeProvider
from tests.integration.roads import RESPONSES, ROADS, Road, question
from tests.integration.test_provider_contract import RIVER

SCHEMA: dict[str, JsonValue] = {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]}


def never() -> bool:
    """Nobody gives the call up."""
    return False


def ask(
    llm: Provider, background: Background | None, seconds: float = 5.0, abandoned: Callable[[], bool] = never
) -> str:
    """One call with leave for the background."""
    return llm.ask(question(RESPONSES), timeout_seconds=seconds, abandoned=abandoned, background=background).text


def test_a_call_is_named_before_it_is_waited_for(provider: FakeProvider) -> None:
    """The name is the response's id; the provider is asked to keep it, and bills one call."""
    names: list[str] = []
    provider.script("river", Behaviour(text=RIVER))
    assert ask(RESPONSES.open(provider.base_url), Background(None, names.append)) == RIVER
    [call] = provider.ledger
    assert names == [call.response_id]
    assert (call.request["background"], call.request["store"]) == (True, True)


def test_without_leave_nothing_is_kept_at_the_provider(provider: FakeProvider) -> None:
    """The default."""
    ask(RESPONSES.open(provider.base_url), None)
    [call] = provider.ledger
    assert call.request["store"] is False
    assert "background" not in call.request


@pytest.mark.parametrize("fault", ["reset_mid_stream", "hang_mid_stream"])
def test_a_broken_call_is_attached_to(provider: FakeProvider, fault: str) -> None:
    """The connection broke, the response went on; a second worker gets the whole answer, and one call is billed."""
    provider.configure(tokens_per_chunk=1, chunk_delay_seconds=0.01)
    provider.script("river", Behaviour(text=RIVER, fault=fault))
    names: list[str] = []
    with pytest.raises((errors.ConnectionLost, errors.ProviderTimeout)) as broke:
        ask(RESPONSES.open(provider.base_url), Background(None, names.append), 3.0)
    assert broke.value.goes_on
    again: list[str] = []
    assert ask(RESPONSES.open(provider.base_url), Background(names[0], again.append)) == RIVER
    assert again == []
    [call] = provider.ledger
    assert call.billed


def test_a_call_that_the_provider_no_longer_knows_is_made_anew(provider: FakeProvider) -> None:
    """Under a new name."""
    names: list[str] = []
    assert ask(RESPONSES.open(provider.base_url), Background("resp_gone", names.append))
    assert names == [provider.ledger[0].response_id]


def test_a_cancelled_call_stops_costing(provider: FakeProvider) -> None:
    """Cancelled by its name, also from another worker."""
    provider.configure(tokens_per_chunk=1, chunk_delay_seconds=0.2)
    provider.script("river", Behaviour(text=RIVER))
    names: list[str] = []
    with pytest.raises(errors.Abandoned):
        ask(RESPONSES.open(provider.base_url), Background(None, names.append), abandoned=lambda: bool(names))
    RESPONSES.open(provider.base_url).cancel(names[0])
    [call] = provider.ledger
    assert call.outcome == "cancelled"


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.name)
def test_structured_output_is_asked_for_in_each_apis_own_words(road: Road, provider: FakeProvider) -> None:
    """The schema reaches the provider as it was sent."""
    wanted = ResponseFormat(type="json_schema", name="river", json_schema=SCHEMA)
    provider.script("river", Behaviour(text='{"river":"Danube"}'))
    asked = question(road, response_format=wanted)
    road.open(provider.base_url).ask(asked, timeout_seconds=5, abandoned=never)
    sent = provider.ledger[0].request
    found = {
        "openai-responses": lambda: sent["text"]["format"],
        "openai-chat": lambda: sent["response_format"]["json_schema"],
        "anthropic-messages": lambda: sent["output_config"]["format"],
    }[road.name]()
    assert found["schema"] == SCHEMA


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.name)
def test_an_answer_can_be_followed_while_it_is_written(road: Road, provider: FakeProvider) -> None:
    """The pieces, joined, are the answer; the first of them was timed."""
    provider.configure(tokens_per_chunk=1)
    provider.script("river", Behaviour(text=RIVER))
    pieces: list[str] = []
    answer = road.open(provider.base_url).ask(question(road), timeout_seconds=5, abandoned=never, said=pieces.append)
    assert len(pieces) > 3
    assert "".join(pieces) == answer.text == RIVER
    assert answer.first_token_ms is not None
