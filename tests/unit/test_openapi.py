"""The published description of the API is what the models say today."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from backburner import http, http_openai
from backburner.models import JobRequest
from local import openapi

PATHS = (*http.PATHS, *http_openai.PATHS)


def test_the_file_is_in_step_with_the_models() -> None:
    """`make openapi` renews it."""
    assert openapi.FILE.read_text() == openapi.text()


def test_every_path_and_method_of_both_apis_is_described() -> None:
    """Slack's paths are Slack's business."""
    described = {path: {method.upper() for method in item if method != "parameters"}
                 for path, item in openapi.document()["paths"].items()}  # fmt: skip
    for pattern, methods in PATHS:
        if "slack" not in pattern.pattern:
            found = [path for path in described if pattern.fullmatch(re.sub(r"\{\w+\}", "x", path))]
            assert set().union(*(described[path] for path in found)) == set(methods), pattern.pattern
    assert all(any(pattern.fullmatch(re.sub(r"\{\w+\}", "x", path)) for pattern, _ in PATHS) for path in described)


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": "Name a river.", "webhook": {"url": "https://example.com"}, "temperature": 1},
        {"messages": [{"role": "user", "content": "Name a river."}], "metadata": {"a": [1]}},
    ],
)
def test_a_request_that_is_taken_fits_its_schema(request_: dict[str, object]) -> None:
    """And one with an unknown field does not."""
    document = openapi.document()
    schema = {"$ref": "#/components/schemas/JobRequest", "components": document["components"]}
    JobRequest.model_validate(request_)
    jsonschema.validate(request_, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**request_, "promt": "x"}, schema)


def test_the_document_is_json() -> None:
    """And names every schema that it refers to."""
    text = openapi.text()
    known = set(json.loads(text)["components"]["schemas"])
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= known
