"""The crossings of tests/unit/test_limits_properties.py on DynamoDB, whose conditions make each write one step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from backburner.adapters.aws import client as aws_client
from backburner.adapters.limits import LimitsTable
from backburner.models import Learned
from tests.fakes.crossing import SURE, Crossing, Step, schedules
from tests.fakes.memory import FakeChance
from tests.integration.deployed import Deployed


@pytest.fixture
def names() -> FakeChance:
    """A model for each example."""
    return FakeChance()


@settings(
    max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(schedule=schedules, learned=st.sampled_from([SURE, Learned()]))
def test_no_crossing_exceeds_a_limit_or_breaks_a_hold_or_leaks(
    deployed: Deployed, names: FakeChance, schedule: list[Step], learned: Learned
) -> None:
    """As in memory."""
    client = aws_client("dynamodb", connect_seconds=1, read_seconds=5, tries=1)
    store = LimitsTable(client, deployed.names["LimitsTable"])
    crossing = Crossing(store, f"m-{names.name()}", schedule, learned=learned)
    crossing.play()
    crossing.check()
