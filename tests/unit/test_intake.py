"""What is read of a request's surroundings."""

from __future__ import annotations

import pytest

from backburner.intake import trail_of
from backburner.models import Trail

ROOT = "Root=1-5759e988-bd862e3fe1be46a994272793"


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        (f"{ROOT};Parent=53995c3f42cd8ad8;Sampled=1", f"{ROOT};Parent=53995c3f42cd8ad8;Sampled=1"),
        (f"{ROOT};Parent=53995c3f42cd8ad8;Sampled=0;Lineage=a:0", f"{ROOT};Parent=53995c3f42cd8ad8;Sampled=0"),
        (ROOT, ROOT),
        ("Self=1-67891234-12456789abcdef012345678;Root=x", None),
        ("\u0000", None),
        ("", None),
    ],
)
def test_a_trace_is_kept_only_as_sqs_takes_it(header: str, kept: str | None) -> None:
    """Any other text would make every message of the job fail."""
    trail = trail_of({"requestContext": {"requestId": "req-1"}}, {"_X_AMZN_TRACE_ID": header})
    assert trail == Trail("req-1", kept)


@pytest.mark.parametrize("event", [{}, {"requestContext": None}, {"requestContext": {"requestId": None}}])
def test_a_request_without_an_id_has_an_empty_one(event: dict[str, object]) -> None:
    """As from a console's test event."""
    assert trail_of(event, {}) == Trail("")


def test_an_id_has_its_limit() -> None:
    """It stands in every row."""
    assert len(trail_of({"requestContext": {"requestId": "x" * 1_000}}, {}).correlation_id) == 64
