"""Sizing: the formula, the queueing model next to a simulation, and what is made of them."""

from __future__ import annotations

import heapq
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backburner.bootstrap import BATCH
from backburner.models import Lane
from backburner.pricing import PriceList
from cli import size
from cli.__main__ import app
from cli.queueing import bulk_queue, harmonic, lane
from cli.size import Load, concurrency, shares, sized, token_cost, workers

ROOT = Path(__file__).parents[2]
PRICES = ROOT / "cli" / "prices.json"
MINI = PriceList.load().find("gpt-5.4-mini")
assert MINI is not None
LOAD = Load(0.5, 8, 0.7, MINI, 1_000, 300)


def simulate(arrivals: float, at_once: int, batch: int, lasts: Callable[[random.Random, int], float]) -> list[float]:
    """How long each of many jobs waits, in order: invocations take what waits, up to a batch, and last as they do."""
    dice = random.Random(4711)
    now, arrived = 0.0, []
    for _ in range(60_000):
        now += dice.expovariate(arrivals)
        arrived.append(now)
    free = [0.0] * at_once
    waits: list[float] = []
    while len(waits) < len(arrived):
        start = max(heapq.heappop(free), arrived[len(waits)])
        taken = [at for at in arrived[len(waits) : len(waits) + batch] if at <= start]
        waits += [start - at for at in taken]
        heapq.heappush(free, start + lasts(dice, len(taken)))
    return sorted(waits)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("rps", "seconds", "utilization", "expected"),
    [(0.5, 8, 0.7, 6), (1, 7, 0.7, 10), (0.7, 10, 0.7, 10), (0.001, 1, 0.7, 1), (50, 4, 0.5, 400)],
)
def test_workers_by_the_formula(rps: float, seconds: float, utilization: float, expected: int) -> None:
    """rps x seconds / utilization, rounded up, and not by a rounding error of floats."""
    assert workers(rps, seconds, utilization) == expected


@pytest.mark.parametrize(("arrivals", "at_once"), [(0.5, 6), (2.0, 20), (0.1, 2), (3.0, 30)])
def test_with_batches_of_one_it_is_erlangs_formula(arrivals: float, at_once: int) -> None:
    """The chance to wait and the mean wait of M/M/c, by the textbook's sums."""
    offered = arrivals * 8
    last = offered**at_once / math.factorial(at_once) * at_once / (at_once - offered)
    erlang_c = last / (sum(offered**k / math.factorial(k) for k in range(at_once)) + last)
    waits = bulk_queue(arrivals, 8, at_once, 1)
    assert waits is not None
    assert waits.busy == pytest.approx(erlang_c, rel=1e-6)
    assert waits.mean == pytest.approx(erlang_c / (at_once / 8 - arrivals), rel=1e-6)
    assert waits.batch == pytest.approx(1)


@pytest.mark.parametrize(("arrivals", "at_once", "batch"), [(0.5, 2, 10), (0.9, 2, 10), (2.0, 4, 5), (0.3, 3, 2)])
def test_the_model_is_what_a_simulation_of_its_assumptions_gives(arrivals: float, at_once: int, batch: int) -> None:
    """Chance to wait, mean, quantiles and batches, within the simulation's own noise."""
    waits = bulk_queue(arrivals, 8, at_once, batch)
    assert waits is not None
    seen = simulate(arrivals, at_once, batch, lambda dice, _: dice.expovariate(1 / 8))
    assert sum(wait > 0 for wait in seen) / len(seen) == pytest.approx(waits.busy, abs=0.02)
    assert mean(seen) == pytest.approx(waits.mean, rel=0.08)
    for share in (0.95, 0.99):
        assert seen[int(share * len(seen))] == pytest.approx(waits.quantile(share), rel=0.08, abs=0.1)


@pytest.mark.parametrize(("arrivals", "at_once"), [(0.5, 4), (0.5, 6), (0.2, 2), (2.0, 20), (0.5, 8)])
def test_a_lane_of_real_calls_makes_jobs_wait_no_longer_than_said(arrivals: float, at_once: int) -> None:
    """An invocation ends with the longest of its calls, which vary as those of language models do: long tails."""
    waits = lane(arrivals, 8, at_once, BATCH)
    assert waits is not None

    def longest(dice: random.Random, count: int) -> float:
        return max(8 * dice.lognormvariate(-0.125, 0.5) for _ in range(count))

    seen = simulate(arrivals, at_once, BATCH, longest)
    assert mean(seen) <= waits.mean + 0.05
    assert seen[int(0.95 * len(seen))] <= waits.quantile(0.95) + 0.2
    assert mean(seen) >= waits.mean / 2.5 - 0.05  # safe, and not absurdly so


def test_the_longest_of_some_calls() -> None:
    """The harmonic numbers."""
    for count in (1, 2, 3, 10):
        assert harmonic(count) == pytest.approx(sum(1 / k for k in range(1, count + 1)), rel=0.01)


def test_a_queue_that_grows_has_no_wait() -> None:
    """More arrives than full batches can take."""
    assert bulk_queue(2.5, 8, 2, 10) is None
    assert lane(2.5, 8, 2, 10) is None
    assert lane(0.5, 8, 2, 10) is not None


def test_more_invocations_never_make_jobs_wait_longer() -> None:
    """So the least that is enough is found by trying."""
    means = [waits.mean for at_once in range(2, 40) if (waits := lane(1.0, 8, at_once, BATCH)) is not None]
    assert means == sorted(means, reverse=True)
    assert len(means) > 30


def test_the_concurrency_is_the_least_that_is_enough() -> None:
    """One less would let more than 5 % of jobs wait for longer than asked."""
    at_once, waits = concurrency(LOAD)
    assert waits.quantile(0.95) <= LOAD.wait
    fewer = lane(LOAD.rps, LOAD.seconds, at_once - 1, BATCH)
    assert fewer is None or fewer.quantile(0.95) > LOAD.wait
    assert concurrency(replace(LOAD, rps=0.001))[0] == 2
    assert concurrency(replace(LOAD, wait=3_600))[0] < at_once


def test_money() -> None:
    """Tokens by the catalogue; AWS grows with the load from what an idle deployment costs."""
    assert token_cost(LOAD) == pytest.approx(LOAD.jobs_month * (1_000 * 0.75 + 300 * 4.5) / 1e6, abs=0.02)
    idle, busy = (sized(replace(LOAD, rps=rps), Lane.STANDARD)["usd_a_month"]["aws_total"] for rps in (0.001, 1))
    assert 45 < idle < 60
    assert busy > idle + 100


def test_what_a_deployment_has_is_counted_as_its_template_and_documents_have_it() -> None:
    """Alarms, composite ones for five, series of metrics, bytes of logs, dashboards and secrets."""
    template = (ROOT / "template.yaml").read_text()
    count = Counter(re.findall(r"^    Type: (AWS::\S+)$", template, re.MULTILINE))
    assert count["AWS::CloudWatch::Alarm"] + 5 * count["AWS::CloudWatch::CompositeAlarm"] == size.ALARMS
    assert count["AWS::CloudWatch::Dashboard"] == size.DASHBOARDS
    assert count["AWS::SecretsManager::Secret"] == size.SECRETS
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    [series] = re.findall(r"\*\*(\d+)\*\*\s+series at most", metrics)
    [kilobytes] = re.findall(r"about (\d+) KB a job", metrics)
    assert (int(series), 1_000 * int(kilobytes)) == (size.METRICS, size.LOG_BYTES)


def test_rows_are_billed_by_their_size_and_large_texts_lie_in_s3() -> None:
    """A KB is a write unit, three times for a job; what is kept for two weeks costs as well, with its recovery."""
    prices = json.loads(PRICES.read_text())["aws"]
    small, long = replace(LOAD, input_tokens=10, output_tokens=10), replace(LOAD, input_tokens=20_000)
    huge = replace(LOAD, input_tokens=100_000)
    assert size.writes(small) == 3 * 1 + 1 + size.INDEX_WRITES + size.SLOT_WRITES
    assert size.writes(long) > 200 > size.writes(huge)
    bills = [size.aws_cost(load, prices) for load in (small, long, huge)]
    assert [bill["S3"] > 0 for bill in bills] == [False, False, True]
    assert bills[0]["DynamoDB storage"] < 1 < bills[1]["DynamoDB storage"] > bills[2]["DynamoDB storage"]
    expected = size.stored_gb(long)[0] * (prices["dynamodb_gb_month"] + prices["dynamodb_recovery_gb_month"])
    assert bills[1]["DynamoDB storage"] == pytest.approx(expected, abs=0.01)


def test_each_price_says_where_it_is_from_and_whether_that_was_confirmed() -> None:
    """By a page of AWS's, looked at on a day."""
    known = json.loads(PRICES.read_text())
    assert known["sources"].keys() == known["aws"].keys()
    for name, source in known["sources"].items():
        assert re.match(r"https://(docs\.)?aws\.amazon\.com/", source["page"]), name
        assert date.fromisoformat(source["checked"]) <= date.fromisoformat(known["as_of"]), name
        assert source["confirmed"] in known["confirmed"], name
        assert source["confirmed"] == "page" or source["note"], name


def test_the_providers_limits_are_part_of_it() -> None:
    """A new account's: 1,000 requests and 500,000 tokens a minute for this model."""
    assert shares(LOAD) == pytest.approx({"requests": 0.03, "tokens": 0.078})


def test_the_command_as_the_issue_has_it() -> None:
    """`backburner size --rps 0.5 --seconds 8 --utilization 0.7`."""
    arguments = ["size", "--rps", "0.5", "--seconds", "8", "--utilization", "0.7"]
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (told["workers"], told["batch_size"]) == (6, 10)
    assert told["parameters"] == {"StandardConcurrency": told["maximum_concurrency"]}
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert f"StandardConcurrency={told['maximum_concurrency']}" in shown.stdout
    assert told["prices_as_of"] in shown.stdout
    assert all(each in " ".join(shown.stdout.split()) for each in told["left_out"])
    assert {"DynamoDB storage", "S3"} < told["usd_a_month"]["aws"].keys()
    wrong = CliRunner().invoke(app, [*arguments, "--model", "gpt-0"])
    assert (wrong.exit_code, "gpt-0" in wrong.stderr) == (2, True)
