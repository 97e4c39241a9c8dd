"""The whole core on fakes: what `bootstrap` does for AWS, for tests and the simulator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from backburner.addresses import Receivers
from backburner.budgets import Budgets
from backburner.delivery import WAITS_SECONDS, Delivery
from backburner.execution import Execution, Leases
from backburner.lifecycle import Lifecycle
from backburner.limits import SlotLimiter
from backburner.models import Client, Hint, Job, JobRequest, Lane, SlackOrigin, Trail
from backburner.ports import Channel, Provider
from backburner.pricing import cost_micro_usd
from backburner.redrive import Redrive
from backburner.repair import Repair
from backburner.submission import Submission, Webhooks
from tests.fakes.memory import (
    FakeChance,
    FakeClock,
    MemoryCatalogue,
    MemoryDeadLetters,
    MemoryDepths,
    MemoryHints,
    MemoryJournal,
    MemoryLimits,
    MemoryNotices,
    MemoryPayloads,
    MemorySeals,
    MemoryStore,
    MemoryTallies,
    MemoryWebhookSecrets,
    ScriptedProvider,
)

ALICE = Client("alice", "Alice")
BOB = Client("bob", "Bob")


class RecordingChannel:
    """A target that notes what it was told, and fails as often as it is told to."""

    waits_seconds = WAITS_SECONDS

    def __init__(self) -> None:
        self.told: list[Job] = []
        self.failures: list[Exception] = []

    def tell(self, job: Job) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.told.append(job)


@dataclass
class House:
    """Everything wired. `provider` and the ports may be replaced before use."""

    provider: Provider = field(default_factory=ScriptedProvider)
    attempts_max: int = 3
    clock: FakeClock = field(default_factory=FakeClock)
    chance: FakeChance = field(default_factory=FakeChance)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    store: Any = field(default_factory=MemoryStore)
    payloads: Any = field(default_factory=MemoryPayloads)
    hints: Any = None
    depths: MemoryDepths = field(default_factory=MemoryDepths)
    dead_letters: Any = None
    notices: Any = None
    channel: Any = field(default_factory=RecordingChannel)
    limits: Any = field(default_factory=MemoryLimits)
    tallies: Any = None
    catalogue: Any = field(default_factory=MemoryCatalogue)
    channels: dict[str, Any] | None = None
    told_by_worker: tuple[str, ...] = ()
    """Targets that it tells without a message."""
    receivers: Receivers = field(default_factory=Receivers)
    seals: MemorySeals = field(default_factory=MemorySeals)
    webhook_secrets: MemoryWebhookSecrets = field(default_factory=MemoryWebhookSecrets)
    new_lock: Any = threading.Lock

    def __post_init__(self) -> None:
        self.hints = self.hints or MemoryHints(self.clock)
        self.dead_letters = self.dead_letters or MemoryDeadLetters(self.clock)
        self.notices = self.notices or MemoryNotices(self.clock)
        self.tallies = self.tallies or MemoryTallies(self.store)
        self.lifecycle = Lifecycle(
            store=self.store,
            hints=self.hints,
            dead_letters=self.dead_letters,
            notices=self.notices,
            clock=self.clock,
            chance=self.chance,
            journal=self.journal,
            tallies=self.tallies,
            attempts_max=self.attempts_max,
        )
        channels: Callable[[str], Channel] = lambda target: (
            self.channel if self.channels is None else self.channels[target]
        )
        self.delivery = Delivery(
            store=self.store,
            lifecycle=self.lifecycle,
            channels=channels,
            clock=self.clock,
            chance=self.chance,
            journal=self.journal,
        )
        working = replace(self.lifecycle, told_here=dict.fromkeys(self.told_by_worker, self.delivery.tell_at_once))
        self.limiter = SlotLimiter(self.limits, self.clock, self.chance, self.journal, self.new_lock)
        self.submission = Submission(
            store=self.store,
            payloads=self.payloads,
            lifecycle=self.lifecycle,
            catalogue=self.catalogue,
            clock=self.clock,
            chance=self.chance,
            journal=self.journal,
            budgets=Budgets(self.tallies, self.clock, self.chance, self.journal),
            price=cost_micro_usd,
            default_model="m-1",
            lanes=frozenset(Lane),
            depths=self.depths,
            limiter=self.limiter,
            at_once=dict.fromkeys(Lane, 10),
            webhooks=Webhooks(self.receivers, self.seals, self.webhook_secrets),
        )
        self.leases = Leases(working, self.clock, self.journal)
        self.execution = Execution(
            lifecycle=working,
            payloads=self.payloads,
            dead_letters=self.dead_letters,
            providers=lambda _: self.provider,
            catalogue=self.catalogue,
            price=cost_micro_usd,
            clock=self.clock,
            chance=self.chance,
            journal=self.journal,
            leases=self.leases,
            limiter=self.limiter,
            default_model="m-1",
        )
        self.redrive = Redrive(
            store=self.store,
            payloads=self.payloads,
            lifecycle=self.lifecycle,
            dead_letters=self.dead_letters,
            clock=self.clock,
            check=self.submission.check,
        )
        self.repair = Repair(
            store=self.store,
            lifecycle=self.lifecycle,
            dead_letters=self.dead_letters,
            clock=self.clock,
            journal=self.journal,
        )

    def accept(
        self,
        key: str | None = None,
        client: Client = ALICE,
        *,
        slack: SlackOrigin | None = None,
        trail: Trail | None = None,
        **fields: Any,
    ) -> Job:
        """Accept a small request."""
        request = JobRequest.model_validate({"prompt": "Name a river.", **fields})
        return self.submission.accept(client, request, key, slack=slack, trail=trail).job

    def job(self, job_id: str) -> Job:
        """The row as it stands."""
        row = self.store.get(job_id)
        assert row is not None
        return row  # type: ignore[no-any-return]

    def work(self) -> int:
        """Run every hint that has appeared, one after the other; return how many there were."""
        ready = self.hints.take_ready()
        for sent in ready:
            self.run(sent.hint)
        return len(ready)

    def run(self, hint: Hint | str, seconds_left: float = 300.0) -> None:
        """Run one hint."""
        self.execution.run(Hint(hint) if isinstance(hint, str) else hint, lambda: seconds_left)

    def settle(self, minutes: int = 600) -> None:
        """Let time pass, with workers, notifiers and the repairer at their posts, until nothing is left to do."""
        for _ in range(minutes):
            self.work()
            self.tell()
            self.repair.run_once()
            if not self.hints.sent and not self.notices.sent and not list(self.store.due(2**62, 1)):
                return
            self.clock.advance(60)

    def tell(self) -> None:
        """Deliver every notice that has appeared."""
        for telling in self.notices.take_ready(self.clock.now()):
            self.delivery.deliver(telling)
