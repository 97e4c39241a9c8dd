"""JSON from outside, read strictly: what is wrong is refused by name, and nothing is guessed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from backburner.errors import InvalidRequest
from backburner.models import Trail

_TRACE = re.compile(r"Root=1-[0-9a-f]{8}-[0-9a-f]{24}(;Parent=[0-9a-f]{16})?(;Sampled=[01])?")
"""X-Ray's header. SQS refuses a message with any other text in its place, and what Lambda adds is of no use later."""
CORRELATION_CHARACTERS_MAX = 64
_SURROGATE = re.compile("[\ud800-\udfff]")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is out of range")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise InvalidRequest("given twice", field=_shown(name))
        fields[name] = value
    return fields


def _shown(name: str) -> str:
    """A field name from outside, as an error may show it."""
    return "".join(c if c.isprintable() else "?" for c in name)[:100]


def _refuse_surrogates(value: Any, path: str) -> None:
    """Half a UTF-16 pair is no character: it can be neither stored nor sent. Raises InvalidRequest."""
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            raise InvalidRequest("contains half of a surrogate pair, which is no character", field=path or None)
    elif isinstance(value, dict):
        for name, item in value.items():
            here = f"{path}.{_shown(name)}" if path else _shown(name)
            _refuse_surrogates(name, here)
            _refuse_surrogates(item, here)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_surrogates(item, f"{path}.{index}")


def parse_object(text: str, what: str) -> dict[str, Any]:
    """The JSON object in a text, of which errors speak as the `what`. Raises InvalidRequest."""
    try:
        value = json.loads(text, parse_float=_number, parse_constant=_constant, object_pairs_hook=_object)
        _refuse_surrogates(value, "")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"the {what} is not JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise InvalidRequest(f"the {what} is nested too deeply") from error
    except ValueError as error:  # ours, or Python's about a number of thousands of digits
        reason = "it holds a number that is too large" if "digits" in str(error) else str(error)[:100]
        raise InvalidRequest(f"the {what} cannot be read: {reason}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the {what} must be a JSON object")
    return value


def validated[M: BaseModel](model: type[M], value: Mapping[str, Any]) -> M:
    """The model of an object's fields. Raises InvalidRequest, naming each field that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        refusal = InvalidRequest()
        refusal.fields = _field_errors(error)
        raise refusal from error


def trail_of(event: Mapping[str, Any], environment: Mapping[str, str]) -> Trail:
    """The trail of a request that API Gateway passes on; Lambda keeps X-Ray's header in its environment."""
    correlation_id = str((event.get("requestContext") or {}).get("requestId") or "")
    trace = _TRACE.match(environment.get("_X_AMZN_TRACE_ID", ""))
    return Trail(correlation_id[:CORRELATION_CHARACTERS_MAX], trace and trace[0])


def _field_errors(error: ValidationError) -> tuple[tuple[str, str], ...]:
    words = {
        "extra_forbidden": "unknown field",
        "missing": "required",
        "dict_type": "must be an object",
        "model_type": "must be an object",
        "list_type": "must be a list",
        "string_type": "must be a text",
        "int_type": "must be a whole number",
    }
    return tuple(
        (
            ".".join(_shown(str(step)) for step in entry["loc"]) or "(body)",
            words.get(entry["type"]) or entry["msg"].removeprefix("Value error, "),
        )
        for entry in error.errors(include_input=False, include_url=False, include_context=False)[:20]
    )
