"""What a client may use: requests per minute, and tokens and dollars per day.

A job is charged with its worst case when it is accepted, and with what it really cost once it has ended. Both happen in
one step with the write of the job's row, so no crash leaves a charge without a job or a job without one, and two jobs
accepted at once cannot exceed a budget together. At any moment, a day's tally is the sum of the charges of its jobs.

The windows are fixed: the minutes and days of UTC's clock. A job counts on the day on which it was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from backburner.errors import BudgetUsedUp, Busy, OverBudget, Refusal, TooManyRequests
from backburner.models import Charge, ClientLimits, EpochMs, Job, JobRequest, ModelInfo, Quota, Tally, Usage
from backburner.ports import Chance, Clock, Journal, Moved, Tallies

TOKEN_BYTES = 3
"""Bytes of text in a token, at the least: English has four and more, most other languages three and more."""
TURN_TOKENS = 8
"""What a provider adds to each turn of a conversation."""
MINUTE_SECONDS, DAY_SECONDS = 60, 86_400
NEAR_PERCENT = 80
"""At this share of a budget its client is noted, once a day."""
TRYING_MS_MAX = 1_000
"""So long a request tries to be counted among others of its client; what remains must do for AWS's own times."""
PAUSE_SECONDS = 0.1

type Price = Callable[[ModelInfo, Usage], int]


def day_of(now: EpochMs) -> str:
    """The UTC day, as 2026-11-29: such texts compare as their days do."""
    return datetime.fromtimestamp(now / 1000, UTC).date().isoformat()


def worst_case(request: JobRequest, models: Sequence[ModelInfo], max_tokens: int, price: Price) -> Charge:
    """What one call may use and cost, of the dearest of these models; of no day yet.

    Input is estimated from its bytes. It counts as written to the provider's cache where that is dearer.
    """
    texts = request.texts
    read = -(-sum(len(text.encode()) for text in texts) // TOKEN_BYTES) + TURN_TOKENS * len(texts)
    written = [min(max_tokens, model.output_tokens_max) for model in models]
    costs = [
        price(model, Usage(read, output, cache_write_tokens=cached))
        for model, output in zip(models, written, strict=True)
        for cached in (0, read)
    ]
    return Charge("", read + max(written), max(costs))


def quotas(limits: ClientLimits, tally: Tally | None, now: EpochMs) -> tuple[Quota, ...]:
    """Where the client stands, limit by limit."""
    at = now // 1000
    used = tally or Tally(at // MINUTE_SECONDS, 0, day_of(now))
    minute, today = used.minute >= at // MINUTE_SECONDS, used.day >= day_of(now)
    to_minute, to_midnight = MINUTE_SECONDS - at % MINUTE_SECONDS, DAY_SECONDS - at % DAY_SECONDS
    rows = (
        ("requests", "requests", limits.requests_per_minute, used.requests * minute, MINUTE_SECONDS, to_minute),
        ("tokens", "tokens", limits.tokens_per_day, used.tokens * today, DAY_SECONDS, to_midnight),
        ("cost", "micro-usd", limits.micro_usd_per_day, used.micro_usd * today, DAY_SECONDS, to_midnight),
    )
    return tuple(
        Quota(name, unit, limit, window, max(0, limit - taken), reset)
        for name, unit, limit, taken, window, reset in rows
        if limit is not None
    )


@dataclass(frozen=True)
class Budgets:
    """Counting the jobs of limited clients."""

    tallies: Tallies
    clock: Clock
    chance: Chance
    journal: Journal

    def look(self, client_id: str, limits: ClientLimits, charge: Charge | None) -> Tally | None:
        """The client's tally, if one more job can be accepted by it. Raises Refusal."""
        tally = self.tallies.read(client_id)
        self._counted(limits, tally, charge)
        return tally

    def admit(self, job: Job, limits: ClientLimits, tally: Tally | None) -> tuple[Job, Job | None, Tally | None]:
        """Store the new job and count it; the job as charged, the job that stood there instead, and the tally.

        Raises Refusal, PortUnavailable.
        """
        give_up_at = self.clock.now() + TRYING_MS_MAX
        while True:
            after = self._counted(limits, tally, job.charge)
            charged = replace(job, charge=job.charge and replace(job.charge, day=after.day))
            try:
                standing = self.tallies.admit(charged, self.clock.now(), tally, after, limits)
            except (Moved, Busy) as error:
                if self.clock.now() >= give_up_at:
                    raise Busy from error
                if isinstance(error, Moved):
                    tally = error.current
                else:
                    self.clock.sleep(self.chance.uniform(0.0, PAUSE_SECONDS))
            else:
                if standing is not None:
                    return charged, standing, tally
                if after.warned > (tally.warned if tally and tally.day == after.day else 0):
                    self.journal.note("budget_nearly_used", client_id=job.client_id, percent=after.warned)
                return charged, None, after

    def _counted(self, limits: ClientLimits, tally: Tally | None, charge: Charge | None) -> Tally:
        """The tally with one more job. Raises Refusal, saying where the client stands."""
        now = self.clock.now()
        # Clocks differ by a little, so a row may be of a minute or day that has not begun here.
        minute = max(now // 1000 // MINUTE_SECONDS, tally.minute if tally else 0)
        day = max(day_of(now), tally.day if tally else "")
        after = Tally(minute, 1, day)
        if tally is not None and tally.minute == minute:
            after = replace(after, requests=tally.requests + 1)
        if tally is not None and tally.day == day:
            after = replace(after, tokens=tally.tokens, micro_usd=tally.micro_usd, warned=tally.warned)
        if charge is not None:
            after = replace(after, tokens=after.tokens + charge.tokens, micro_usd=after.micro_usd + charge.micro_usd)
        refusal = self._refusal(limits, after, charge, now)
        if refusal is not None:
            refusal.quotas = quotas(limits, tally, now)
            raise refusal
        shares = (_percent(after.tokens, limits.tokens_per_day), _percent(after.micro_usd, limits.micro_usd_per_day))
        return replace(after, warned=NEAR_PERCENT) if max(shares) >= NEAR_PERCENT else after

    def _refusal(self, limits: ClientLimits, after: Tally, charge: Charge | None, now: EpochMs) -> Refusal | None:
        if charge is not None:
            budgets = (
                (limits.tokens_per_day, charge.tokens, after.tokens, "{:,} tokens".format),
                (limits.micro_usd_per_day, charge.micro_usd, after.micro_usd, _usd),
            )
            for limit, asked, _, words in budgets:
                if limit is not None and asked > limit:
                    return OverBudget(
                        f"This request may use {words(asked)}; your whole daily budget is {words(limit)}."
                    )
            for limit, asked, used, words in budgets:
                if limit is not None and used > limit:
                    left = words(max(0, limit - used + asked))
                    return BudgetUsedUp(
                        f"This request may use {words(asked)}; of your daily budget {left} are left.",
                        retry_after_seconds=DAY_SECONDS - now // 1000 % DAY_SECONDS,
                    )
        if limits.requests_per_minute is not None and after.requests > limits.requests_per_minute:
            return TooManyRequests(
                f"You may send {limits.requests_per_minute} requests a minute.",
                retry_after_seconds=MINUTE_SECONDS - now // 1000 % MINUTE_SECONDS,
            )
        return None


def _usd(micro_usd: int) -> str:
    return f"${micro_usd / 1_000_000:,.6f}"


def _percent(used: int, limit: int | None) -> int:
    return 100 * used // limit if limit else 0
