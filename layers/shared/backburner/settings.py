"""What each function reads from its environment. The template sets these variables, each and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Read by `from_environment`: field `jobs_table` is the variable JOBS_TABLE. An empty value counts as absent."""

    # Built when it is read: each function reads one of these classes, and building one takes a millisecond or two.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the fields from the environment. Raises ValidationError naming what is missing or wrong."""
        names = {name: name.upper() for name in cls.model_fields}
        return cls.model_validate({name: environment[key] for name, key in names.items() if environment.get(key)})


class Common(Settings):
    """What every function that changes jobs needs."""

    jobs_table: str
    limits_table: str
    payloads_bucket: str
    interactive_queue_url: str
    standard_queue_url: str
    bulk_queue_url: str
    dead_letter_queue_url: str
    notifications_queue_url: str
    retention_days: Annotated[int, Field(ge=1, le=365)]
    max_attempts: Annotated[int, Field(ge=1, le=10)]
    on_unknown_outcome: Literal["retry", "fail"]
    measured_clients: str = ""
    release: str = ""


class WebhookSettings(Settings):
    """What those need who take webhooks in or send them."""

    webhook_key_secret_arn: str
    webhook_ports: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}(,[1-9][0-9]{0,4}){0,19}$")]
    webhook_allow_http: bool = False
    webhook_allow_loopback: bool = False


class EndpointSettings(Common):
    """The HTTP endpoint."""

    clients_table: str
    lane_depth_max: Annotated[int, Field(ge=1)]
    default_model: str
    default_max_tokens: Annotated[int, Field(ge=1, le=128_000)]
    fallback_models: str = ""
    default_deadline_seconds: Annotated[int, Field(ge=60, le=604_800)]
    background_calls: bool = False
    extra_models: str = ""


class IngestSettings(EndpointSettings, WebhookSettings):
    """ingest."""


class StatusSettings(EndpointSettings):
    """status: the rest of the endpoint."""

    interactive_concurrency: Annotated[int, Field(ge=2)]
    standard_concurrency: Annotated[int, Field(ge=2)]
    bulk_concurrency: Annotated[int, Field(ge=2)]
    connections_table: str
    sockets_url: str
    long_poll_seconds: Annotated[int, Field(ge=0, le=20)]


class WebsocketSettings(EndpointSettings):
    """websocket."""

    connections_table: str
    sockets_url: str


class SlackSettings(EndpointSettings):
    """slack: Slack's requests."""

    provider_secret_arn: str
    slack_api_base_url: str = ""
    slack_model: str = ""
    slack_system_prompt: str = ""
    slack_user_requests_per_minute: Annotated[int, Field(ge=0, le=1000)]


class WorkerSettings(Common):
    """worker."""

    connections_table: str
    sockets_url: str
    provider_secret_arn: str
    openai_base_url: str = ""
    anthropic_base_url: str = ""
    default_model: str
    default_max_tokens: Annotated[int, Field(ge=1, le=128_000)]
    call_timeout_seconds: Annotated[int, Field(ge=5, le=840)]
    fallback_models: str = ""
    extra_models: str = ""
    slack_api_base_url: str = ""
    slack_streaming: bool = False


class NotifierSettings(Common, WebhookSettings):
    """notifier."""

    connections_table: str
    sockets_url: str
    clients_table: str
    provider_secret_arn: str
    slack_api_base_url: str = ""


class AlertsSettings(Common):
    """alerts."""

    provider_secret_arn: str
    slack_api_base_url: str = ""
    slack_alerts_channel: str = ""
    runbook_url: str = ""


class RepairSettings(Common):
    """repair."""
