"""The models that a deployment knows, and what their tokens cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from backburner.models import Limits, LongPrompt, ModelInfo, Usage


class Band(BaseModel):
    """Other prices for calls whose input has more than `over` tokens, cached ones included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    over: Annotated[int, Field(ge=1)]
    input: Annotated[float, Field(ge=0)]
    cached: Annotated[float, Field(ge=0)]
    cache_write: Annotated[float, Field(ge=0)]
    output: Annotated[float, Field(ge=0)]


class CatalogueEntry(BaseModel):
    """One model as the catalogue file and the `ExtraModels` parameter write it.

    Prices: dollars per million tokens. Limits: what a new account with the provider may use; none where left out.
    `tokens_per_minute` is input and output together (OpenAI); Anthropic counts the two apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: Literal["openai", "anthropic"]
    context_tokens: Annotated[int, Field(ge=1)]
    output_tokens_max: Annotated[int, Field(ge=1)]
    input: Annotated[float, Field(ge=0)] = 0.0
    cached: Annotated[float, Field(ge=0)] = 0.0
    cache_write: Annotated[float, Field(ge=0)] = 0.0
    output: Annotated[float, Field(ge=0)] = 0.0
    api: Literal["responses", "chat"] = "responses"
    temperature: bool = False
    long_prompt: Band | None = None
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    input_tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    output_tokens_per_minute: Annotated[int, Field(ge=1)] | None = None


_ENTRIES = TypeAdapter(dict[str, CatalogueEntry])


def _long_prompt(band: Band | None) -> LongPrompt | None:
    if band is None:
        return None
    prices = (round(price * 1_000_000) for price in (band.input, band.cached, band.cache_write, band.output))
    return LongPrompt(band.over, *prices)


def _models(text: str) -> dict[str, ModelInfo]:
    return {
        name: ModelInfo(
            name=name,
            provider=entry.provider,
            context_tokens=entry.context_tokens,
            output_tokens_max=entry.output_tokens_max,
            input_price=round(entry.input * 1_000_000),
            cached_price=round(entry.cached * 1_000_000),
            cache_write_price=round(entry.cache_write * 1_000_000),
            output_price=round(entry.output * 1_000_000),
            api=entry.api,
            long_prompt=_long_prompt(entry.long_prompt),
            limits=Limits(
                requests=entry.requests_per_minute,
                tokens=entry.tokens_per_minute,
                input_tokens=entry.input_tokens_per_minute,
                output_tokens=entry.output_tokens_per_minute,
            ),
            cached_count=entry.provider != "anthropic",
            temperature=entry.temperature,
        )
        for name, entry in _ENTRIES.validate_json(text).items()
    }


@dataclass(frozen=True)
class PriceList:
    """The shipped catalogue and the deployment's own entries, which win."""

    models: dict[str, ModelInfo] = field(default_factory=dict)

    @classmethod
    def load(cls, extra: str = "") -> PriceList:
        """Read `catalogue.json`, then `extra` (the same shape, as JSON text). Raises ValidationError."""
        shipped = json.loads((Path(__file__).parent / "catalogue.json").read_text())
        return cls(_models(json.dumps(shipped["models"])) | (_models(extra) if extra else {}))

    def find(self, model: str) -> ModelInfo | None:
        """The entry of a model."""
        return self.models.get(model)

    def names(self) -> Sequence[str]:
        """All models, in order."""
        return sorted(self.models)


def cost_micro_usd(model: ModelInfo, usage: Usage) -> int:
    """What a call costs, in whole micro-dollars, rounded up: plain input + cached + cache-write + output tokens."""
    band = model.long_prompt
    prices = band if band is not None and usage.input_tokens > band.over_tokens else model
    plain = max(0, usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens)
    micro_usd_million = (
        plain * prices.input_price
        + usage.cached_tokens * prices.cached_price
        + usage.cache_write_tokens * prices.cache_write_price
        + usage.output_tokens * prices.output_price
    )
    return -(-micro_usd_million // 1_000_000)
