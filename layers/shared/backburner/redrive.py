"""What an operator does with dead jobs: look, retry as they are or mended, discard.

The rows say what is dead; a letter is only what draws the operator's eye. So a job is retried or discarded by its row,
by one conditional write, and letters that then ask for nothing any more are swept up afterwards: by this run, or by the
next one if it is cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backburner.errors import InvalidRequest
from backburner.intake import validated
from backburner.lifecycle import Lifecycle
from backburner.models import (
    INLINE_BYTES_MAX,
    DeadLetter,
    EpochMs,
    Job,
    JobRequest,
    JobStatus,
    Payload,
    fingerprint,
)
from backburner.ports import Clock, DeadLetterQueue, JobStore, PayloadStore

MENDABLE = frozenset(
    {
        "prompt", "messages", "system_prompt", "model", "provider", "fallback_models", "response_format", "max_tokens",
        "user_id",
    }
)  # fmt: skip
"""What a provider is asked. The rest of a request is the row's: its lane, its deadline, whom to tell."""
SECONDS = 60
"""Letters looked at are out of others' sight for so long at most; they are put back as soon as all are seen."""
MISSES_MAX = 8
"""Receives that bring nothing new, each a second long: more than the repairer has letters in its hand."""
VARIES = re.compile(r"\b(?:[a-z]+_)?[0-9a-f]*[0-9][0-9a-z]{5,}\b|[0-9]+", re.IGNORECASE)
"""What differs between errors of one cause: ids and numbers."""

type Check = Callable[[JobRequest], None]


@dataclass(frozen=True)
class Dead:
    """A letter, and the row that it speaks of: None if there is none (any more)."""

    letter: DeadLetter
    job: Job | None

    @property
    def cause(self) -> tuple[str, str]:
        """Code and words of what it died of, the same for all that died of it."""
        return self.letter.reason or "unexplained", VARIES.sub("…", self.letter.detail)

    def is_settled(self, now: EpochMs) -> bool:
        """Whether the letter asks for nothing any more: its job runs again, was discarded, or has expired."""
        hint = self.letter.hint
        if hint is None or hint.died is None or self.letter.reason is None:
            return False
        job = self.job
        return (
            job is None
            or job.has_expired(now)
            or (job.status, job.claims) != (JobStatus.FAILED, hint.died)
            or job.discarded_at is not None
        )


@dataclass(frozen=True)
class Redrive:
    """The operator's use cases. check: what a deployment asks of a request; raises InvalidRequest."""

    store: JobStore
    payloads: PayloadStore
    lifecycle: Lifecycle
    dead_letters: DeadLetterQueue
    clock: Clock
    check: Check

    def letters(self) -> Iterator[Dead]:
        """All letters, each once. Those that were not removed meanwhile are put back when the iterator ends."""
        seen: dict[str, DeadLetter] = {}
        total, misses = self.dead_letters.count(), 0
        try:
            # Some may be in the repairer's hand, for seconds; and in a long look, letters come back that were seen.
            while misses == 0 or (len(seen) < total and misses <= MISSES_MAX + len(seen) // 100):
                new = [letter for letter in self.dead_letters.receive(SECONDS) if letter.name not in seen]
                misses = 0 if new else misses + 1
                seen |= {letter.name: letter for letter in new}
                for letter in new:
                    yield Dead(letter, None if letter.hint is None else self.store.get(letter.hint.job_id))
        finally:
            self.dead_letters.put_back(list(seen.values()))

    def sweep(self, names: Collection[str] = ()) -> int:
        """Remove the letters that ask for nothing any more, and those of these names; return how many."""
        now, removed = self.clock.now(), 0
        for dead in self.letters():
            if dead.letter.name in names or dead.is_settled(now):
                self.dead_letters.remove(dead.letter)
                removed += 1
        return removed

    def request_of(self, job: Job) -> dict[str, Any]:
        """What a job asks, as far as it can be mended. Raises PayloadMissing."""
        stored = self._stored(job)
        return {name: value for name, value in stored.items() if name in MENDABLE}

    def retry(self, job: Job, changes: Mapping[str, Any] | None = None) -> Job:
        """Queue a failed job for a new run; return the row.

        changes: fields of the request to be set, or taken away where None. The fingerprint stays that of the client's
        own request, so a replay of that is still one.
        Raises InvalidRequest, which names the field; PayloadMissing; Conflict when it is not to be had any more.
        """
        if not changes:
            return self.lifecycle.requeue(job)
        return self.lifecycle.requeue(job, request=self._mended(job, changes))

    def _mended(self, job: Job, changes: Mapping[str, Any]) -> Payload:
        for name in changes:
            if name not in MENDABLE:
                raise InvalidRequest(f"cannot be mended; what can: {', '.join(sorted(MENDABLE))}", field=name)
        fields = {name: value for name, value in {**self._stored(job), **changes}.items() if value is not None}
        request = validated(JobRequest, fields)
        self.check(request)
        text = request.canonical()
        if len(text.encode()) <= INLINE_BYTES_MAX:
            return Payload(text)
        key = f"requests/{job.job_id}/{fingerprint(text)}"
        self.payloads.put(key, text)  # before the row, which must never point at nothing
        return Payload(None, key)

    def _stored(self, job: Job) -> dict[str, Any]:
        text = job.request.text if job.request.text is not None else self.payloads.get(job.request.key or "")
        fields: dict[str, Any] = json.loads(text)
        return fields
