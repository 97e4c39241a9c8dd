"""What docs/openapi.json says of both APIs holds on the deployed stack: schemathesis asks all it allows, and more."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from local.openapi import FILE
from tests.e2e.conftest import Stack

pytestmark = pytest.mark.e2e

schema = schemathesis.openapi.from_path(FILE)
EXAMPLES = 4
"""Of each endpoint: more are a longer run, not another test."""


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_request_is_a_server_error_or_gets_what_is_not_described(case: schemathesis.Case[Any], stack: Stack) -> None:
    """Status, content type and body of every reply are in the document."""
    reply = case.call(base_url=stack.api_url, headers={"Authorization": f"Bearer {stack.api_key}"}, timeout=30)
    case.validate_response(
        reply,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ],
    )
