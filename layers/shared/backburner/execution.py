"""Running jobs: a hint in, an ended (or put back) job out."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from backburner.errors import (
    Abandoned,
    ContextLengthExceeded,
    InternalFault,
    Interrupted,
    JobFailed,
    ModelNotFound,
    Overloaded,
    PayloadMissing,
    PortUnavailable,
    ProviderFault,
    ProviderRefusedRequest,
    ProviderTimeout,
    RateLimited,
    WouldMissDeadline,
)
from backburner.lifecycle import RENEW_MS, Lifecycle, lapses_at
from backburner.models import (
    INLINE_BYTES_MAX,
    Answer,
    Attempt,
    EpochMs,
    Hint,
    Job,
    JobRequest,
    JobStatus,
    Lane,
    Later,
    Limits,
    Message,
    ModelInfo,
    Payload,
    Question,
    Slot,
    Usage,
    canonical_json,
)
from backburner.ports import (
    Audience,
    Background,
    Catalogue,
    Chance,
    Clock,
    Conflict,
    Conversations,
    DeadLetterQueue,
    Deltas,
    Journal,
    Limiter,
    PayloadStore,
    Provider,
)

CLOSING_SECONDS = 10.0
"""Kept free at the end of an invocation: to store the answer, with its retries, and to return."""
TOKEN_BYTES = 4
"""Bytes of English text in a token, roughly: enough to tell whether a request can fit a model."""
CALL_SECONDS_MIN = 5.0
"""With less time than this left, a job is not begun; nothing would come of it but a paid call without an answer."""
SLEEP_MS_MAX = 10_000
"""A shorter wait for the provider's limits is slept, with the batch's other jobs; a longer one holds no concurrency."""
LOOK_MS_MIN = 300_000
"""A job far back in the line looks again when half its wait is over, but not before so long: the limit may have been
raised."""
EARLY_MS = 1_000
"""Delays are whole seconds: a job comes back a little before its turn, and waits for it in the worker."""
HEAD_START_MS = 2_000
"""The hint of a reserved slot appears so much earlier: delayed messages and pollers are not punctual."""
GRACE_MS = 2_000
"""A slot that is later than this is gone: too many late ones at once would break the limit."""
KEEPER_SECONDS = 1.0
"""How often the keeper looks whether a lease must be renewed."""

type TimeLeft = Callable[[], float]
"""Seconds until the invocation is ended from outside."""


@dataclass
class Lease:
    """A job in hand. `lost` is set once it is somebody else's, or has ended; `ended` tells the latter.

    handle: the provider's name for the call, where it goes on without us; called_at: when the call began.
    audience: who gets the answer while it is written, if anybody. slot: leave to make the call.
    due_at: the row's, as last seen.
    """

    job: Job
    renew_at: int
    ended: bool = False
    handle: str | None = None
    called_at: EpochMs | None = None
    audience: Audience | None = None
    slot: Slot | None = None
    due_at: EpochMs | None = None
    lost: threading.Event = field(default_factory=threading.Event)


class Leases:
    """The leases of one process. `tick` renews them; a thread calls it, or a simulation does."""

    def __init__(self, lifecycle: Lifecycle, clock: Clock, journal: Journal) -> None:
        self._lifecycle = lifecycle
        self._clock = clock
        self._journal = journal
        self._held: dict[int, Lease] = {}
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, job: Job) -> Iterator[Lease]:
        """Keep the job's lease while the block runs."""
        lease = Lease(job, renew_at=self._clock.now() + RENEW_MS, handle=job.handle, due_at=job.due_at)
        with self._lock:
            self._held[id(lease)] = lease
        try:
            yield lease
        finally:
            with self._lock:
                self._held.pop(id(lease), None)

    @property
    def held(self) -> tuple[Lease, ...]:
        """The leases held now."""
        with self._lock:
            return tuple(self._held.values())

    def tick(self) -> None:
        """Renew what is due for renewal; learn which jobs are ours no more."""
        for lease in self.held:
            now = self._clock.now()
            if now < lease.renew_at or lease.lost.is_set():
                continue
            try:
                row = self._lifecycle.renew(lease.job, lease.due_at)
                lease.renew_at, lease.due_at = now + RENEW_MS, row.due_at
                if lease.audience is not None:
                    lease.audience.seen(row)
            except Conflict as conflict:
                lease.ended = conflict.current is None or conflict.current.status.is_final
                lease.lost.set()
            except PortUnavailable:
                self._journal.note("lease_unrenewed", job_id=lease.job.job_id)  # tried again at the next tick


@dataclass(frozen=True)
class Execution:
    """The worker's use cases. `providers` gives a provider by name and imports its SDK only then."""

    lifecycle: Lifecycle
    payloads: PayloadStore
    dead_letters: DeadLetterQueue
    providers: Callable[[str], Provider]
    catalogue: Catalogue
    price: Callable[[ModelInfo, Usage], int]
    clock: Clock
    chance: Chance
    journal: Journal
    leases: Leases
    limiter: Limiter
    default_model: str
    default_max_tokens: int = 1024
    call_seconds: float = 240.0
    fallback_models: tuple[str, ...] = ()
    deltas: Deltas | None = None
    conversations: Callable[[], Conversations] | None = None
    """Where jobs asked in Slack find what was said before; made, and its SDK imported, when the first one comes."""

    # ── Batches ───────────────────────────────────────────────────────────────────────────────────────────────────

    def run_batch(self, hints: Mapping[str, Hint], time_left: TimeLeft) -> list[str]:
        """Run the hints, by message id, at once; return the ids of the messages that must come back.

        A job that has lost a worker before runs after the others and by itself, so that it cannot take them along.
        """
        together = [name for name, hint in hints.items() if not hint.alone]
        alone = [name for name, hint in hints.items() if hint.alone]
        failed: list[str] = []
        with self._keeper(), ThreadPoolExecutor(max_workers=max(1, len(together)), thread_name_prefix="job") as pool:
            runs = {name: pool.submit(self.run, hints[name], time_left) for name in together}
            failed += [name for name, run in runs.items() if not self._went_well(name, run)]
            for name in alone:
                if not self._went_well(name, pool.submit(self.run, hints[name], time_left)):
                    failed.append(name)
        return failed

    def _went_well(self, name: str, run: Future[None]) -> bool:
        error = run.exception()
        if error is not None:
            self.journal.note("message_returned", message_id=name, error=type(error).__name__)
        return error is None

    @contextmanager
    def _keeper(self) -> Iterator[None]:
        done = threading.Event()

        def keep() -> None:
            while not done.wait(KEEPER_SECONDS):
                self.leases.tick()

        keeper = threading.Thread(target=keep, name="lease-keeper", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join()

    def stop(self) -> None:
        """The process is about to be ended: hand back every job in hand."""
        for lease in self.leases.held:
            lease.lost.set()
            try:
                if lease.called_at is None:  # it only waited, which costs no attempt
                    self.lifecycle.park(lease.job, self.clock.now(), place=lease.job.place)
                else:
                    self._conclude(lease, Interrupted(), None)
            except (Conflict, PortUnavailable):
                self.journal.note("job_left_behind", job_id=lease.job.job_id)  # its lease lapses; the repairer acts

    def reject(self, body: str, lane: Lane) -> None:
        """Put a message that is no hint into the dead-letter queue."""
        self.journal.note("hint_rejected", lane=lane)
        self.dead_letters.bury(body, reason="malformed_hint", detail="not a hint", lane=lane, client_id=None)

    # ── One hint ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, hint: Hint, time_left: TimeLeft) -> None:
        """Do what the row says, if the row says anything. Returning means that the message is done with.

        Raises PortUnavailable when nothing could be decided.
        """
        if time_left() < CLOSING_SECONDS + CALL_SECONDS_MIN:
            self._leave(hint)
            return
        job = self._take(hint)
        if job is None:
            return
        with self.journal.about(**job.about):
            listening = self.deltas.listening(job) if self.deltas else nullcontext()
            with self.leases.hold(job) as lease, listening as lease.audience:
                self._attempt_job(lease, time_left)

    def _leave(self, hint: Hint) -> None:
        """There is too little time left in this invocation: leave the job to the next, at no cost in receives."""
        job = self.lifecycle.store.get(hint.job_id)
        if job is not None and (not job.status.is_final or hint.died == job.claims):
            self.lifecycle.remind(job, alone=hint.alone)

    def _take(self, hint: Hint) -> Job | None:
        owner = self.chance.name()
        try:
            job = self.lifecycle.claim(hint.job_id, owner)
        except Conflict as conflict:
            row = conflict.current
        else:
            wait_ms = max(0, (job.claimed_at or job.available_at) - job.available_at)
            self.journal.note("job_claimed", **job.about, lane=job.lane, wait_ms=wait_ms)
            return job
        try:
            return self._take_otherwise(hint, row, owner)
        except Conflict:
            return None  # somebody else was faster

    def _take_otherwise(self, hint: Hint, row: Job | None, owner: str) -> Job | None:
        """What to do with a hint whose job is not simply waiting."""
        now = self.clock.now()
        if row is None:
            # A hint is sent after its row is durable and lives shorter than it, so this one was never a job's.
            self.dead_letters.bury(hint, reason="unknown_job", detail="no such job", lane=Lane.STANDARD, client_id=None)
            return None
        if row.has_expired(now):
            return None
        match row.status:
            case JobStatus.QUEUED if row.deadline_at <= now:
                self.lifecycle.expire(row)
            case JobStatus.QUEUED:  # not yet; or only by the clock's word at the claim, a moment ago
                self.lifecycle.remind(row, alone=hint.alone)
            case JobStatus.PROCESSING if lapses_at(row) <= now:
                if not self.lifecycle.is_lost_for_good(row):
                    taken = self.lifecycle.take_over(row, owner)
                    self.journal.note("job_repaired", job_id=row.job_id, kind="taken_over")
                    return taken
                self.lifecycle.lose(row)
            case JobStatus.FAILED if hint.died is not None and hint.died == row.claims:
                revived = self.lifecycle.revive(row, owner)
                self.journal.note("job_revived", job_id=row.job_id)
                return revived
            case _:
                self.journal.note("hint_dropped", job_id=row.job_id, status=row.status)
        return None

    def _attempt_job(self, lease: Lease, time_left: TimeLeft) -> None:
        job = lease.job
        question: Question | None = None
        try:
            question = self._question(job)
            answer = self._call(lease, question, time_left)
        except JobFailed as error:
            self._conclude(lease, error, question)
        except PortUnavailable as error:  # the request, the key or the limits could not be read, so no call was made
            with suppress(Conflict):
                self.lifecycle.release(job, error)
        except Exception as error:  # noqa: BLE001  a fault of ours must not leave the job to its lease, nor run it for ever
            self.journal.note("job_faulted", job_id=job.job_id, error=type(error).__name__)
            self._conclude(lease, InternalFault(), question)
        else:
            if answer is not None:
                attempt = self._attempt(lease, "completed", question, answer)
                try:
                    self._keep(job, answer, attempt)  # first of all: it is paid for
                finally:
                    self._settle(lease, question.model, answer.usage, answer.seen, attempt.ended_at - attempt.began_at)

    # ── Within the provider's limits ──────────────────────────────────────────────────────────────────────────────

    def _call(self, lease: Lease, question: Question, time_left: TimeLeft) -> Answer | None:
        """Call the provider when its limits allow it; None if the job was parked until they do."""
        job = lease.job
        slot = job.slot if lease.handle is None else None
        patient_until = self.clock.now() + SLEEP_MS_MAX
        while True:
            if lease.handle is None:  # else the call was made before, and is only waited for
                slot = self._slot(lease, question, slot, patient_until, time_left)
                if slot is None:
                    return None
            lease.slot = slot
            try:
                answer = self._ask(lease, question, time_left)
            except RateLimited as error:
                if error.usage is not None or self._next_model(job, error, question) is not None:
                    raise
                # Refused is not failed: the call cost nothing, and is made again once the provider allows it.
                self._attempt(lease, error.code, question, error)
                if lease.handle is not None:
                    self._park(lease, self.clock.now() + round(1000 * (error.retry_after_seconds or 1)))
                    return None
                lease.called_at, lease.slot, slot = None, None, None
                lease.job = replace(job, parked_since=self.clock.now())  # the wait for another slot begins
            else:
                return answer

    def _ask(self, lease: Lease, question: Question, time_left: TimeLeft) -> Answer:
        """Make one call, and tell the limiter what became of it. Raises JobFailed."""
        job, model = lease.job, question.model
        timeout = min(self.call_seconds, time_left() - CLOSING_SECONDS)
        if timeout <= 0:
            raise ProviderTimeout("no time was left for the call")
        provider = self.providers(model.provider)
        lease.called_at = self.clock.now()
        try:
            return provider.ask(
                question,
                timeout_seconds=timeout,
                abandoned=lease.lost.is_set,
                background=Background(lease.handle, partial(self._remember, lease)) if job.background else None,
                said=lease.audience.say if lease.audience is not None else None,
            )
        except JobFailed as error:
            if isinstance(error, RateLimited):
                self.limiter.refused(model, error.retry_after_seconds, seen=error.seen)
            elif isinstance(error, Overloaded | ProviderFault):
                self.limiter.failed(model)
            if error.usage is not None:
                self._settle(lease, model, error.usage, error.seen, self.clock.now() - lease.called_at)
            raise

    def _settle(self, lease: Lease, model: ModelInfo, usage: Usage, seen: Limits | None, call_ms: int) -> None:
        """Tell the limiter what a call used. One that was attached to had its slot, and is settled, elsewhere."""
        if lease.slot is not None:
            self.limiter.settle(model, lease.slot, usage, call_ms=call_ms, seen=seen)

    def _slot(
        self, lease: Lease, question: Question, slot: Slot | None, patient_until: EpochMs, time_left: TimeLeft
    ) -> Slot | None:
        """Wait for leave to call; None if the wait is long, so that the job was parked. Raises WouldMissDeadline."""
        job, model = lease.job, question.model
        if slot is not None and (slot.model != model.name or slot.start_at + GRACE_MS < self.clock.now()):
            slot = None
        while True:
            now = self.clock.now()
            spare_ms = round(1000 * (time_left() - CLOSING_SECONDS - CALL_SECONDS_MIN))
            patience_ms = max(0, min(patient_until - now, spare_ms))
            if slot is None:
                got = self.limiter.take(
                    question, lane=job.lane, client_id=job.client_id, place=job.place, patience_ms=patience_ms
                )
                if isinstance(got, Later):
                    self._refuse_to_miss(job, got.start_at)
                    look_at = now + max(LOOK_MS_MIN, (got.place - now) // 2)
                    self._park(lease, min(got.place - EARLY_MS, look_at), place=got.place)
                    return None
                slot = got
                if slot.start_at >= job.deadline_at:
                    self.limiter.give_back(slot)
                    self._refuse_to_miss(job, slot.start_at)
            wait_ms = slot.start_at - self.clock.now()
            if wait_ms > min(SLEEP_MS_MAX, spare_ms):
                self._park(lease, slot.start_at - HEAD_START_MS, slot=slot)
                return None
            if self._sleeps_until(lease, slot) and (wait_ms <= 0 or self.limiter.is_open(slot)):
                return slot
            slot = None

    def _sleeps_until(self, lease: Lease, slot: Slot) -> bool:
        """Sleep until the slot. Raises Abandoned, and leaves the slot to others, if the job is withdrawn meanwhile."""
        while True:
            if lease.lost.is_set():
                self.limiter.give_back(slot)
                raise Abandoned
            wait_ms = slot.start_at - self.clock.now()
            if wait_ms <= 0:
                return True
            self.clock.sleep(min(wait_ms, 1_000) / 1000)

    def _refuse_to_miss(self, job: Job, start_at: EpochMs) -> None:
        """Fail a job now that can only fail later. Raises WouldMissDeadline."""
        if start_at >= job.deadline_at:
            raise WouldMissDeadline(
                f"It could not start before its deadline; it could have started at {start_at // 1000} (Unix time)."
            )

    def _park(self, lease: Lease, until: EpochMs, *, slot: Slot | None = None, place: EpochMs | None = None) -> None:
        try:
            self.lifecycle.park(lease.job, until, slot=slot, place=place)
        except (Conflict, PortUnavailable) as error:
            if slot is not None:
                self.limiter.give_back(slot)
            if isinstance(error, PortUnavailable):
                raise

    def _remember(self, lease: Lease, handle: str) -> None:
        """Note the name of a call that was just begun in the background."""
        lease.handle = handle
        try:
            self.lifecycle.insist(lambda: self.lifecycle.remember(lease.job, handle))
        except Conflict:
            lease.lost.set()
            lease.ended = True  # whoever has the job now does not know of this call
        except PortUnavailable:
            self.journal.note("call_unremembered", job_id=lease.job.job_id)  # it is answered now, or asked again

    def _keep(self, job: Job, answer: Answer, attempt: Attempt) -> None:
        """Store a paid answer, or at least what it cost."""
        body = canonical_json({"text": answer.text, "finish_reason": answer.finish_reason,
                               "model": answer.model, "provider": answer.provider})  # fmt: skip
        payload = Payload(body)
        if len(body.encode()) > INLINE_BYTES_MAX:
            key = f"results/{job.job_id}/{job.claims}"
            payload = Payload(None, key)
            try:
                self.lifecycle.insist(lambda: self.payloads.put(key, body))
            except PortUnavailable:
                self._discard(job, attempt)  # its cost is true all the same
                raise
        if self.lifecycle.complete(job, payload, attempt) is None:
            self._discard(job, attempt)

    def _conclude(self, lease: Lease, error: JobFailed, question: Question | None) -> None:
        """End an attempt that brought no answer: try again later, ask another model, or fail."""
        job = lease.job
        if isinstance(error, WouldMissDeadline | Abandoned) and lease.called_at is None:
            question_asked = None  # nobody was asked anything
        else:
            question_asked = question
        attempt = self._attempt(lease, error.code, question_asked, error)
        try:
            if isinstance(error, Abandoned):
                self._stop_call(lease, question, wanted=not lease.ended)
            elif self.lifecycle.put_back(job, error, attempt, handle=lease.handle if error.goes_on else None):
                return
            elif (index := self._next_model(job, error, question)) is not None:
                self.lifecycle.fall_back(job, index, error, attempt)
                self._stop_call(lease, question, wanted=False)
                return
            elif self.lifecycle.fail(job, error, attempt) is not None:
                self._stop_call(lease, question, wanted=False)
                return
        except Conflict:
            pass
        self._discard(job, attempt)

    def _stop_call(self, lease: Lease, question: Question | None, *, wanted: bool) -> None:
        """End a call that goes on at the provider and that nobody will attach to."""
        if lease.handle is not None and question is not None and not wanted:
            try:
                self.providers(question.model.provider).cancel(lease.handle)
            except (JobFailed, PortUnavailable) as error:
                self.journal.note("call_left_running", job_id=lease.job.job_id, error=error.code)

    def _next_model(self, job: Job, error: JobFailed, question: Question | None) -> int | None:
        """The index of the next model that may serve what this one could not, and that the request fits."""
        if question is None or not error.elsewhere or self.clock.now() >= job.deadline_at:
            return None
        needed = -(-question.input_bytes // TOKEN_BYTES) + question.max_tokens
        if isinstance(error, ContextLengthExceeded):
            needed = max(needed, question.model.context_tokens + 1)
        names = self._models(self._request(job))
        for index in range(job.model_index + 1, len(names)):
            model = self.catalogue.find(names[index])
            settable = question.temperature is None or (model is not None and model.temperature)
            if model is not None and model.context_tokens >= needed and settable:
                return index
        return None

    def _models(self, request: JobRequest) -> tuple[str, ...]:
        """The model asked for, and its fallbacks in turn."""
        fallbacks = self.fallback_models if request.fallback_models is None else tuple(request.fallback_models)
        return (request.model or self.default_model, *fallbacks)

    def _discard(self, job: Job, attempt: Attempt) -> None:
        """The job is not ours any more; what the call cost is still true."""
        self.journal.note("attempt_discarded", job_id=job.job_id, attempt=job.attempts, outcome=attempt.outcome)
        if attempt.usage is not None:
            self.lifecycle.record_discarded(job, replace(attempt, outcome="discarded"))

    def _attempt(
        self, lease: Lease, outcome: str, question: Question | None = None, got: Answer | JobFailed | None = None
    ) -> Attempt:
        job = lease.job
        began_at = lease.called_at or job.claimed_at or job.created_at
        usage = got.usage if got is not None else None
        attempt = Attempt(
            number=job.attempts,
            outcome=outcome,
            began_at=began_at,
            ended_at=self.clock.now(),
            provider=question.model.provider if question else None,
            model=question.model.name if question else None,
            request_id=got.request_id if got is not None else None,
            first_token_ms=got.first_token_ms if isinstance(got, Answer) else None,
            usage=usage,
            cost_micro_usd=self.price(question.model, usage) if question and usage else None,
        )
        if question is not None:  # else nothing was asked of anybody
            self.journal.note(
                "call_ended",
                job_id=job.job_id,
                client_id=job.client_id,
                lane=job.lane,
                attempt=job.attempts,
                outcome=outcome,
                provider=attempt.provider,
                model=attempt.model,
                request_id=attempt.request_id,
                call_ms=attempt.ended_at - began_at,
                slot_wait_ms=max(0, began_at - (job.parked_since or job.claimed_at or began_at)),
                first_token_ms=attempt.first_token_ms,
                input_tokens=usage.input_tokens if usage else None,
                output_tokens=usage.output_tokens if usage else None,
                cached_tokens=usage.cached_tokens if usage else None,
                cost_micro_usd=attempt.cost_micro_usd,
                limit_micros=lease.slot.costs if lease.slot else None,
            )
        return attempt

    def _request(self, job: Job) -> JobRequest:
        """The stored request. Raises ProviderRefusedRequest if it is gone."""
        try:
            text = job.request.text if job.request.text is not None else self.payloads.get(job.request.key or "")
        except PayloadMissing as error:
            raise ProviderRefusedRequest("the stored request is gone") from error
        return JobRequest.model_validate(json.loads(text))

    def _question(self, job: Job) -> Question:
        """The stored request with the deployment's defaults filled in. Raises JobFailed if it cannot be run."""
        request = self._request(job)
        name = self._models(request)[job.model_index]
        model = self.catalogue.find(name)
        if model is None:
            raise ModelNotFound(f"this deployment no longer knows the model {name!r}")
        messages: Sequence[Message] = request.messages or (Message(role="user", content=request.prompt or ""),)
        if job.slack is not None and self.conversations is not None:
            messages = (*messages[:-1], *self.conversations().recall(job, messages[-1]))
        alike = request.prompt_cache_key or request.system_prompt
        return Question(
            model=model,
            messages=tuple(messages),
            system_prompt=request.system_prompt,
            max_tokens=min(request.max_tokens or self.default_max_tokens, model.output_tokens_max),
            user_hash=_hashed(job.client_id, request.user_id) if request.user_id else None,
            response_format=request.response_format,
            cache_key=_hashed(job.client_id, alike) if alike else None,
            temperature=request.temperature,
        )


def _hashed(client_id: str, text: str) -> str:
    """A name for something of a client's that tells the provider what is the same, not what it is."""
    return hashlib.sha256(canonical_json([client_id, text]).encode()).hexdigest()[:32]
