"""A small world: containers with skewed clocks, queues that double, delay and lose, a provider that bills.

The invariants are checked where they could break: at each write of a row, at each provider call, at each telling, and
at the end. What SQS and DynamoDB promise, the world keeps; what they do not promise, it withholds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from backburner.budgets import day_of
from backburner.delivery import WAITS_SECONDS
from backburner.errors import (
    BackburnerError,
    JobFailed,
    Overloaded,
    PortUnavailable,
    ProviderRefusedRequest,
    RateLimited,
)
from backburner.lifecycle import LEASE_MS, RENEW_MS, lapses_at
from backburner.models import (
    DEAD_LETTER,
    WEBSOCKET,
    Answer,
    Charge,
    ClientLimits,
    EpochMs,
    Hint,
    Job,
    JobRequest,
    JobStatus,
    Lane,
    Limits,
    Question,
    Tally,
    Telling,
    Usage,
)
from backburner.ports import Background, Conflict, Guard, Patch
from backburner.repair import LOOK_AHEAD_MS
from tests.fakes.house import ALICE, House
from tests.fakes.memory import (
    MODEL,
    START,
    FakeChance,
    MemoryCatalogue,
    MemoryDeadLetters,
    MemoryJournal,
    MemoryLimits,
    MemoryNotices,
    MemoryPayloads,
    MemoryStore,
    MemoryTallies,
)
from tests.simulation.hazards import Fate, Fated, FatedProvider, Killed

VISIBILITY_MS = 1_800_000
TELLING_VISIBILITY_MS = 360_000
RECEIVES_MAX = 3
SKEW_MS_MAX = 5_000
BEFORE_MIDNIGHT_MS = 57_000_000
"""From START to ten minutes before its UTC day ends."""
FORGETTING = {"store.update", "provider.ask"}
"""Where a strike may fall between a call's begin and the note of its name: the documented window."""
DEAD_CODES = {
    "overloaded",
    "rate_limited",
    "worker_lost",
    "undeliverable",
    "interrupted",
    "unreachable",
    "internal_error",
    "connection",
}


BUDGET_LIMITS = ClientLimits(requests_per_minute=20, tokens_per_day=2_500)
"""Two jobs at once, as they are charged; some hundreds, as they are settled."""
LIMITED = replace(MODEL, limits=Limits(requests=12))
"""A call every five seconds: jobs sleep for their slots, and some are parked."""


class Broken(BaseException):
    """An invariant does not hold. No handler of the program may swallow it."""


def must(holds: bool, what: str) -> None:
    """Assert an invariant."""
    if not holds:
        raise Broken(what)


class SkewedClock:
    """A container's clock: the world's, off by some seconds."""

    def __init__(self, world: World, skew_ms: int) -> None:
        self._world = world
        self._skew_ms = skew_ms

    def now(self) -> EpochMs:
        return self._world.time + self._skew_ms

    def sleep(self, seconds: float) -> None:
        self._world.time += round(1000 * seconds)


class WatchedStore(MemoryStore):
    """The Jobs table, with the invariants of its rows checked at every write."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def add(self, job: Job, now: EpochMs) -> Job | None:
        return super().add(replace(job, targets=self._world.targets, background=self._world.background), now)

    def _write(self, row: Job) -> None:
        before = self.rows.get(row.job_id)
        if before is not None and before.job_id in self._world.runs and before.created_at == row.created_at:
            self._world.check_transition(before, row)
        super()._write(row)


class WatchedTallies(MemoryTallies):
    """The clients' tallies, with the invariants of budgets checked at every write."""

    def __init__(self, world: World) -> None:
        super().__init__(world.store)
        self._world = world

    def admit(self, job: Job, now: EpochMs, before: Tally | None, after: Tally, limits: ClientLimits) -> Job | None:
        standing = super().admit(job, now, before, after, limits)
        tally = self.rows[job.client_id]
        if standing is None:
            must(tally.tokens <= (limits.tokens_per_day or 0), "no budget is exceeded by what was accepted")
            must(tally.requests <= (limits.requests_per_minute or 0), "no minute takes more requests than it may")
        self.check()
        return standing

    def settle(self, job: Job, guard: Guard, patch: Patch, change: Charge) -> None:
        if self._world.settling is not None and not self._world.fate.asleep:
            self._world.settling()
        super().settle(job, guard, patch, change)
        self.check()

    def check(self) -> None:
        """The tally of a day that is not over is the sum of what its jobs hold."""
        for client_id, tally in self.rows.items():
            if tally.day < day_of(self._world.time):
                continue
            rows = [row for row in self._world.store.rows.values() if row.client_id == client_id]
            charges = [row.charge for row in rows if row.charge is not None and row.charge.day == tally.day]
            held = sum(charge.tokens for charge in charges), sum(charge.micro_usd for charge in charges)
            must((tally.tokens, tally.micro_usd) == held, f"a tally is the sum of its jobs' charges: {tally}, {held}")


@dataclass
class Message:
    """A hint in a lane queue."""

    hint: Hint
    at: EpochMs
    receives: int = 0


class LaneQueue:
    """A standard queue: at least once, in any order, with a redrive policy."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.messages: list[Message] = []

    def send(self, hint: Hint, *, client_id: str, lane: Lane, delay_seconds: int = 0, trace: str | None = None) -> None:
        must(0 <= delay_seconds <= 900, "SQS delays a message by at most 900 seconds")
        self.messages.append(Message(hint, self._world.time + delay_seconds * 1000))

    def ready(self) -> list[Message]:
        return [message for message in self.messages if message.at <= self._world.time]


@dataclass
class Run:
    """What happened to a job since it was accepted or redriven."""

    accepted: bool = False
    calls: int = 0
    paid: int = 0
    answers: list[str] = field(default_factory=list)
    calling_until: EpochMs = 0
    cancelled: bool = False
    followed: bool = False


def handle_of(background: Background | None) -> str | None:
    """The name of the call that is to be attached to."""
    return background.handle if background is not None else None


class Bills:
    """The provider: bills each call, and lets the world go on while it thinks."""

    def __init__(self, world: World, container: int) -> None:
        self._world = world
        self._container = container

    def cancel(self, handle: str) -> None:
        self._world.going_on.pop(handle, None)

    def ask(
        self,
        question: Question,
        *,
        timeout_seconds: float,
        abandoned: Callable[[], bool],
        background: Background | None = None,
        said: Callable[[str], None] | None = None,
    ) -> Answer:
        world = self._world
        job_id = question.messages[0].content
        row, run = world.store.rows.get(job_id), world.runs[job_id]
        world.check_call(job_id, row, attached=handle_of(background) in world.going_on)
        run.calls += 1
        outcome = None
        if handle_of(background) not in world.going_on:
            outcome = world.outcome(job_id)
            if isinstance(outcome, RateLimited):  # refused: nothing was begun, and nothing is billed
                run.calls -= 1
                world.held_until = world.time + round(1000 * (outcome.retry_after_seconds or 0))
                raise outcome
        claims = row.claims if row is not None else 0
        handle = handle_of(background)
        if background is not None and outcome is not None:
            handle = f"resp-{job_id}-{claims}-{run.calls}"
            world.going_on[handle] = outcome
            run.paid += not isinstance(world.going_on[handle], JobFailed)
            background.remember(handle)
        world.think(self._container, job_id)
        if handle is not None:
            outcome = world.going_on.get(handle, "cancelled")
        if isinstance(outcome, JobFailed):
            raise outcome
        run.paid += handle is None
        text = f"{outcome} {claims} {run.calls}"
        run.answers.append(text)
        return Answer(text, "stop", question.model.name, "fake", Usage(3, 4), f"req-{run.calls}")


class Told:
    """The channel: a target that may be told twice only where the documentation says so."""

    waits_seconds = WAITS_SECONDS

    def __init__(self, world: World) -> None:
        self._world = world

    def tell(self, job: Job) -> None:
        must(job.status.is_final, "a target is told of a final status only")
        self._world.told[(job.job_id, job.claims, job.status)] += 1
        if self._world.telling is not None:
            self._world.telling(job.job_id)


@dataclass
class World:
    """One history. `random_` decides what a plan leaves open."""

    fate: Fate
    random_: random.Random
    targets: tuple[str, ...] = ("webhook",)
    outcomes: Callable[[str], str | JobFailed] | None = None
    thinking: Callable[[int, str], None] | None = None
    telling: Callable[[str], None] | None = None
    settling: Callable[[], None] | None = None
    """What others do between a settlement's reading and its writing."""
    background: bool = False
    budget: bool = False
    """Whether the client has one; then the history begins ten minutes before midnight."""
    skews: tuple[int, ...] = (0, 0)
    attempts_max: int = 3

    def __post_init__(self) -> None:
        self.time: EpochMs = START + (BEFORE_MIDNIGHT_MS if self.budget else 0)
        self.client = replace(ALICE, limits=BUDGET_LIMITS) if self.budget else ALICE
        self.store = WatchedStore(self)
        self.tallies = WatchedTallies(self)
        self.queue = LaneQueue(self)
        self.letters = MemoryDeadLetters()
        self.payloads = MemoryPayloads()
        self.limits = MemoryLimits()
        self.runs: dict[str, Run] = {}
        self.told: Counter[tuple[str, int, JobStatus]] = Counter()
        self.redriven = 0
        self.held_until: EpochMs = 0
        self.going_on: dict[str, str | JobFailed] = {}
        self.frozen = False
        self.keeping: list[int] = []
        chance = FakeChance(self.random_.randrange(2**32))
        clock_of_queue: Any = SkewedClock(self, 0)
        self.notices = MemoryNotices(clock_of_queue)
        self.containers = [self._container(index, skew, chance) for index, skew in enumerate(self.skews)]

    def _container(self, index: int, skew_ms: int, chance: FakeChance) -> House:
        clock: Any = SkewedClock(self, skew_ms)
        provider: Any = FatedProvider(Bills(self, index), self.fate)
        return House(
            provider=provider,
            attempts_max=self.attempts_max,
            clock=clock,
            chance=chance,
            journal=MemoryJournal(),
            store=Fated(self.store, "store", self.fate),
            payloads=Fated(self.payloads, "payloads", self.fate),
            hints=Fated(self.queue, "hints", self.fate),
            dead_letters=Fated(self.letters, "dead_letters", self.fate),
            notices=Fated(self.notices, "notices", self.fate),
            tallies=Fated(self.tallies, "tallies", self.fate),
            limits=Fated(self.limits, "limits", self.fate),
            catalogue=MemoryCatalogue(LIMITED),
            channel=Fated(Told(self), "channel", self.fate),
            told_by_worker=(WEBSOCKET,),
        )

    # ── What may happen ───────────────────────────────────────────────────────────────────────────────────────────

    def accept(self, key: str, *, container: int = 0, deadline_seconds: int | None = None) -> str | None:
        """A client submits; None if he got no 202. The prompt is the job's id, so that the provider knows the job."""
        from backburner.submission import job_id_for

        job_id = job_id_for(ALICE.client_id, key)
        run = self.runs.setdefault(job_id, Run())
        request = JobRequest(prompt=job_id, deadline_seconds=deadline_seconds)
        try:
            accepted = self.containers[container].submission.accept(self.client, request, key)
        except (Killed, BackburnerError):
            return None
        must(accepted.job.job_id == job_id, "one key, one job")
        must(job_id in self.store.rows, "202 only after the row is durable")
        run.accepted = True
        return job_id

    def cancel(self, job_id: str, *, container: int = 0) -> None:
        """The client cancels."""
        try:
            row = self.containers[container].submission.cancel(self.client, job_id)
        except (Killed, BackburnerError):
            return
        must(row.status is JobStatus.CANCELLED, "a cancellation that was confirmed has happened")
        self.runs[job_id].cancelled = True

    def follow(self, job_id: str, *, container: int = 0) -> None:
        """The client follows the job over the WebSocket API, and wants to be told of its end."""
        submission = self.containers[container].submission
        try:
            row = submission.follow(submission.find(ALICE, job_id))
        except (Killed, BackburnerError):
            return
        self.runs[job_id].followed = self.runs[job_id].followed or not row.status.is_final

    def deliver(self, message: Message, *, container: int = 0, seconds_left: float = 290.0) -> None:
        """SQS delivers a message to a worker: gone if answered, back after its visibility timeout if not."""
        message.receives += 1
        message.at = self.time + VISIBILITY_MS
        try:
            self.containers[container].execution.run(message.hint, lambda: seconds_left)
        except (Killed, PortUnavailable):
            if message.receives >= RECEIVES_MAX and message in self.queue.messages:
                self.queue.messages.remove(message)
                self.letters.redrive_policy_moves(message.hint)
            return
        if message in self.queue.messages:
            self.queue.messages.remove(message)

    def repair(self, *, container: int = 0) -> None:
        """The schedule fires."""
        with suppress(Killed, PortUnavailable):
            self.containers[container].repair.run_once()

    def tell(self, *, container: int = 0, double: bool = False) -> None:
        """The notifications queue delivers what is ready."""
        for telling in self.notices.take_ready(self.time) * (2 if double else 1):
            try:
                self.containers[container].delivery.deliver(telling)
            except (Killed, PortUnavailable):
                self.notices.sent.append((self.time + TELLING_VISIBILITY_MS, telling))

    def tell_again(self, job_id: str, *, container: int) -> None:
        """More messages for the same target arrive while it is being told: for this try, and for the next."""
        tries = next(notice.tries for notice in self.store.rows[job_id].outbox if notice.target == self.targets[0])
        with suppress(Killed, PortUnavailable):
            self.containers[container].delivery.deliver(Telling(job_id, self.targets[0], tries - 1))
            self.containers[container].delivery.deliver(Telling(job_id, self.targets[0], tries))

    def redrive(self) -> None:
        """An operator moves all explained letters back to the lane; the console may do so twice."""
        for letter in [letter for letter in self.letters.letters if letter.hint is not None]:
            if self.random_.random() < 0.7:
                self.letters.remove(letter)
            self.redriven += 1
            self.queue.messages.append(Message(letter.hint or Hint("-"), self.time))

    def operate(self, *, discard: bool, container: int = 0) -> None:
        """An operator takes all dead jobs in hand, by their rows, and sweeps up the letters."""
        redrive = self.containers[container].redrive
        dead = [row for row in self.store.rows.values() if row.status is JobStatus.FAILED]
        self.redriven += bool(dead) and not discard
        for row in dead:
            with suppress(Killed, PortUnavailable, Conflict):
                if discard:
                    self.containers[container].lifecycle.discard(row)
                else:
                    redrive.retry(row)
        with suppress(Killed, PortUnavailable):
            redrive.sweep()
        self.letters.put_back(self.letters.letters)  # whoever died with them in hand: they come back by themselves

    def think(self, container: int, job_id: str) -> None:
        """The provider thinks: time passes, the keeper keeps the leases, and others act."""
        if self.thinking is not None and not self.fate.asleep:
            self.thinking(container, job_id)

    def pass_time(self, milliseconds: int) -> None:
        """Time passes; the keepers of all containers at work renew their leases, but for the frozen ones."""
        end = self.time + milliseconds
        while self.time < end:
            self.time = min(end, self.time + RENEW_MS // 2)
            for container in set(self.keeping):
                self.containers[container].leases.tick()

    @contextmanager
    def at_work(self, container: int, *, frozen: bool = False) -> Iterator[None]:
        """The container is inside a provider call; a frozen one renews nothing meanwhile."""
        self.frozen = self.frozen or frozen
        if not frozen:
            self.keeping.append(container)
        try:
            yield
        finally:
            if not frozen:
                self.keeping.remove(container)

    def outcome(self, job_id: str) -> str | JobFailed:
        """What the provider says."""
        return self.outcomes(job_id) if self.outcomes is not None else "an answer"

    # ── Invariants ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_transition(self, before: Job, after: Job) -> None:
        """A row moves along the documented arrows only."""
        run = self.runs[before.job_id]
        must(after.claims in (before.claims, before.claims + 1), "the fencing token rises one by one")
        must(after.log[: len(before.log)] == before.log, "the receipt is only added to")
        must(set(before.targets) <= set(after.targets), "no target is taken back")
        if before.status.is_final:
            if after.status is before.status:
                must((after.result, after.error) == (before.result, before.error), "a final outcome never changes")
            else:
                revived = before.status is JobStatus.FAILED and not after.status.is_final
                must(revived and after.claims == before.claims + 1, "a final status never changes")
                must(self.redriven > 0, "only a redrive revives a dead job")
                must(before.discarded_at is None, "nothing revives a discarded job")
                self.runs[before.job_id] = Run(accepted=run.accepted)
        if after.status is JobStatus.COMPLETED and before.status is not JobStatus.COMPLETED:
            text = after.result.text if after.result is not None else ""
            mine = [answer for answer in run.answers if answer in (text or "")]
            must(len(mine) == 1, "the answer is one that this run was given")
            must(mine[0].split()[-2] == str(before.claims), "only who holds the job finishes it")
        if after.claims > before.claims and before.status is JobStatus.PROCESSING:
            must(lapses_at(before) <= self.time + SKEW_MS_MAX, "a live lease is not taken over")
        if after.status is JobStatus.PROCESSING:
            must((after.due_at or 0) >= (after.lease_until or 0), "an older version sees no lease lapse that has not")
        if after.status is JobStatus.PROCESSING and after.claims > before.claims:
            must((after.due_at or 0) <= self.time + LOOK_AHEAD_MS + SKEW_MS_MAX, "the next repair sees a job in hand")
        must(after.attempts <= self.attempts_max, "attempts stay within their bound")
        if not after.status.is_final or after.pending:
            must(after.due_at is not None, "an unfinished row says when somebody must look again")

    def check_call(self, job_id: str, row: Job | None, *, attached: bool) -> None:
        """A provider call is paid for only when it may be. One that goes on may be attached to at any time."""
        run = self.runs[job_id]
        must(row is not None and run.calls < row.attempts, "calls <= attempts")
        must(row is not None and row.status is JobStatus.PROCESSING, "only a job in processing is called for")
        if not self.fate.struck and not attached:  # a strike may lose the note of a refusal
            must(self.held_until <= self.time + SKEW_MS_MAX, "no call while the provider wants silence")
        if row is not None:
            must(row.available_at <= self.time + SKEW_MS_MAX, "no call before the provider's retry-after")
            must(row.deadline_at > (row.claimed_at or 0), "no attempt begins after the deadline")

    def heal_and_settle(self) -> None:
        """No more misfortune, time enough: everything must come to its end."""
        self.fate.asleep = True
        for _ in range(40):
            for message in self.queue.ready():
                self.deliver(message)
            self.tell()
            self.repair()
            if not self.queue.messages and not self.notices.sent and not list(self.store.due(2**62, 1)):
                break
            self.time += max(60_000, LEASE_MS + SKEW_MS_MAX)
            if not self.queue.ready() and not list(self.store.due(self.time, 1)):
                self.time += 900_000

    def check_end(self) -> None:
        """Everything accepted has ended, was told of, and nothing is left to do."""
        must(list(self.store.due(2**62, 1)) == [], "nothing stays due once the repairer has run")
        must(all(letter.reason != "unknown_job" for letter in self.letters.letters), "a hint follows its row")
        must(all(letter.reason is not None for letter in self.letters.letters), "no letter stays without its reason")
        for job_id, run in self.runs.items():
            row = self.store.rows.get(job_id)
            if row is None:
                must(not run.accepted, "an accepted job is not lost")
                continue
            must(row.status.is_final, f"every stored job reaches a final status, not {row.status}")
            must(not run.cancelled or row.status is JobStatus.CANCELLED, "a confirmed cancellation stays")
            must(all(line.outcome != "internal_error" for line in row.log), "the program itself has no fault")
            strikes = {name for _, name, _ in self.fate.struck}
            if self.background and not strikes & FORGETTING:
                must(run.paid <= 1, "a call that goes on at the provider is attached to, not paid for again")
            lost = bool(self.fate.struck) or self.frozen
            must(
                len(run.answers) <= 1 or lost, "an answer is paid for twice only if a strike or a freeze lost the first"
            )
            buried = [letter for letter in self.letters.letters if letter.hint and letter.hint.job_id == job_id]
            dead = row.status is JobStatus.FAILED and any(n.target == DEAD_LETTER for n in row.outbox)
            mine = any(b.hint and b.hint.died == row.claims for b in buried)
            must(not dead or mine or row.discarded_at is not None, "a dead job has its letter")
            if row.charge is not None and not self._counts_no_more(row, row.charge):
                must(row.charge == row.spent, f"what a job holds in the end is what it cost: {row.charge}, {row.spent}")
            if row.status is JobStatus.FAILED and row.error is not None and not dead:
                must(row.error.code not in DEAD_CODES, "a dead job is an operator's business")
            must(not run.followed or WEBSOCKET in row.targets, "whoever was told that a job goes on is a target")
            times, targets = self.told[(job_id, row.claims, row.status)], len(row.targets)
            must(times >= targets, "every target of a final job is told")
            must(times == targets or self._window(), "a target is told twice only if telling or noting was cut off")

    def _counts_no_more(self, row: Job, charge: Charge) -> bool:
        """Whether the charge's day is over, or it is of a redrive that ended before its day had a tally."""
        tally = self.tallies.rows.get(self.client.client_id)
        uncounted = charge.day != day_of(row.created_at) and (charge.tokens, charge.micro_usd) == (0, 0)
        return tally is None or tally.day != charge.day or uncounted

    def _window(self) -> bool:
        """Whether misfortune fell into the documented window: between the telling of a target and the note of it."""
        return any(
            name in ("channel.tell", "store.update", "store.get", "notices.send") for _, name, _ in self.fate.struck
        )


OUTCOMES: tuple[Callable[[], str | JobFailed], ...] = (
    lambda: "an answer",
    lambda: "an answer",
    lambda: "an answer",
    Overloaded,
    lambda: RateLimited(retry_after_seconds=45),
    lambda: RateLimited(retry_after_seconds=1_500),
    ProviderRefusedRequest,
)
