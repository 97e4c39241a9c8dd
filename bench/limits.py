"""How much of a provider's limit is used, in real time, and what it costs in refusals, writes and sleep.

    make bench-limits [ARGS="--runs 1 --scenario exact"]

The core, its limiter and the OpenAI adapter are the real ones, in several worker processes of ten threads; each takes
its next batch only when the present one has ended, as Lambda's poller has it. The provider is the fake one, in a
process of its own, over HTTP: 600 requests and 60,000 tokens a minute, refilled continuously, one second of burst,
calls of a second. Tables and queues are in memory, in one more process, and every call to them takes 3 to 9 ms more.

The ideal is (tokens that the provider counted - burst) / rate + one call. Everything starts cold: nothing is known of
the model. All scenarios take about 20 minutes; `--runs 1` takes 7.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.managers import BaseManager
from typing import Any

import httpx2
from rich.console import Console
from rich.table import Table

from backburner.bootstrap import SystemChance, SystemClock
from backburner.budgets import Budgets
from backburner.execution import Execution, Leases
from backburner.lifecycle import Lifecycle
from backburner.limits import SlotLimiter
from backburner.models import Client, Hint, JobRequest, JobStatus, Lane, Limits, Message, Question
from backburner.ports import Conflict, Stale
from backburner.pricing import cost_micro_usd
from backburner.providers.account import Account
from backburner.providers.openai import OpenAI
from backburner.submission import Submission
from tests.fakes.memory import (
    MODEL,
    MemoryCatalogue,
    MemoryDeadLetters,
    MemoryDepths,
    MemoryLimits,
    MemoryNotices,
    MemoryPayloads,
    MemoryStore,
    MemoryTallies,
)

REQUESTS, TOKENS, BURST_SECONDS, CALL_SECONDS = 600, 60_000, 1.0, 1.0
INPUT_BYTES, OUTPUT_BYTES = 400, 200
"""A token is four bytes to the fake provider: 100 in, 50 out."""
TABLE_MS = (3.0, 9.0)
BATCH = 10
INVOCATION_SECONDS = 300.0
RUN_SECONDS_MAX = 240.0
MATCH = "Recite"
WINDOW_SECONDS = 10


@dataclass(frozen=True)
class Scenario:
    """What is different about a run. configured: the catalogue's limits over the provider's."""

    name: str
    about: str
    jobs: int = 300
    max_tokens: int | None = 60
    configured: float = 1.0
    headers: bool = True
    urgent: int = 0
    """Interactive jobs, at random moments while a backlog in bulk uses the limit up."""


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("exact", "max_tokens near what is written, as a sensible client sets it"),
        Scenario("default", "max_tokens left at the deployment's 1,024", max_tokens=None),
        Scenario("wrong", "limits configured twice too high; replies state the true ones", jobs=700, configured=2.0),
        Scenario("blind", "the same, and no reply states a limit", jobs=700, configured=2.0, headers=False),
        Scenario("urgent", "30 interactive jobs arrive at random in 60 s of a bulk backlog", jobs=450, urgent=30),
    )
}


# ── What the workers share ────────────────────────────────────────────────────────────────────────────────────────────


class Queue:
    """A lane queue: delays, and a message that is not deleted in time comes back."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[float, Hint]] = {}
        self._changed = threading.Condition()
        self._count = 0

    def send(self, hint: Hint, delay_seconds: float) -> None:
        """Queue a message."""
        with self._changed:
            self._count += 1
            self._messages[self._count] = (time.monotonic() + delay_seconds, hint)
            self._changed.notify()

    def receive(self, limit: int, seconds: float) -> dict[int, Hint]:
        """Take up to so many, the oldest first; none if none appears for so long."""
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                now = time.monotonic()
                ready = sorted((at, number) for number, (at, _) in self._messages.items() if at <= now)[:limit]
                if ready or now >= until:
                    break
                nearest = min((at for at, _ in self._messages.values()), default=until)
                self._changed.wait(max(0.001, min(nearest, until) - now))
            for _, number in ready:
                self._messages[number] = (now + 6 * INVOCATION_SECONDS, self._messages[number][1])
            return {number: self._messages[number][1] for _, number in ready}

    def delete(self, number: int) -> None:
        """The message is done with."""
        with self._changed:
            self._messages.pop(number, None)


class Hub:
    """The tables and queues, with what was noted; the workers call it across processes."""

    def __init__(self) -> None:
        self.store, self.limits, self.payloads, self.letters = (
            MemoryStore(), MemoryLimits(), MemoryPayloads(), MemoryDeadLetters(),
        )  # fmt: skip
        self.queues = {lane: Queue() for lane in Lane}
        self.noted: Counter[str] = Counter()
        self.ready = 0
        self.going = False
        self._lock = threading.Lock()

    def call(self, port: str, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[str, Any]:
        """Call a port's method. What it raises is told, since these exceptions cannot be pickled."""
        try:
            with self._lock:
                return "returned", getattr(getattr(self, port), method)(*arguments, **named)
        except Conflict as conflict:
            return "conflict", conflict.current
        except Stale as stale:
            return "stale", stale.current

    def send(self, hint: Hint, lane: Lane, delay_seconds: float) -> None:
        """Queue a hint."""
        self.queues[lane].send(hint, delay_seconds)

    def receive(self, lane: Lane, seconds: float) -> dict[int, Hint]:
        """Take a batch."""
        return self.queues[lane].receive(BATCH, seconds)

    def delete(self, lane: Lane, number: int) -> None:
        """A message is done with."""
        self.queues[lane].delete(number)

    def note(self, noted: Counter[str]) -> None:
        """Add to what was noted."""
        with self._lock:
            self.noted += noted

    def check_in(self) -> None:
        """One more worker is ready."""
        with self._lock:
            self.ready += 1

    def go(self) -> None:
        """Let the workers begin."""
        self.going = True

    def state(self) -> dict[str, Any]:
        """Where everything stands."""
        with self._lock:
            return {
                "ready": self.ready,
                "going": self.going,
                "ends": Counter(row.status for row in self.store.rows.values()),
                "noted": Counter(self.noted),
                "writes": Counter(self.limits.writes),
            }


class HubManager(BaseManager):
    """Carries the hub's methods across processes."""


HUB: list[Hub] = []


def the_hub() -> Hub:
    """The one of this process."""
    if not HUB:
        HUB.append(Hub())
    return HUB[0]


HubManager.register("hub", callable=the_hub)


class RemotePort:
    """A port of the hub's, some milliseconds away."""

    def __init__(self, hub: Any, name: str) -> None:
        self._hub = hub
        self._name = name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        half = random.uniform(*TABLE_MS) / 2000
        time.sleep(half)
        outcome, value = self._hub.call(self._name, method, arguments, named)
        time.sleep(half)
        if outcome == "conflict":
            raise Conflict(value)
        if outcome == "stale":
            raise Stale(value)
        return value


class RemoteQueues:
    """The lane queues, as ports.HintQueue."""

    def __init__(self, hub: Any) -> None:
        self._hub = hub

    def send(
        self,
        hint: Hint,
        *,
        client_id: str,  # noqa: ARG002
        lane: Lane,
        delay_seconds: int = 0,
        trace: str | None = None,  # noqa: ARG002
    ) -> None:
        """Queue a hint."""
        time.sleep(random.uniform(*TABLE_MS) / 1000)
        self._hub.send(hint, lane, delay_seconds)


class Tally:
    """A journal that counts, for one process."""

    def __init__(self) -> None:
        self.noted: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, event: str, **fields: Any) -> None:
        """Count it."""
        with self._lock:
            self.noted[event] += 1
            if event == "call_ended":
                self.noted["slept_ms"] += fields["slot_wait_ms"]

    def about(self, **_: Any) -> AbstractContextManager[None]:
        """Nothing that is counted."""
        return nullcontext()


# ── Workers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def model_for(scenario: Scenario) -> Any:
    """The model as the catalogue has it."""
    limits = Limits(requests=round(REQUESTS * scenario.configured), tokens=round(TOKENS * scenario.configured))
    return replace(MODEL, name="bench", provider="openai", limits=limits)


def work(address: Any, lane: Lane, base_url: str, scenario: Scenario) -> None:
    """One worker process."""
    hub = connect(address)
    clock, chance, tally = SystemClock(), SystemChance(), Tally()
    ports: dict[str, Any] = {name: RemotePort(hub, name) for name in ("store", "limits", "payloads", "letters")}
    any_clock: Any = clock
    lifecycle = Lifecycle(
        store=ports["store"],
        hints=RemoteQueues(hub),
        dead_letters=ports["letters"],
        notices=MemoryNotices(any_clock),
        clock=clock,
        chance=chance,
        journal=tally,
        tallies=MemoryTallies(ports["store"]),
    )
    provider = OpenAI(Account("openai", lambda: "sk-bench", lambda _: False), base_url + "/v1")
    model = model_for(scenario)
    execution = Execution(
        lifecycle=lifecycle,
        payloads=ports["payloads"],
        dead_letters=ports["letters"],
        providers=lambda _: provider,
        catalogue=MemoryCatalogue(model),
        price=cost_micro_usd,
        clock=clock,
        chance=chance,
        journal=tally,
        leases=Leases(lifecycle, clock, tally),
        limiter=SlotLimiter(ports["limits"], clock, chance, tally),
        default_model=model.name,
    )
    warm = Question(replace(model, name="warm-up"), (Message(role="user", content="x"),), None, 9)
    provider.ask(warm, timeout_seconds=30, abandoned=lambda: False)  # another model, so another allowance
    hub.check_in()
    while not hub.state()["going"]:
        time.sleep(0.01)
    while True:
        batch = hub.receive(lane, 1.0)
        if not batch:
            continue
        ends_at = time.monotonic() + INVOCATION_SECONDS
        failed = execution.run_batch({str(number): hint for number, hint in batch.items()}, partial(_left, ends_at))
        for number in batch:
            if str(number) not in failed:
                hub.delete(lane, number)
        hub.note(tally.noted)
        tally.noted = Counter()


def _left(ends_at: float) -> float:
    return ends_at - time.monotonic()


def connect(address: Any) -> Any:
    """The hub, from another process."""
    manager = HubManager(address=address, authkey=b"bench")
    manager.connect()
    return manager.hub()  # type: ignore[attr-defined]


# ── A run ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Outcome:
    """Of one run. refusals: by window of ten seconds; waits: seconds from acceptance to call, of interactive jobs."""

    utilisation: float
    seconds: float
    refusals: list[int]
    ends: Counter[str]
    parked: int
    writes: dict[str, float]
    slept: float
    waits: list[float]


@contextmanager
def fake_provider(scenario: Scenario) -> Iterator[httpx2.Client]:
    """The provider in its own process; a client of it."""
    command = [sys.executable, "-m", "tests.fakes.provider", "--latency", str(CALL_SECONDS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        client = httpx2.Client(base_url=process.stdout.readline().strip(), trust_env=False, timeout=30)
        limits = {"requests_per_minute": REQUESTS, "tokens_per_minute": TOKENS, "burst_seconds": BURST_SECONDS}
        client.put("/_control/config", json={"limits": limits, "rate_headers": scenario.headers}).raise_for_status()
        script = {"match": MATCH, "steps": [{"text": "x" * OUTPUT_BYTES}]}
        client.post("/_control/scripts", json=script).raise_for_status()
        yield client
    finally:
        process.terminate()
        process.wait(10)


def run(scenario: Scenario, workers: int) -> Outcome:
    """Start everything, let it run, and look at the provider's own ledger."""
    spawn = multiprocessing.get_context("spawn")
    manager = HubManager(address=("127.0.0.1", 0), authkey=b"bench", ctx=spawn)
    with fake_provider(scenario) as provider, manager:
        hub = manager.hub()  # type: ignore[attr-defined]
        lanes = [Lane.STANDARD] * workers if not scenario.urgent else [Lane.BULK] * workers + [Lane.INTERACTIVE] * 2
        arguments = (str(provider.base_url), scenario)
        processes = [
            spawn.Process(target=work, args=(manager.address, lane, *arguments), daemon=True) for lane in lanes
        ]
        for process in processes:
            process.start()
        try:
            return _watched(scenario, hub, provider, len(lanes))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(10)


def _watched(scenario: Scenario, hub: Any, provider: httpx2.Client, workers: int) -> Outcome:
    accept = _acceptor(scenario, hub)
    for number in range(scenario.jobs):
        accept(number, Lane.BULK if scenario.urgent else Lane.STANDARD)
    until = time.monotonic() + 120
    while hub.state()["ready"] < workers:
        if time.monotonic() > until:
            raise SystemExit("the workers did not start")
        time.sleep(0.1)
    began = time.time()
    hub.go()
    dice = random.Random(1)
    accepted: dict[int, float] = {}
    for moment in sorted(dice.uniform(5, 65) for _ in range(scenario.urgent)):
        time.sleep(max(0.0, began + moment - time.time()))
        number = scenario.jobs + len(accepted)
        accepted[number] = time.time()
        accept(number, Lane.INTERACTIVE)
    total = scenario.jobs + scenario.urgent
    while _ended(hub) < total and time.time() - began < RUN_SECONDS_MAX:
        time.sleep(0.2)
    time.sleep(1.0)  # the last batches' notes
    calls = [call for call in provider.get("/_control/ledger").json() if call["model"] == "bench"]
    return _outcome(scenario, calls, hub.state(), began, accepted)


def _ended(hub: Any) -> int:
    return sum(count for status, count in hub.state()["ends"].items() if status.is_final)


def _acceptor(scenario: Scenario, hub: Any) -> Callable[[int, Lane], None]:
    clock: Any = SystemClock()
    queues: Any = RemoteQueues(hub)
    store: Any = RemotePort(hub, "store")
    letters: Any = RemotePort(hub, "letters")
    payloads: Any = RemotePort(hub, "payloads")
    lifecycle = Lifecycle(
        store=store, hints=queues, dead_letters=letters, notices=MemoryNotices(clock), clock=clock,
        chance=SystemChance(), journal=Tally(), tallies=MemoryTallies(store),
    )  # fmt: skip
    submission = Submission(
        store=store, payloads=payloads, lifecycle=lifecycle, catalogue=MemoryCatalogue(model_for(scenario)),
        clock=clock, chance=lifecycle.chance, journal=lifecycle.journal, default_model="bench", lanes=frozenset(Lane),
        depths=MemoryDepths(), budgets=Budgets(lifecycle.tallies, clock, lifecycle.chance, lifecycle.journal),
        price=cost_micro_usd,
    )  # fmt: skip

    def accept(number: int, lane: Lane) -> None:
        prompt = f"{MATCH} {number} ".ljust(INPUT_BYTES, "x")
        request = JobRequest.model_validate(
            {"prompt": prompt, "max_tokens": scenario.max_tokens, "priority": lane.value}
        )
        submission.accept(Client("bench", "Bench"), request)

    return accept


def _outcome(
    scenario: Scenario,
    calls: list[dict[str, Any]],
    state: Mapping[str, Any],
    began: float,
    accepted: Mapping[int, float],
) -> Outcome:
    billed = [call for call in calls if call["billed"]]
    tokens = sum(call["input_tokens"] + call["output_tokens"] for call in billed)
    ideal = (tokens - BURST_SECONDS * TOKENS / 60) / (TOKENS / 60) + CALL_SECONDS
    seconds = max(call["ended"] for call in billed) - began
    refused = Counter(
        int((call["began"] - began) // WINDOW_SECONDS) for call in calls if call["outcome"] == "error:429"
    )
    started = {int(call["prompt"].split()[1]): call["began"] for call in billed}
    total = scenario.jobs + scenario.urgent
    return Outcome(
        utilisation=ideal / seconds,
        seconds=seconds,
        refusals=[refused[window] for window in range(int(seconds // WINDOW_SECONDS) + 1)],
        ends=Counter({status.value: count for status, count in state["ends"].items()}),
        parked=state["noted"]["job_parked"],
        writes={kind: count / total for kind, count in sorted(state["writes"].items())},
        slept=state["noted"]["slept_ms"] / 1000 / total,
        waits=sorted(started[number] - at for number, at in accepted.items() if number in started),
    )


# ── Tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the range if there is one."""
    middle = format(statistics.median(values), form)
    if len(values) == 1:
        return middle
    return f"{middle} ({format(min(values), form)}-{format(max(values), form)})"


def show(console: Console, scenario: Scenario, outcomes: Sequence[Outcome]) -> None:
    """One scenario's table."""
    table = Table("", "median (range)", title=f"{scenario.name}: {scenario.about}", title_justify="left")
    kinds = sorted({kind for outcome in outcomes for kind in outcome.writes})
    table.add_row("utilisation, ideal / actual", spread([outcome.utilisation for outcome in outcomes], ".2%"))
    table.add_row("seconds", spread([outcome.seconds for outcome in outcomes], ".2f"))
    table.add_row("refusals (429)", spread([sum(outcome.refusals) for outcome in outcomes], ".0f"))
    done = [outcome.ends[JobStatus.COMPLETED.value] for outcome in outcomes]
    table.add_row("jobs completed", f"{spread(done, '.0f')} of {scenario.jobs + scenario.urgent}")
    table.add_row("jobs failed", spread([outcome.ends[JobStatus.FAILED.value] for outcome in outcomes], ".0f"))
    table.add_row(
        "times parked, a job", spread([outcome.parked / sum(done) * len(done) for outcome in outcomes], ".2f")
    )
    table.add_row("limiter writes, a job", spread([sum(outcome.writes.values()) for outcome in outcomes], ".2f"))
    for kind in kinds:
        table.add_row(f"  {kind}", spread([outcome.writes.get(kind, 0.0) for outcome in outcomes], ".2f"))
    table.add_row("seconds asleep in a worker, a job", spread([outcome.slept for outcome in outcomes], ".1f"))
    if scenario.configured != 1:
        for number, outcome in enumerate(outcomes, 1):
            table.add_row(f"refusals by 10 s, run {number}", " ".join(map(str, outcome.refusals)))
    if scenario.urgent:
        table.add_row("wait of an interactive job, p50 s", spread([_part(o.waits, 0.5) for o in outcomes], ".2f"))
        table.add_row("wait of an interactive job, p95 s", spread([_part(o.waits, 0.95) for o in outcomes], ".2f"))
    console.print(table)


def _part(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def main() -> None:
    """Run the scenarios and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each scenario (default %(default)s)")
    parser.add_argument("--workers", type=int, default=5, help="processes of ten threads (default %(default)s)")
    parser.add_argument(
        "--scenario", nargs="*", choices=list(SCENARIOS), default=list(SCENARIOS), help="which (default all)"
    )
    chosen = parser.parse_args()
    console = Console()
    for name in chosen.scenario:
        outcomes = []
        for number in range(chosen.runs):
            console.print(f"{name}, run {number + 1} of {chosen.runs} ...", style="dim")
            outcomes.append(run(SCENARIOS[name], chosen.workers))
        show(console, SCENARIOS[name], outcomes)


if __name__ == "__main__":
    main()
