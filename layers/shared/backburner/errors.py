"""Everything that can go wrong, once: stable codes, their meaning, and whether trying again can help.

An error class's docstring is its meaning. `code` is what clients branch on and never changes.
"""

from __future__ import annotations

from typing import ClassVar

from backburner.models import Failure, Limits, Quota, Usage

MESSAGE_CHARACTERS_MAX = 500


class BackburnerError(Exception):
    """An error with a code. `message` is for people and may change."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())

    @property
    def message(self) -> str:
        """The text, bounded."""
        return str(self)[:MESSAGE_CHARACTERS_MAX]

    def failure(self) -> Failure:
        """The error as it stands in a job."""
        return Failure(self.code, self.message, self.retryable)


# ── Refusals: a request that is not accepted. `http_status` is the reply's. ──────────────────────────────────────────


class Refusal(BackburnerError):
    """The request was refused."""

    http_status: ClassVar[int] = 400
    quotas: tuple[Quota, ...] = ()
    retry_after_seconds: int | None = None

    def __init__(
        self, message: str | None = None, *, field: str | None = None, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.fields: tuple[tuple[str, str], ...] = ()
        self.retry_after_seconds = retry_after_seconds or type(self).retry_after_seconds


class InvalidRequest(Refusal):
    """The request is not valid JSON of the documented shape."""

    code = "invalid_request"


class Unauthorized(Refusal):
    """No valid API key was given. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."""

    code = "unauthorized"
    http_status = 401


class JobNotFound(Refusal):
    """There is no such job, or it is not yours, or it has expired."""

    code = "job_not_found"
    http_status = 404


class NotFound(Refusal):
    """There is nothing at this path."""

    code = "not_found"
    http_status = 404


class MethodNotAllowed(Refusal):
    """This path does not have this method."""

    code = "method_not_allowed"
    http_status = 405


class JobIsFinal(Refusal):
    """The job has ended; it can no longer be cancelled."""

    code = "job_is_final"
    http_status = 409


class JobInUse(Refusal):
    """The job has ended, but what it cost is still being noted. Try again in a moment."""

    code = "job_in_use"
    http_status = 409
    retryable = True
    retry_after_seconds = 1


class TooLarge(Refusal):
    """The request is too large."""

    code = "too_large"
    http_status = 413


class UnsupportedMediaType(Refusal):
    """Send the body as application/json."""

    code = "unsupported_media_type"
    http_status = 415


class IdempotencyConflict(Refusal):
    """This Idempotency-Key was used for another request. Use a new key for a new request."""

    code = "idempotency_conflict"
    http_status = 422


class TooManySubscriptions(Refusal):
    """The connection follows as many jobs as it may. Unsubscribe from some, or open another."""

    code = "too_many_subscriptions"
    http_status = 429


class ConnectionUnknown(Refusal):
    """The connection has expired. Connect again."""

    code = "connection_unknown"
    http_status = 401


class Unavailable(Refusal):
    """The job could not be made durable just now. Send the same request again with the same Idempotency-Key."""

    code = "unavailable"
    http_status = 503
    retryable = True
    retry_after_seconds = 1


class LaneFull(Refusal):
    """So many jobs wait in this lane that yours would wait for very long. Send it again later."""

    code = "lane_full"
    http_status = 503
    retryable = True


class TooManyRequests(Refusal):
    """Your requests per minute are used up. Send it again in the next minute."""

    code = "too_many_requests"
    http_status = 429
    retryable = True


class BudgetUsedUp(Refusal):
    """What is left of your daily budget is less than this request may cost. It is whole again at midnight UTC."""

    code = "budget_used_up"
    http_status = 429
    retryable = True


class OverBudget(Refusal):
    """This request alone may cost more than your whole daily budget. Make it smaller, or lower max_tokens."""

    code = "over_budget"
    http_status = 422


class InternalError(Refusal):
    """Something went wrong on our side. Trying again may help."""

    code = "internal_error"
    http_status = 500
    retryable = True


class NotFromSlack(Refusal):
    """The request does not carry Slack's signature of the last five minutes."""

    code = "bad_signature"
    http_status = 401


class SlackNotConfigured(Refusal):
    """Slack is not set up here: the deployment's secret has no slack_signing_secret. See docs/slack.md."""

    code = "slack_not_configured"
    http_status = 404


# ── Ports that failed ────────────────────────────────────────────────────────────────────────────────────────────────


class PortUnavailable(BackburnerError):
    """Storage or a queue did not answer."""

    code = "unavailable"
    retryable = True


class Busy(PortUnavailable):
    """Others were writing the same rows at this very moment."""


class PayloadMissing(BackburnerError):
    """The stored request is gone; it cannot be run."""

    code = "payload_missing"


class MalformedHint(BackburnerError):
    """A queue message is not a hint."""

    code = "malformed_hint"


class MalformedTelling(BackburnerError):
    """A message of the notifications queue is not one of ours."""

    code = "malformed_telling"


# ── Failures of a telling ────────────────────────────────────────────────────────────────────────────────────────────


class Untold(BackburnerError):
    """A target could not be told.

    reason: a short word for the job's `deliveries`, such as `http_503` or `timeout`; nothing of what the target said.
    """

    code = "untold"

    def __init__(
        self, reason: str | None = None, *, again: bool = False, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(reason)
        self.again = again
        self.retry_after_seconds = retry_after_seconds


class SealBroken(BackburnerError):
    """A sealed secret cannot be opened: its key is gone from the deployment's keys."""

    code = "seal_broken"


class ForbiddenAddress(BackburnerError):
    """Webhooks are not sent there."""

    code = "forbidden_address"


# ── Failures of an attempt or a job ──────────────────────────────────────────────────────────────────────────────────


class JobFailed(BackburnerError):
    """The job failed.

    dead: whether the failure is an operator's business, so that the job goes to the dead-letter queue. A failure that
    only the caller can mend (his request, its content) does not.
    elsewhere: whether another model may serve the same request.
    seen: the limits that the provider says it applies.
    goes_on: whether a call in the background may be going on at the provider all the same.
    """

    dead: ClassVar[bool] = True
    elsewhere: ClassVar[bool] = False
    goes_on: ClassVar[bool] = False

    def __init__(
        self,
        message: str | None = None,
        *,
        retry_after_seconds: float | None = None,
        usage: Usage | None = None,
        request_id: str | None = None,
        seen: Limits | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.usage = usage
        self.request_id = request_id
        self.seen = seen


class RateLimited(JobFailed):
    """The provider's rate limit was reached."""

    code = "rate_limited"
    elsewhere = True
    retryable = True


class Overloaded(JobFailed):
    """The provider is overloaded."""

    code = "overloaded"
    elsewhere = True
    retryable = True


class ProviderFault(JobFailed):
    """The provider failed, or answered in a way that cannot be read."""

    code = "provider_error"
    elsewhere = True
    retryable = True


class ProviderTimeout(JobFailed):
    """The provider did not answer in time."""

    code = "timeout"
    goes_on = True
    elsewhere = True
    retryable = True


class ConnectionLost(JobFailed):
    """The connection to the provider could not be made or broke."""

    code = "connection"
    goes_on = True
    elsewhere = True
    retryable = True


class ProviderRefusedRequest(JobFailed):
    """The provider refused the request as invalid."""

    code = "invalid_request"
    dead = False


class ContextLengthExceeded(JobFailed):
    """The request does not fit the model's context."""

    code = "context_length_exceeded"
    elsewhere = True
    dead = False


class ModelNotFound(JobFailed):
    """The provider does not know the model, or the key may not use it."""

    code = "model_not_found"
    elsewhere = True


class ContentFiltered(JobFailed):
    """The provider's content filter stopped the answer."""

    code = "content_filtered"
    dead = False


class Refused(JobFailed):
    """The model declined to answer."""

    code = "refused"
    dead = False


class EmptyAnswer(JobFailed):
    """The model returned no text."""

    code = "empty_answer"
    dead = False


class QuotaExhausted(JobFailed):
    """The provider account has no credit left."""

    code = "quota_exhausted"
    elsewhere = True


class SpendLimit(JobFailed):
    """The provider account has reached its spend limit."""

    code = "spend_limit"
    elsewhere = True


class Authentication(JobFailed):
    """The provider refused the deployment's key, or there is none."""

    code = "authentication"
    elsewhere = True


class OutcomeUnknown(JobFailed):
    """A worker was lost in the middle of a call, and the deployment does not ask again what may have been paid for."""

    code = "outcome_unknown"


class WorkerLost(JobFailed):
    """Every worker that ran the job was lost before it could answer (out of memory, timeout, crash)."""

    code = "worker_lost"
    retryable = True


class Interrupted(JobFailed):
    """The worker was stopped while it ran the job."""

    code = "interrupted"
    goes_on = True
    retryable = True


class Undeliverable(JobFailed):
    """No worker could take the job from its queue: the code does not start, or lacks a permission."""

    code = "undeliverable"
    retryable = True


class Unreachable(JobFailed):
    """The deployment could not read what the call needs: the stored request or the provider's key."""

    code = "unreachable"
    retryable = True


class InternalFault(JobFailed):
    """Backburner itself failed while it ran the job."""

    code = "internal_error"
    goes_on = True  # a fault of ours ends no call at the provider
    retryable = True


class DeadlinePassed(JobFailed):
    """The job could not be started before its deadline."""

    code = "deadline_passed"
    dead = False


class WouldMissDeadline(JobFailed):
    """The provider's limits leave no room for the job before its deadline."""

    code = "would_miss_deadline"
    dead = False
    elsewhere = True


class Abandoned(JobFailed):
    """The call was dropped because its job was cancelled or taken over."""

    code = "abandoned"
    dead = False
