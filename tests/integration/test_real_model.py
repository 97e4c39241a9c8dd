"""The happy path of every road against a small real model, which the local stack and the demo use too."""

from collections.abc import Iterator

import pytest

from backburner.models import Message, ModelInfo, Question
from backburner.providers.account import Account
from backburner.providers.anthropic import Anthropic
from backburner.providers.openai import OpenAI
from local import model, processes
from local.state import State
from tests.integration.roads import ROADS, Road


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the model answers; ended afterwards."""
    state = State(tmp_path_factory.mktemp("model"))
    running = model.ensure(state)
    yield f"http://127.0.0.1:{running.port}"
    processes.stop(state, model.NAME)


@pytest.mark.xdist_group("real model")
@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.name)
def test_a_real_model_answers_on_every_road(road: Road, address: str) -> None:
    """Text, finish reason and exact usage, through the official SDK and a stream."""
    account = Account(road.provider, lambda: "local", lambda _refused: False)
    provider = Anthropic(account, address) if road.is_anthropic else OpenAI(account, f"{address}/v1")
    entry = ModelInfo("smollm2", road.provider, 8_192, 512, 0, 0, 0, 0, "chat" if road.api == "chat" else "responses")
    asked = Question(
        model=entry,
        messages=(Message(role="user", content="What is the capital of France?"),),
        system_prompt="Answer in one short sentence.",
        max_tokens=40,
    )
    answer = provider.ask(asked, timeout_seconds=60, abandoned=lambda: False)
    assert "Paris" in answer.text
    assert answer.finish_reason in ("stop", "length")
    assert answer.usage.input_tokens > 0
    assert answer.usage.output_tokens > 0
    assert not answer.usage.estimated
    assert answer.first_token_ms is not None
