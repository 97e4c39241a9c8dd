"""The nouns: what a job is, what a caller may ask for, what comes back.

Instants are whole milliseconds since the epoch (`EpochMs`), except `expires_at`, which is in whole seconds because
DynamoDB's TTL reads it. Durations carry their unit in their name.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

type EpochMs = int
type EpochSeconds = int

SCHEMA_VERSION = 1
"""Version of the job row and of the hint. A reader accepts its own version and every earlier one."""

MESSAGES_MAX = 1_000
METADATA_BYTES_MAX = 16 * 1024
INLINE_BYTES_MAX = 100_000
"""A larger text goes to the payload store: DynamoDB bills every write by the row's size and stops at 400 KB."""
FALLBACKS_MAX = 5
MAX_TOKENS_MAX = 1_000_000
DEADLINE_SECONDS_MAX = 7 * 24 * 3600
WEBHOOK_SECRET_PREFIX = "whsec_"  # noqa: S105  a prefix
WEBHOOK_KEY_BYTES = range(24, 65)
"""As Standard Webhooks asks."""
NESTING_MAX = 32
"""Levels of lists and objects in metadata; DynamoDB and most JSON readers stop at 32 or later."""


class JobStatus(StrEnum):
    """Where a job is in its life. A final status never changes, but for a redrive of a dead job.

    queued: accepted, waiting for a worker, a retry or a slot.
    processing: a worker holds the lease and is calling the provider.
    completed: the answer is stored.
    failed: no answer; `error` says why.
    cancelled: the caller withdrew it.
    expired: its deadline passed before it could start.
    """

    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self not in (JobStatus.QUEUED, JobStatus.PROCESSING)


class Lane(StrEnum):
    """A queue of its own with a concurrency of its own."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"


def canonical_json(value: Any) -> str:
    """One spelling for equal JSON values: sorted keys, no spaces, characters as themselves.

    Raises ValueError for numbers that JSON does not have (NaN, Infinity).
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _nesting(value: Any, levels: int = NESTING_MAX) -> None:
    if isinstance(value, dict | list):
        if levels == 0:
            raise ValueError(f"nested more than {NESTING_MAX} levels deep")
        for item in value.values() if isinstance(value, dict) else value:
            _nesting(item, levels - 1)


def _bounded(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    _nesting(value)
    if len(canonical_json(value).encode()) > METADATA_BYTES_MAX:
        raise ValueError(f"larger than {METADATA_BYTES_MAX} bytes")
    return value


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Literal["user", "assistant"]
    content: Annotated[str, StringConstraints(min_length=1)]

    @field_validator("content")
    @classmethod
    def _says_something(cls, value: str) -> str:
        return _not_blank(value)


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be blank")
    return value


type Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
"""Visible ASCII without spaces: safe in logs, headers, metrics and message attributes."""


class ResponseFormat(BaseModel):
    """Structured output: the answer is JSON that fits a schema, where the provider has it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["json_schema"]
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    json_schema: dict[str, JsonValue] = Field(description=f"A JSON Schema object, at most {METADATA_BYTES_MAX} bytes.")

    @field_validator("json_schema")
    @classmethod
    def _small_and_flat_enough(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return _bounded(value)


def webhook_key(secret: str) -> bytes:
    """The key that a webhook secret stands for. Raises ValueError if it is none."""
    try:
        key = base64.b64decode(secret.removeprefix(WEBHOOK_SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith(WEBHOOK_SECRET_PREFIX) or len(key) not in WEBHOOK_KEY_BYTES:
        raise ValueError(f"must be {WEBHOOK_SECRET_PREFIX} and the base64 of 24 to 64 bytes")
    return key


class WebhookRequest(BaseModel):
    """Where to send the news of the job's end, and the secret to sign it with."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    url: Annotated[str, StringConstraints(min_length=1, max_length=2_048)] = Field(
        description="An https URL of a public host."
    )
    secret: Annotated[str, StringConstraints(max_length=200)] | None = Field(
        None, repr=False, description="whsec_ and the base64 of 24 to 64 random bytes. Absent: your client's own."
    )
    style: Literal["backburner", "openai"] | None = Field(
        None,
        description="`job.*` with the whole job, or OpenAI's `response.*` with its id. Absent: as the API does it.",
    )

    @field_validator("secret")
    @classmethod
    def _is_a_secret(cls, value: str | None) -> str | None:
        if value is not None:
            webhook_key(value)
        return value

    @model_serializer
    def _given(self) -> dict[str, str]:
        given = {"url": self.url, "secret": self.secret, "style": self.style}
        return {name: value for name, value in given.items() if value is not None}


class JobRequest(BaseModel):
    """The body of `POST /jobs`. Unknown fields are refused by name; `null` counts as absent."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: Annotated[str, StringConstraints(min_length=1)] | None = Field(
        None, description="The text to answer. Exactly one of `prompt` and `messages`."
    )
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX)] | None = Field(
        None, description="The conversation so far; the last turn is the user's."
    )
    system_prompt: Annotated[str, StringConstraints(min_length=1)] | None = None
    model: Name | None = Field(None, description="Absent: the deployment's default.")
    provider: Name | None = Field(None, description="Absent: inferred from the model.")
    fallback_models: Annotated[list[Name], Field(max_length=FALLBACKS_MAX)] | None = Field(
        None, description="Asked in turn where the model cannot serve. Absent: the deployment's; empty: none."
    )
    response_format: ResponseFormat | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_MAX)] | None = Field(
        None, description="Most output tokens. Absent: the deployment's default."
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="Refused for models that have none, as the providers' own newer ones."
    )
    prompt_cache_key: Name | None = Field(
        None,
        description="The same for requests that begin alike: they meet the same cache. Absent: by the system prompt.",
    )
    user_id: Name | None = Field(None, description="Your user; carried along, hashed before a provider sees it.")
    metadata: dict[str, JsonValue] | None = Field(
        None, description=f"A JSON object, at most {METADATA_BYTES_MAX} bytes; comes back as sent."
    )
    priority: Literal["interactive", "standard", "bulk"] | None = Field(None, description="The lane; standard.")
    deadline_seconds: Annotated[int, Field(ge=1, le=DEADLINE_SECONDS_MAX)] | None = Field(
        None, description="Not started by then: `expired`."
    )
    stream: bool | None = Field(
        None, description="Whether you mean to follow the answer over the WebSocket API while it is written."
    )
    webhook: WebhookRequest | None = Field(None, description="Told when the job ends, in whatever way.")

    @field_validator("prompt", "system_prompt")
    @classmethod
    def _says_something(cls, value: str | None) -> str | None:
        return value if value is None else _not_blank(value)

    @field_validator("messages")
    @classmethod
    def _asks_last(cls, value: list[Message] | None) -> list[Message] | None:
        if value is not None and value[-1].role != "user":
            raise ValueError("the last one must have the role user")
        return value

    @field_validator("metadata")
    @classmethod
    def _small_and_flat_enough(cls, value: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        return value if value is None else _bounded(value)

    @model_validator(mode="after")
    def _one_question(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self

    @property
    def texts(self) -> tuple[str, ...]:
        """All that a model is given to read."""
        turns = tuple(turn.content for turn in self.messages or ())
        shape = (canonical_json(self.response_format.json_schema),) if self.response_format else ()
        return (*(text for text in (self.system_prompt, self.prompt) if text is not None), *turns, *shape)

    @property
    def lane(self) -> Lane:
        """The lane asked for, or the standard one."""
        return Lane(self.priority or Lane.STANDARD)

    def canonical(self, *, leave_out: frozenset[str] = frozenset()) -> str:
        """The request in its one spelling, which the fingerprint covers.

        Defaults stay out, so a deployment may change them without turning a replay into a conflict.
        """
        given = {name: value for name, value in self.model_dump(exclude=set(leave_out)).items() if value is not None}
        return canonical_json(given)


def fingerprint(canonical_request: str) -> str:
    """SHA-256, in hex, of a canonical request."""
    return hashlib.sha256(canonical_request.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What a client may use. Minutes and days are those of UTC's clock. None: as much as it likes."""

    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    micro_usd_per_day: int | None = None

    @property
    def has_budget(self) -> bool:
        """Whether what a job costs is limited, not only how many there are."""
        return self.tokens_per_day is not None or self.micro_usd_per_day is not None


@dataclass(frozen=True, slots=True)
class Client:
    """Who may submit jobs. `client_id` also names the client's message group in the queues.

    background: whether providers may keep this client's calls going in the background; None: as the deployment says.
    limits: None for a client without any, of whom nothing is counted.
    """

    client_id: str
    name: str
    background: bool | None = None
    limits: ClientLimits | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """What one job takes from its client's budgets of one day, which is written as 2026-11-29.

    since: the first line of the receipt that counts; those before are of a run of an earlier day.
    """

    day: str
    tokens: int
    micro_usd: int
    since: int = 0


@dataclass(frozen=True, slots=True)
class Tally:
    """What a limited client has used: requests of a minute, and of a day the sum of its jobs' charges.

    minute: whole minutes since the epoch.
    warned: the highest share of a budget, in percent, that was told of on that day.
    """

    minute: int
    requests: int
    day: str
    tokens: int = 0
    micro_usd: int = 0
    warned: int = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """One limit of a client as its replies tell it: `remaining` of `limit` until the window ends in so many seconds."""

    name: str
    unit: str
    limit: int
    window_seconds: int
    remaining: int
    reset_seconds: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a provider allows in a minute, by default; None: nothing known."""

    requests: int | None = None
    tokens: int | None = None
    """Input and output together, which is how OpenAI counts."""
    input_tokens: int | None = None
    output_tokens: int | None = None


DIMENSIONS = ("requests", "tokens", "input_tokens", "output_tokens")
"""The names of what is limited: the fields of `Limits`."""

type Micros = int
"""Microseconds: an instant since the epoch, or a duration."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Leave to make one call of a model at `start_at`, and what it took from each of the model's limits.

    input_tokens, output_tokens: what the call is expected to use; costs: microseconds of each limited dimension;
    guess: the expectations before the learned corrections, so that the corrections can be learned from; sure: whether
    there were any to speak of.
    """

    model: str
    start_at: EpochMs
    input_tokens: int
    output_tokens: int
    costs: dict[str, Micros]
    guess: tuple[float, float] = (0.0, 0.0)
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Vacancy:
    """A reserved slot that was given back in time for somebody else."""

    start_at: EpochMs
    costs: dict[str, Micros]


@dataclass(frozen=True, slots=True)
class Learned:
    """What the calls of a model have taught: a factor on the guess at its input, and how long a call takes.

    output_tokens: a call is expected to write so much, or its `max_tokens` if that is less. None: nothing known yet.
    """

    input_ratio: float = 1.0
    output_tokens: float | None = None
    call_ms: float = 2_000.0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Gauge:
    """A model's row in the limits table.

    cursors: for each limited dimension, the instant at which its next unit is free.
    revision: raised whenever anything but the cursors and what is learned changes.
    limits: an operator's, which win over the catalogue's; seen: what the provider's replies say, in their own words.
    burst_ms: how far a call may run ahead of an even pace. Kept below what the provider allows, for the network.
    share: the part of the limits that is used; cut while the provider refuses calls within its limits.
    held_until: the provider has asked for silence until then.
    strikes: overload and faults, less successes; beyond a few of them calls become rare probes.
    """

    name: str
    revision: int = 0
    limits: Limits = Limits()
    seen: Limits = Limits()
    burst_ms: int = 750
    share: float = 1.0
    share_at: EpochMs = 0
    held_until: EpochMs = 0
    refused_at: EpochMs = 0
    strikes: int = 0
    struck_at: EpochMs = 0
    vacant: tuple[Vacancy, ...] = ()
    learned: Learned = Learned()
    cursors: dict[str, Micros] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Later:
    """No slot can be had now. The job's turn in its client's line comes at `place`, for a call at `start_at`."""

    place: EpochMs
    start_at: EpochMs


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """Other prices, in the same unit, for every token of a call whose input has more than `over_tokens`."""

    over_tokens: int
    input_price: int
    cached_price: int
    cache_write_price: int
    output_price: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One entry of the model catalogue. Prices are micro-dollars per million tokens, so dollars times 10^6."""

    name: str
    provider: str
    context_tokens: int
    output_tokens_max: int
    input_price: int
    cached_price: int
    cache_write_price: int
    output_price: int
    api: str = "responses"
    """For OpenAI-compatible servers: `responses`, or `chat` where only chat completions exist."""
    limits: Limits = Limits()
    long_prompt: LongPrompt | None = None
    cached_count: bool = True
    """Whether tokens read from the provider's cache count against its limits. Anthropic's do not."""
    temperature: bool = False
    """Whether a call may set one."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call as the provider counted them; `input_tokens` includes cached and cache-write tokens."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    estimated: bool = False

    @property
    def total_tokens(self) -> int:
        """Input and output together."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Question:
    """What a provider is asked: the request with the deployment's defaults filled in."""

    model: ModelInfo
    messages: tuple[Message, ...]
    system_prompt: str | None
    max_tokens: int
    user_hash: str | None = None
    cache_key: str | None = None
    """The same for all requests of one client with one system prompt, or with one cache key of its own."""
    response_format: ResponseFormat | None = None
    temperature: float | None = None

    @property
    def input_bytes(self) -> int:
        """What is asked, in UTF-8."""
        return sum(len(turn.content.encode()) for turn in self.messages) + len((self.system_prompt or "").encode())


@dataclass(frozen=True, slots=True)
class Answer:
    """What a provider answered. `finish_reason` is `stop`, `length`, or `unknown` for a new word of the provider's.

    first_token_ms: from the call's begin to the first piece of text.
    """

    text: str
    finish_reason: str
    model: str
    provider: str
    usage: Usage
    request_id: str | None = None
    # Observations, not what was answered:
    first_token_ms: int | None = field(default=None, compare=False)
    seen: Limits | None = field(default=None, compare=False)
    """The limits that the provider says it applies."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job or an attempt failed, in the words a client sees."""

    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """One line of a job's receipt.

    outcome: `completed`, an error code, `discarded` for an answer that came too late, `outcome_unknown` for a worker
    lost in the middle of a call, `worker_lost` where the call went on at the provider.
    """

    number: int
    outcome: str
    began_at: EpochMs
    ended_at: EpochMs
    provider: str | None = None
    model: str | None = None
    request_id: str | None = None
    usage: Usage | None = None
    cost_micro_usd: int | None = None
    first_token_ms: int | None = None


class NoticeStatus(StrEnum):
    """How far the telling of one target is."""

    PENDING = "pending"
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


WEBHOOK = "webhook"
"""The target of a job that came with a webhook."""
DEAD_LETTER = "dead_letter"
"""The target that every dead job has: the operator, by the dead-letter queue."""
WEBSOCKET = "websocket"
"""The target of a job that is followed over the WebSocket API: whoever has subscribed to it."""
BUDGET = "budget"
"""The target of a job that was charged to a budget: its client's tally, which is to learn what the job really cost."""
INTERNAL_TARGETS = frozenset({DEAD_LETTER, BUDGET})
"""Targets that are not the client's."""
SLACK = "slack"
"""The target of a job that was asked in Slack: the thread it was asked in."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One target to be told of a job's end.

    tries: begun so far. lease_until: until then it is being told, or waits for its next try; 0 before the first.
    told_at: when it was told, or given up.
    """

    target: str
    status: NoticeStatus = NoticeStatus.PENDING
    tries: int = 0
    lease_until: EpochMs = 0
    told_at: EpochMs | None = None
    last_error: str | None = None


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where the news of a job's end goes. sealed_secret: encrypted; None: the client's own, as it is by then.

    style: whose events they are; None: `backburner`.
    """

    url: str
    sealed_secret: str | None = None
    style: str | None = None


@dataclass(frozen=True, slots=True)
class SlackOrigin:
    """Where in Slack a job was asked and is answered. All ids are Slack's; a timestamp is text and stays as it came.

    thread_ts: the thread's first message; None where there is no thread, as for a slash command.
    message_ts: the message that asked. surface: `channel`, `im` (a direct message) or `command`.
    response_url: where a command may be answered for half an hour, in channels that the app is no member of, too.
    failed_ts: the message that told of a failure, and whose button asked for this new run.
    streams: the messages in which the present attempt's answer is shown while it is written.
    """

    channel: str
    user: str
    team: str
    surface: str
    thread_ts: str | None = None
    message_ts: str | None = None
    response_url: str | None = None
    failed_ts: str | None = None
    streams: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trail:
    """How what became of a request is found in logs and traces.

    correlation_id: the gateway's id of the request, which its caller gets as `x-amzn-RequestId`.
    trace: X-Ray's header, which goes with every message of the job; None where the request had none.
    """

    correlation_id: str
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    """A text kept in the row, or beside it in the payload store under `key` when it is large."""

    text: str | None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """The row: the only truth about a job.

    claims: the fencing token; raised by every claim, so an older worker's write is refused.
    attempts: claims that counted, in the current run (a redrive starts a new run).
    owner: random name of the request or claim that wrote last; tells one's own lost reply from another's success.
    available_at: not to be started before.
    waiting_since: of a queued job that was put back, or overdue once: when this run began, at acceptance or redrive.
    A job that is taken at once never gets it, and so costs no entry in the index of those that wait.
    due_at: when somebody must look again. None: nothing left to do. While processing, it lies beyond the lease, but no
    further than the repairer looks ahead; within that it stays, since each move is two writes of its index.
    lease_until: of a job in processing, the end of its lease; see lifecycle.lapses_at.
    deadline_at: not to be started after.
    attempts_limit: the most attempts of this run; None: the deployment's. A fallback model gets attempts of its own.
    model_index: 0 for the model asked for, n for the n-th fallback.
    slot: its leave to call the model, reserved before a long wait; place: its turn in the line for one.
    parked_since: when it first asked for the slot that it still waits for, of a job that has been parked.
    background: whether the call may go on at the provider without us; handle: the provider's name for that call.
    metadata: the caller's, as JSON text; kept in the row, so that a poll need not read a large request.
    targets: the channels to be told when it ends; outbox: how far the telling is, once it has ended.
    ahead: hints that waited in the lane when it was accepted, roughly; None: not known.
    charge: what its client's tally holds for it: the worst case at first, what it cost once that is settled.
    slack: where it was asked, if in Slack.
    trail: the request that it came with.
    discarded_at: when an operator gave up the dead job for good, so that nothing revives it.
    """

    job_id: str
    client_id: str
    lane: Lane
    status: JobStatus
    fingerprint: str
    request: Payload
    owner: str
    created_at: EpochMs
    available_at: EpochMs
    deadline_at: EpochMs
    deadline_seconds: int
    expires_at: EpochSeconds
    due_at: EpochMs | None
    schema_version: int = SCHEMA_VERSION
    claims: int = 0
    attempts: int = 0
    attempts_limit: int | None = None
    model_index: int = 0
    background: bool = False
    handle: str | None = None
    slot: Slot | None = None
    place: EpochMs | None = None
    parked_since: EpochMs | None = None
    lease_until: EpochMs | None = None
    claimed_at: EpochMs | None = None
    finished_at: EpochMs | None = None
    result: Payload | None = None
    error: Failure | None = None
    log: tuple[Attempt, ...] = ()
    metadata: str | None = None
    targets: tuple[str, ...] = ()
    webhook: Webhook | None = None
    outbox: tuple[Notice, ...] = ()
    ahead: int | None = None
    charge: Charge | None = None
    slack: SlackOrigin | None = None
    waiting_since: EpochMs | None = None
    trail: Trail | None = None
    discarded_at: EpochMs | None = None

    @property
    def began_at(self) -> EpochMs:
        """When the present run began: at acceptance, or at a redrive."""
        return self.deadline_at - self.deadline_seconds * 1000

    @property
    def about(self) -> dict[str, str | int]:
        """What every line of the log says that is about this job."""
        correlation_id = self.trail.correlation_id if self.trail else ""
        more = {"correlation_id": correlation_id} if correlation_id else {}
        return {"job_id": self.job_id, "attempt": self.attempts, **more}

    def has_expired(self, now: EpochMs) -> bool:
        """Whether the row counts as absent: TTL deletes late, so every reader asks this."""
        return self.expires_at * 1000 <= now

    @property
    def pending(self) -> tuple[Notice, ...]:
        """The targets still to be told."""
        return tuple(notice for notice in self.outbox if notice.status is NoticeStatus.PENDING)

    @property
    def usage(self) -> Usage | None:
        """Usage of the call that gave the answer, or of the last one that was billed."""
        return next((line.usage for line in reversed(self.log) if line.usage is not None), None)

    @property
    def cost_micro_usd(self) -> int | None:
        """What all calls of the job cost together, as far as known."""
        costs = [line.cost_micro_usd for line in self.log if line.cost_micro_usd is not None]
        return sum(costs) if costs else None

    @property
    def spent(self) -> Charge | None:
        """What its calls have used by now, as far as known, in the place of its charge."""
        if self.charge is None:
            return None
        lines = self.log[self.charge.since :]
        tokens = sum(line.usage.total_tokens for line in lines if line.usage is not None)
        return replace(self.charge, tokens=tokens, micro_usd=sum(line.cost_micro_usd or 0 for line in lines))


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a waiting job may expect. position: 1 for the next of its lane, at worst; None: not known."""

    position: int | None
    starts_at: EpochMs


@dataclass(frozen=True, slots=True)
class Hint:
    """A queue message: `job_id` may be worth looking at.

    died: only on dead letters, the claim count at which the job died. Coming back from the dead-letter queue it asks
    for a new run of exactly that death, so stragglers and doubles cannot revive anything.
    alone: the job has lost a worker before, so it is run after its siblings and by itself.
    """

    job_id: str
    died: int | None = None
    alone: bool = False
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Telling:
    """A message of the notifications queue: this target's next try is due.

    tries: how many had been made when it was sent. It stands for the next one only, so a double of a message, or one
    that comes late, makes no try of its own.
    claims: the row's, if the target was the only one of the job's and never tried; then the row need not be read first.
    """

    job_id: str
    target: str
    tries: int = 0
    claims: int | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message found in the dead-letter queue. `reason` is None when the queue's redrive policy put it there.

    receipt: of this look at it; name: the queue's name for the message, the same at every look.
    hint: None if the body is no hint.
    sent_at: when it was put there.
    """

    receipt: str
    body: str
    reason: str | None
    hint: Hint | None
    name: str = ""
    detail: str = ""
    lane: Lane | None = None
    client_id: str | None = None
    sent_at: EpochMs = 0
