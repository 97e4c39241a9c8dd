"""The catalogue and what tokens cost."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from backburner import pricing
from backburner.models import ModelInfo, Usage
from backburner.pricing import PriceList, cost_micro_usd

CATALOGUE = json.loads((Path(pricing.__file__).parent / "catalogue.json").read_text())
MODEL = ModelInfo(
    "m", "openai", 1_000, 100, input_price=2_000_000, cached_price=200_000, cache_write_price=2_500_000,
    output_price=10_000_000,
)  # fmt: skip
OWN = '{"own":{"provider":"openai","context_tokens":8192,"output_tokens_max":2048,"api":"chat"}}'


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        (Usage(), 0),
        (Usage(1_000_000, 0), 2_000_000),
        (Usage(0, 1_000_000), 10_000_000),
        (Usage(1_000, 100), 3_000),
        (Usage(1, 0), 2),
        (Usage(1_000, 0, cached_tokens=400), 1_280),
        (Usage(1_000, 0, cached_tokens=400, cache_write_tokens=100), 1_330),
        (Usage(1, 0, cached_tokens=1), 1),  # 0.2, rounded up
        (Usage(10, 0, cached_tokens=100), 20),  # a provider that counts more cached than sent
    ],
)
def test_each_kind_of_token_has_its_price(usage: Usage, cost: int) -> None:
    """Whole micro-dollars, rounded up once, at the end."""
    assert cost_micro_usd(MODEL, usage) == cost


counts = st.integers(0, 10**9)


@given(plain=counts, cached=counts, written=counts, output=counts, prices=st.tuples(counts, counts, counts, counts))
def test_a_cost_is_exact_and_less_than_a_micro_dollar_too_high(
    plain: int, cached: int, written: int, output: int, prices: tuple[int, int, int, int]
) -> None:
    """No floating point comes near money."""
    model = ModelInfo("m", "p", 1, 1, *prices)
    usage = Usage(plain + cached + written, output, cached, written)
    terms = zip((plain, cached, written, output), prices, strict=True)
    exact = sum((Fraction(tokens * price, 1_000_000) for tokens, price in terms), Fraction(0))
    cost = cost_micro_usd(model, usage)
    assert isinstance(cost, int)
    assert 0 <= cost - exact < 1


def test_the_shipped_catalogue_is_dated_and_says_its_unit() -> None:
    """Prices are data with a date."""
    assert CATALOGUE["as_of"] == "2026-11-29"
    assert "million tokens" in CATALOGUE["unit"]


@pytest.mark.parametrize("name", CATALOGUE["models"])
def test_a_shipped_model_has_a_known_provider_and_sensible_prices(name: str) -> None:
    """Cached input is cheaper than plain, output is dearer; a limit of output fits the context."""
    model = PriceList.load().find(name)
    assert model is not None
    assert model.name == name
    assert model.provider == ("anthropic" if name.startswith("claude") else "openai")
    assert 0 < model.cached_price < model.input_price <= model.cache_write_price
    assert model.input_price < model.output_price
    assert model.output_tokens_max <= model.context_tokens
    assert model.api == "responses"
    dollars = CATALOGUE["models"][name]
    assert model.input_price == round(dollars["input"] * 1_000_000)


def test_a_deployments_own_models_come_on_top() -> None:
    """Without code; the shipped ones stay."""
    prices = PriceList.load(OWN)
    assert prices.find("own") == ModelInfo("own", "openai", 8_192, 2_048, 0, 0, 0, 0, "chat")
    assert prices.names() == sorted([*CATALOGUE["models"], "own"])
    assert prices.find("nobody") is None


def test_a_deployments_own_price_wins_over_the_shipped_one() -> None:
    """The whole entry is replaced."""
    entry = {"provider": "openai", "context_tokens": 1, "output_tokens_max": 1, "input": 0.000001}
    model = PriceList.load(json.dumps({"gpt-5.4": entry})).find("gpt-5.4")
    assert model == ModelInfo("gpt-5.4", "openai", 1, 1, 1, 0, 0, 0)


@pytest.mark.parametrize(
    "extra",
    [
        "x", "[]", '{"m":{}}', '{"m":{"provider":"openai","context_tokens":0,"output_tokens_max":1}}',
        '{"m":{"provider":"openai","context_tokens":1,"output_tokens_max":1,"input":-1}}',
        '{"m":{"provider":"openai","context_tokens":1,"output_tokens_max":1,"price":1}}',
        '{"m":{"provider":"openai","context_tokens":1,"output_tokens_max":1,"input":NaN}}',
        '{"m":{"provider":"nobody","context_tokens":1,"output_tokens_max":1}}',
        '{"m":{"provider":"openai","context_tokens":1,"output_tokens_max":1,"api":"chatt"}}',
    ],
)  # fmt: skip
def test_a_wrong_entry_is_refused_when_the_function_starts(extra: str) -> None:
    """A slip in a parameter must not become a job that fails at night, or one that is called by the wrong API."""
    with pytest.raises(ValidationError):
        PriceList.load(extra)


def test_a_long_prompt_has_prices_of_its_own() -> None:
    """For every token of the call, and only beyond the band's edge."""
    model = PriceList.load().find("claude-haiku-5-5")
    assert model is not None
    assert cost_micro_usd(model, Usage(100_000, 1_000)) == 10_000 + 500
    assert cost_micro_usd(model, Usage(100_001, 1_000)) == 50_001 + 2_500


def test_every_shipped_model_has_default_limits() -> None:
    """Requests and input tokens at least; OpenAI counts input and output together."""
    for name in PriceList.load().names():
        model = PriceList.load().find(name)
        assert model is not None
        assert model.limits.requests is not None
        assert (model.limits.tokens or model.limits.input_tokens) is not None
