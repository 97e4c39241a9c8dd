"""Taking requests in: accept, look up, list, cancel."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from backburner.addresses import Receivers, endpoint_of
from backburner.budgets import Budgets, Price, quotas, worst_case
from backburner.errors import (
    ForbiddenAddress,
    IdempotencyConflict,
    InvalidRequest,
    JobInUse,
    JobIsFinal,
    JobNotFound,
    LaneFull,
    PortUnavailable,
    Refusal,
    Unavailable,
)
from backburner.lifecycle import PATIENCE_MS, Lifecycle
from backburner.models import (
    INLINE_BYTES_MAX,
    INTERNAL_TARGETS,
    SLACK,
    WEBHOOK,
    WEBSOCKET,
    Charge,
    Client,
    EpochMs,
    Job,
    JobRequest,
    JobStatus,
    Lane,
    Message,
    Notice,
    Outlook,
    Payload,
    Question,
    Quota,
    SlackOrigin,
    Trail,
    Webhook,
    WebhookRequest,
    canonical_json,
    fingerprint,
)
from backburner.ports import (
    Catalogue,
    Chance,
    Clock,
    Conflict,
    Depths,
    JobStore,
    Journal,
    Limiter,
    PayloadStore,
    Seals,
    WebhookSecrets,
)

WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.25, 1.0
"""Between two looks at a job that somebody waits for: a short answer is told fast, a long wait costs few reads."""
KEPT_APART = frozenset({"metadata", "webhook"})
"""Fields of a request that the row keeps beside it; a webhook's secret is kept sealed."""
FULL_SECONDS = 60
FULL_SECONDS_MAX = 900
"""A full lane is worth another look after a minute, a lane of twice that depth after a quarter of an hour."""


def job_id_for(client_id: str, idempotency_key: str) -> str:
    """The job id that this client's key stands for: 128 bits of SHA-256 over an unambiguous spelling of the two."""
    spelled = canonical_json(["POST /jobs", client_id, idempotency_key])
    return "job_" + hashlib.sha256(spelled.encode()).hexdigest()[:32]


def _asked_in(slack: SlackOrigin | None, job: Job) -> Job:
    return job if slack is None else replace(job, targets=(*job.targets, SLACK), slack=slack)


@dataclass(frozen=True)
class Accepted:
    """An accepted job; `replayed` if an earlier request had created it. `quotas`: where a limited client stands now."""

    job: Job
    replayed: bool
    quotas: tuple[Quota, ...] = ()


@dataclass(frozen=True)
class Webhooks:
    """What taking in a job's webhook needs."""

    receivers: Receivers
    seals: Seals
    secrets: WebhookSecrets

    def check(self, url: str) -> None:
        """Raises InvalidRequest where a URL's form alone tells that nothing may be sent there."""
        try:
            endpoint_of(url, self.receivers)
        except ForbiddenAddress as error:
            raise InvalidRequest(error.message, field="webhook.url") from error

    def taken(self, client: Client, request: WebhookRequest, now: EpochMs) -> Webhook:
        """The webhook as the row keeps it. Raises InvalidRequest if there is no secret to sign it with."""
        if request.secret is not None:
            return Webhook(request.url, self.seals.seal(request.secret), request.style)
        if self.secrets.of(client.client_id, now):
            return Webhook(request.url, style=request.style)
        raise InvalidRequest(
            "required, since your client has no secret of its own: give whsec_ and the base64 of 24 to 64 random bytes,"
            " or have one made by `backburner clients webhook-secret rotate`",
            field="webhook.secret",
        )


@dataclass(frozen=True)
class Submission:
    """The use cases of the HTTP endpoint and of Slack."""

    store: JobStore
    payloads: PayloadStore
    lifecycle: Lifecycle
    catalogue: Catalogue
    clock: Clock
    chance: Chance
    journal: Journal
    budgets: Budgets
    price: Price
    default_model: str
    lanes: frozenset[Lane]
    depths: Depths
    default_max_tokens: int = 1024
    fallback_models: tuple[str, ...] = ()
    lane_depth_max: int = 10_000
    deadline_seconds: int = 86_400
    retention_seconds: int = 14 * 86_400
    background: bool = False
    limiter: Limiter | None = None
    """Only where jobs are shown and cancelled."""
    at_once: Mapping[Lane, int] = field(default_factory=dict)
    """Jobs of a lane that run at once at most."""
    webhooks: Webhooks | None = None
    """Only where they may be asked for."""

    def accept(
        self,
        client: Client,
        request: JobRequest,
        idempotency_key: str | None = None,
        *,
        slack: SlackOrigin | None = None,
        trail: Trail | None = None,
    ) -> Accepted:
        """Make the request durable: row first, then hint. One conditional write is the whole idempotency check.

        slack: where it was asked, if in Slack; its answer is told there. trail: of this request.
        Raises Refusal: InvalidRequest, IdempotencyConflict, LaneFull, for one of the client's limits, or Unavailable
        when it is not known to be durable.
        """
        self.check(request)
        if request.webhook is not None:
            if self.webhooks is None:
                raise InvalidRequest("not taken here", field="webhook")
            self.webhooks.check(request.webhook.url)
        try:
            return self._accept(client, request, idempotency_key, slack, trail)
        except PortUnavailable as error:
            raise Unavailable from error

    def _accept(
        self,
        client: Client,
        request: JobRequest,
        idempotency_key: str | None,
        slack: SlackOrigin | None,
        trail: Trail | None,
    ) -> Accepted:
        stored = request.canonical(leave_out=KEPT_APART)
        new = replace(_asked_in(slack, self._job(client, request, stored, idempotency_key)), trail=trail)
        try:
            new, standing, left = self._store(client, new, stored)
        except Refusal as refusal:
            # A replay adds nothing, so it is answered however full the lane and however little is left to the client.
            standing, left = self._known(new, idempotency_key), refusal.quotas
            if standing is None:
                self.journal.note(
                    "job_refused", code=refusal.code, client_id=client.client_id, lane=new.lane, ahead=new.ahead
                )
                raise
        if standing is None or standing.owner == new.owner:  # the latter: only the reply to the first try was lost
            self.lifecycle.hint(new)
            self.journal.note("job_accepted", **new.about, client_id=client.client_id, lane=new.lane)
            return Accepted(new, replayed=False, quotas=left)
        if standing.fingerprint != new.fingerprint:
            raise IdempotencyConflict(field="Idempotency-Key")
        if standing.status is JobStatus.QUEUED and standing.due_at is not None and standing.due_at <= new.created_at:
            with suppress(Conflict):  # another replay or a worker was faster
                self.lifecycle.resend(standing)  # its hint is known to be missing, or long unanswered
        self.journal.note("job_replayed", job_id=new.job_id, client_id=client.client_id, status=standing.status)
        return Accepted(standing, replayed=True, quotas=left)

    def _store(self, client: Client, new: Job, text: str) -> tuple[Job, Job | None, tuple[Quota, ...]]:
        """Store the job, unless its key names another; the job as stored, that other one, and what is left.

        Raises Refusal, PortUnavailable.
        """
        # A lane of unknown depth takes jobs: whoever cannot read it now could not tell the caller when to come back.
        depth = (new.ahead or 0) + (self.depths.put_off(new.lane) or 0)
        if depth > self.lane_depth_max:
            raise LaneFull(
                f"{depth} jobs wait in the lane {new.lane}, which takes {self.lane_depth_max}.",
                retry_after_seconds=self._retry_after_seconds(depth),
            )
        limits = client.limits
        tally = None if limits is None else self.budgets.look(client.client_id, limits, new.charge)
        if new.request.key is not None:
            self.payloads.put(new.request.key, text)  # before the row, which must never point at nothing
        if limits is None:
            return new, self.store.add(new, self.clock.now()), ()
        new, standing, tally = self.budgets.admit(new, limits, tally)
        return new, standing, quotas(limits, tally, self.clock.now())

    def _known(self, new: Job, idempotency_key: str | None) -> Job | None:
        """The job that the key names already."""
        standing = None if idempotency_key is None else self.store.get(new.job_id)
        return None if standing is None or standing.has_expired(self.clock.now()) else standing

    def _retry_after_seconds(self, depth: int) -> int:
        """A rough estimate that grows with the excess; with jitter, or all who were refused would be back at once."""
        seconds = FULL_SECONDS + (FULL_SECONDS_MAX - FULL_SECONDS) * (depth - self.lane_depth_max) / self.lane_depth_max
        return min(FULL_SECONDS_MAX, round(self.chance.uniform(seconds, 1.5 * seconds)))

    def say(self, client: Client, key: str, text: str, *, slack: SlackOrigin) -> None:
        """Answer without a call, as durably as with one: a job that is born completed, and told like any other.

        Raises Unavailable when it is not known to be durable.
        """
        request = JobRequest(prompt="(answered without a call)", priority="interactive")  # its depth, Slack may read
        result = {"text": text, "finish_reason": "stop", "model": "none", "provider": "none"}
        asked = _asked_in(slack, self._job(replace(client, limits=None), request, request.canonical(), key))
        born = replace(
            asked,
            status=JobStatus.COMPLETED,
            finished_at=asked.created_at,
            result=Payload(canonical_json(result)),
            outbox=tuple(Notice(target) for target in asked.targets),
        )
        try:
            if self.store.add(born, asked.created_at) is None:
                self.lifecycle.announce(born)
        except PortUnavailable as error:
            raise Unavailable from error

    def knows(self, client: Client, key: str) -> bool:
        """Whether the client's key names a job."""
        job = self.store.get(job_id_for(client.client_id, key))
        return job is not None and not job.has_expired(self.clock.now())

    def request_of(self, job: Job) -> JobRequest:
        """What was asked. Raises PayloadMissing."""
        text = job.request.text if job.request.text is not None else self.payloads.get(job.request.key or "")
        return JobRequest.model_validate(json.loads(text))

    def find(self, client: Client, job_id: str) -> Job:
        """The client's job. Raises JobNotFound, also for somebody else's and for an expired one."""
        job = self.store.get(job_id)
        if job is None or job.client_id != client.client_id or job.has_expired(self.clock.now()):
            raise JobNotFound
        return job

    def outlook(self, job: Job) -> Outlook | None:
        """How many jobs of its lane stand before a waiting job at most, and about when it may start.

        Approximations: as many as stood before it when it was accepted, or as wait now if these are fewer; each taken
        for a job like this one. None for a job that does not wait, or where what is needed cannot be read.
        """
        if job.status is not JobStatus.QUEUED or self.limiter is None:
            return None
        now = self.clock.now()
        if job.slot is not None:
            return Outlook(None, max(now, job.slot.start_at))
        if job.claims > 0:  # a worker has had it: it waits for its turn or for a retry, not behind others
            return Outlook(None, max(now, job.available_at, job.place or 0))
        try:
            waiting = self.depths.waiting(job.lane)
            counts = [count for count in (job.ahead, waiting) if count is not None]
            ahead = min(counts, default=0)
            question = self._question(job)
            starts_at = self.limiter.estimate(question, ahead=ahead, at_once=self.at_once.get(job.lane, 1))
        except (PortUnavailable, LookupError):
            return None
        return Outlook(ahead + 1 if counts else None, max(starts_at, job.available_at))

    def _question(self, job: Job) -> Question:
        """What the provider will be asked, as far as its size goes.

        Raises LookupError for a model now unknown, and for a request too large to be read for a guess.
        """
        if job.request.text is None:
            raise LookupError(job.request.key)
        request = JobRequest.model_validate(json.loads(job.request.text))
        model = self.catalogue.find(request.model or self.default_model)
        if model is None:
            raise LookupError(request.model)
        return Question(
            model=model,
            messages=tuple(request.messages or (Message(role="user", content=request.prompt or ""),)),
            system_prompt=request.system_prompt,
            max_tokens=min(request.max_tokens or self.default_max_tokens, model.output_tokens_max),
        )

    def wait(self, client: Client, job_id: str, seconds: float) -> Job:
        """The client's job as soon as it is taken, put back or ended, or after so many seconds. Raises JobNotFound.

        Every look is a strongly consistent read of the row: some 25 in 20 seconds.
        """
        ends_at = self.clock.now() + round(1000 * seconds)
        pause_seconds = WAIT_SECONDS_MIN
        job = first = self.find(client, job_id)
        while (job.status, job.claims) == (first.status, first.claims) and not job.status.is_final:
            left_ms = ends_at - self.clock.now()
            if left_ms <= 0:
                break
            self.clock.sleep(min(pause_seconds, left_ms / 1000))
            pause_seconds = min(1.5 * pause_seconds, WAIT_SECONDS_MAX)
            job = self.find(client, job_id)
        return job

    def follow(self, job: Job) -> Job:
        """Have the job's listeners told of its end; the row as it is then, final if that has come already.

        Raises JobNotFound.
        """
        try:
            row = self.store.get(job.job_id) if WEBSOCKET in job.targets else self.lifecycle.tell_also(job, WEBSOCKET)
        except Conflict:
            row = None
        if row is None:
            raise JobNotFound
        return row

    def list(
        self, client: Client, status: JobStatus | None, cursor: str | None, limit: int
    ) -> tuple[Sequence[Job], str | None]:
        """The client's unexpired jobs, newest first, a page at a time."""
        jobs, following = self.store.list_by_client(client.client_id, status, cursor, limit)
        now = self.clock.now()
        return [job for job in jobs if not job.has_expired(now)], following

    def cancel(self, client: Client, job_id: str) -> Job:
        """Cancel the client's job and return it as it then is. Cancelling twice is no error. Raises JobIsFinal."""
        job = self.find(client, job_id)
        if job.status is not JobStatus.CANCELLED:
            if self.lifecycle.cancel(job):
                if job.slot is not None and self.limiter is not None:
                    self.limiter.give_back(job.slot)
            elif (job := self.find(client, job_id)).status is not JobStatus.CANCELLED:
                raise JobIsFinal(f"The job is {job.status}; it can no longer be cancelled.")
        return self.find(client, job_id)

    def erase(self, client: Client, job_id: str) -> None:
        """Remove the client's job, its request and its answer before their time. Raises JobNotFound, JobInUse."""
        job = self.find(client, job_id)
        if not job.status.is_final:
            raise JobInUse(f"The job is {job.status}; cancel it first.")
        if any(notice.target in INTERNAL_TARGETS for notice in job.pending):
            raise JobInUse
        try:
            self.lifecycle.erase(job)
        except Conflict as conflict:
            raise JobInUse from conflict
        for payload in (job.request, job.result):
            if payload is not None and payload.key is not None:
                try:
                    self.payloads.remove(payload.key)
                except PortUnavailable:  # the store's own rule removes it in its time
                    self.journal.note("payload_left", job_id=job_id)

    def check(self, request: JobRequest) -> None:
        """What the request alone cannot know: this deployment's models and lanes. Raises InvalidRequest."""
        name = request.model or self.default_model
        model = self.catalogue.find(name)
        if model is None:
            known = ", ".join(self.catalogue.names())
            raise InvalidRequest(f"unknown model {name!r}; this deployment knows: {known}", field="model")
        if request.provider is not None and request.provider != model.provider:
            raise InvalidRequest(f"model {name!r} belongs to provider {model.provider!r}", field="provider")
        for index, fallback in enumerate(request.fallback_models or ()):
            if self.catalogue.find(fallback) is None:
                known = ", ".join(self.catalogue.names())
                raise InvalidRequest(
                    f"unknown model {fallback!r}; this deployment knows: {known}", field=f"fallback_models.{index}"
                )
        if request.max_tokens is not None and request.max_tokens > model.output_tokens_max:
            raise InvalidRequest(f"model {name!r} writes at most {model.output_tokens_max} tokens", field="max_tokens")
        if request.temperature is not None and not model.temperature:
            raise InvalidRequest(f"model {name!r} has none", field="temperature")
        if request.lane not in self.lanes:
            raise InvalidRequest(f"this deployment has no lane {request.lane}", field="priority")

    def _job(self, client: Client, request: JobRequest, stored: str, idempotency_key: str | None) -> Job:
        now = self.clock.now()
        nonce = self.chance.name()
        job_id = f"job_{nonce}" if idempotency_key is None else job_id_for(client.client_id, idempotency_key)
        print_ = fingerprint(request.canonical())
        webhook = None
        if request.webhook is not None and self.webhooks is not None:
            webhook = self.webhooks.taken(client, request.webhook, now)
        large = len(stored.encode()) > INLINE_BYTES_MAX
        deadline_seconds = request.deadline_seconds or self.deadline_seconds
        return Job(
            job_id=job_id,
            client_id=client.client_id,
            lane=request.lane,
            status=JobStatus.QUEUED,
            fingerprint=print_,
            request=Payload(None, f"requests/{job_id}/{print_}") if large else Payload(stored),
            owner=nonce,
            created_at=now,
            available_at=now,
            deadline_at=now + deadline_seconds * 1000,
            deadline_seconds=deadline_seconds,
            expires_at=now // 1000 + deadline_seconds + self.retention_seconds,
            due_at=now + min(PATIENCE_MS, deadline_seconds * 1000),
            background=self.background if client.background is None else client.background,
            webhook=webhook,
            metadata=None if request.metadata is None else canonical_json(request.metadata),
            ahead=self.depths.waiting(request.lane),
            charge=self._charge(client, request),
            targets=(() if webhook is None else (WEBHOOK,)) + ((WEBSOCKET,) if request.stream else ()),
        )

    def _charge(self, client: Client, request: JobRequest) -> Charge | None:
        """The worst case of a client that has a budget."""
        if client.limits is None or not client.limits.has_budget:
            return None
        fallbacks = self.fallback_models if request.fallback_models is None else tuple(request.fallback_models)
        models = [self.catalogue.find(name) for name in (request.model or self.default_model, *fallbacks)]
        known = [model for model in models if model is not None]
        return worst_case(request, known, request.max_tokens or self.default_max_tokens, self.price)
