"""Structured logs by Powertools. Fields never hold prompts, answers, keys or signatures."""

from __future__ import annotations

from functools import cache
from typing import Any

from aws_lambda_powertools import Logger


@cache
def logger() -> Logger:
    """The function's logger; service and level come from POWERTOOLS_SERVICE_NAME and POWERTOOLS_LOG_LEVEL."""
    return Logger(utc=True)


class Logbook:
    """The journal, as ports.Journal: one JSON line an event."""

    def note(self, event: str, **fields: Any) -> None:
        """Log `noun_verb` with the fields that have a value."""
        logger().info(event, extra={name: value for name, value in fields.items() if value is not None})
