"""What every store of limits keeps: the one in memory, which the simulations use, is as true as DynamoDB's."""

from __future__ import annotations

from dataclasses import replace

import boto3
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from backburner.adapters.aws import client as aws_client
from backburner.adapters.limits import LimitsTable, gauge_of, item_of
from backburner.models import DIMENSIONS, Gauge, Learned, Limits, Vacancy
from backburner.ports import LimitStore, Stale
from tests.fakes.memory import MemoryLimits
from tests.integration.deployed import Deployed

NOW = 1_800_000_000_000_000
FULL = Gauge(
    "model#m-1",
    revision=3,
    limits=Limits(requests=60, output_tokens=9),
    seen=Limits(tokens=5),
    burst_ms=10,
    share=0.7,
    share_at=1,
    held_until=2,
    refused_at=3,
    strikes=4,
    struck_at=5,
    vacant=(Vacancy(6, {"requests": 7}), Vacancy(8, {})),
    learned=Learned(0.1, 0.2, 3.5, 4),
    cursors={"requests": NOW, "tokens": NOW + 5},
)
PLAIN = Gauge("model#m-1", revision=1, cursors={"requests": NOW})


@pytest.fixture(params=["memory", "dynamodb"])
def store(request: pytest.FixtureRequest) -> LimitStore:
    """Either store."""
    if request.param == "memory":
        return MemoryLimits()
    deployed: Deployed = request.getfixturevalue("deployed")
    client = aws_client("dynamodb", connect_seconds=1, read_seconds=5, tries=1)
    return LimitsTable(client, deployed.names["LimitsTable"])


@pytest.mark.parametrize("gauge", [FULL, PLAIN, Gauge("model#m-1", revision=1)])
def test_a_gauge_is_read_back_as_it_was_written(store: LimitStore, gauge: Gauge) -> None:
    """Every field."""
    assert store.read(gauge.name) is None
    assert store.replace(None, gauge) == gauge
    assert store.read(gauge.name) == gauge


numbers = st.integers(0, 10**15)
some = st.none() | st.integers(1, 10**12)
costs = st.dictionaries(st.sampled_from([*DIMENSIONS, "probes"]), numbers)
gauges = st.builds(
    Gauge, st.just("model#m-1"), revision=numbers, limits=st.builds(Limits, some, some, some, some),
    seen=st.builds(Limits, some, some, some, some), burst_ms=numbers, share=st.floats(0, 1), share_at=numbers,
    held_until=numbers, refused_at=numbers, strikes=st.integers(0, 20), struck_at=numbers,
    vacant=st.lists(st.builds(Vacancy, numbers, costs), max_size=3).map(tuple), cursors=costs,
    learned=st.builds(Learned, st.floats(0, 9), st.floats(0, 9), st.floats(0, 1e9), numbers),
)  # fmt: skip


@settings(
    max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(gauge=gauges)
def test_any_gauge_survives_its_spelling(gauge: Gauge) -> None:
    """To the row's attributes and back."""
    assert gauge_of({"limit_id": {"S": gauge.name}, **item_of(gauge)}) == gauge


def test_an_operators_own_row_is_understood(deployed: Deployed) -> None:
    """With limits alone, as typed into the console; the first reservation completes it."""
    name = deployed.names["LimitsTable"]
    boto3.resource("dynamodb").Table(name).put_item(Item={"limit_id": "model#m-1", "requests_per_minute": 7})
    client = aws_client("dynamodb", connect_seconds=1, read_seconds=5, tries=1)
    store = LimitsTable(client, name)
    found = store.read("model#m-1")
    assert found == Gauge("model#m-1", limits=Limits(requests=7))
    written = store.replace(None, replace(found, revision=1, cursors={"requests": NOW}))
    assert (written.limits, written.revision) == (Limits(requests=7), 1)


def test_an_add_moves_all_cursors_at_once(store: LimitStore) -> None:
    """And returns what stands there then."""
    gauge = store.replace(None, replace(FULL, cursors={"requests": NOW, "tokens": NOW}))
    ceilings = {"requests": NOW, "tokens": NOW + 1}
    moved = store.add(gauge, {"requests": 5, "tokens": 7}, floor=NOW, ceilings=ceilings)
    assert moved == replace(gauge, cursors={"requests": NOW + 5, "tokens": NOW + 7})
    assert store.read(gauge.name) == moved


def test_an_add_pulls_forward_what_has_fallen_behind(store: LimitStore) -> None:
    """A cursor below the floor, or none yet, moves on from the floor, while another is just moved on."""
    seen = store.replace(None, replace(FULL, cursors={"requests": NOW - 100, "tokens": NOW + 5}))
    store.adjust(FULL.name, {"requests": 60}, None)
    moved = store.add(
        seen,
        {"requests": 5, "tokens": 7, "probes": 9},
        floor=NOW,
        ceilings={"requests": 0, "tokens": NOW * 2, "probes": 0},
    )
    assert moved == replace(seen, cursors={"requests": NOW + 5, "tokens": NOW + 12, "probes": NOW + 9})
    assert store.read(FULL.name) == moved


@pytest.mark.parametrize(
    ("seen", "floor", "ceiling"),
    [
        (replace(FULL, revision=4), NOW, NOW),
        (replace(FULL, cursors={"requests": NOW + 2, "tokens": NOW + 5}), NOW + 1, NOW + 9),
        (FULL, 0, NOW - 1),
        (replace(FULL, cursors={"requests": NOW - 2, "tokens": NOW + 5}), NOW - 1, NOW + 9),
        (replace(FULL, cursors={"requests": NOW, "tokens": NOW + 5, "probes": NOW}), 0, NOW),
    ],
    ids=["another revision", "behind", "too far ahead", "no longer behind", "no such cursor"],
)
def test_an_add_is_refused_where_the_gauge_is_not_as_thought(
    store: LimitStore, seen: Gauge, floor: int, ceiling: int
) -> None:
    """Nothing moves, and the refusal tells what stands there."""
    stands = store.replace(None, FULL)
    with pytest.raises(Stale) as refused:
        store.add(
            seen,
            dict.fromkeys(seen.cursors, 5),
            floor=floor,
            ceilings={**dict.fromkeys(seen.cursors, NOW * 2), "requests": ceiling},
        )
    assert refused.value.current == stands == store.read(FULL.name)


def test_an_add_to_nothing_is_refused(store: LimitStore) -> None:
    """Nothing is made up."""
    with pytest.raises(Stale) as refused:
        store.add(PLAIN, {"requests": 1}, floor=0, ceilings={"requests": NOW})
    assert refused.value.current is None
    assert store.read(PLAIN.name) is None


def test_a_change_leaves_the_cursors_that_others_move(store: LimitStore) -> None:
    """It asks for the revision alone, and writes what it changes alone."""
    old = store.replace(None, PLAIN)
    store.adjust(PLAIN.name, {"requests": 50}, Learned(0.5, 0.5, 1.0, 1))
    new = store.replace(old, replace(old, revision=2, held_until=77))
    assert new.cursors == {"requests": NOW + 50}
    assert new.learned == Learned(0.5, 0.5, 1.0, 1)
    assert (new.revision, new.held_until) == (2, 77)
    assert store.read(PLAIN.name) == new


def test_a_change_of_the_cursors_asks_for_the_old_ones(store: LimitStore) -> None:
    """Two who pull a cursor forward to the clock: one wins."""
    old = store.replace(None, PLAIN)
    ahead = replace(old, cursors={"requests": NOW + 100, "tokens": NOW})
    assert store.replace(old, ahead) == ahead
    with pytest.raises(Stale) as refused:
        store.replace(old, replace(old, cursors={"requests": NOW + 200}))
    assert refused.value.current == ahead
    with pytest.raises(Stale):
        store.replace(old, replace(old, cursors={"requests": NOW, "tokens": NOW + 1}))


def test_one_of_two_changes_wins(store: LimitStore) -> None:
    """By the revision."""
    old = store.replace(None, PLAIN)
    won = store.replace(old, replace(old, revision=2, strikes=1))
    with pytest.raises(Stale) as refused:
        store.replace(old, replace(old, revision=2, strikes=2))
    assert refused.value.current == won
    with pytest.raises(Stale):
        store.replace(None, PLAIN)


def test_what_is_unset_is_gone(store: LimitStore) -> None:
    """An operator's limit taken back leaves the catalogue's."""
    old = store.replace(None, FULL)
    new = store.replace(old, replace(old, revision=4, limits=Limits()))
    assert new.limits == Limits()
    assert store.read(FULL.name) == new


def test_an_adjustment_moves_the_cursors_wherever_they_are(store: LimitStore) -> None:
    """Backwards too; and a row that is not there is not made."""
    with pytest.raises(Stale):
        store.adjust(PLAIN.name, {"requests": 1}, None)
    store.replace(None, PLAIN)
    assert store.adjust(PLAIN.name, {"requests": -30}, None).cursors == {"requests": NOW - 30}
    assert store.adjust(PLAIN.name, {}, Learned(2.0, 1.0, 1.0, 1)).learned.input_ratio == 2


def test_places_in_a_line_follow_each_other(store: LimitStore) -> None:
    """From the start asked for, unless the line is longer; a line that time has passed begins anew."""
    assert store.end_of("line#a") == 0
    places = [store.advance("line#a", NOW, 10, 9) for _ in range(3)]
    assert places == [NOW, NOW + 10, NOW + 20]
    assert store.advance("line#a", NOW + 25, 10, 9) == NOW + 30
    assert store.advance("line#a", NOW + 100, 10, 9) == NOW + 100
    assert store.advance("line#b", NOW, 10, 9) == NOW
    assert (store.end_of("line#a"), store.end_of("line#b")) == (NOW + 110, NOW + 10)
