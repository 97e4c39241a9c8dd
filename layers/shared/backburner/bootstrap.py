"""Where classes meet. Each builder imports what it builds inside itself, so a function loads its own part only."""

from __future__ import annotations

import base64
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from backburner.models import SLACK, WEBHOOK, WEBSOCKET, EpochMs, Lane

if TYPE_CHECKING:
    from backburner.adapters.connections import ConnectionsTable
    from backburner.addresses import Receivers
    from backburner.channels.slack_api import SlackApi
    from backburner.delivery import Delivery
    from backburner.http import Doorkeeper, Handler
    from backburner.lifecycle import Lifecycle
    from backburner.models import Client, Job
    from backburner.observability import Logbook
    from backburner.ports import Audience, Channel, Conversations, Deltas, Journal, Limiter, Provider, Sockets
    from backburner.redrive import Redrive
    from backburner.settings import (
        Common,
        EndpointSettings,
        NotifierSettings,
        WebhookSettings,
        WorkerSettings,
    )
    from backburner.submission import Submission

BATCH = 10
"""Jobs of one worker invocation, as the template's event sources have it."""
POSTS_MAX = 20
"""Frames sent at once by one process; fewer than the connections that an AWS client keeps."""


class SystemClock:
    """The machine's clock, as ports.Clock."""

    def now(self) -> EpochMs:
        """Milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class SystemChance:
    """The machine's randomness, as ports.Chance. Asked each time: a seed would be the same in copies of a snapshot."""

    def uniform(self, low: float, high: float) -> float:
        """A number between the two."""
        return secrets.SystemRandom().uniform(low, high)

    def name(self) -> str:
        """26 characters of base 32: 130 bits."""
        return base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]


def _logbook(settings: Common) -> Logbook:
    """Logs, and metrics that name the clients that the deployment wants to see by name."""
    from backburner.observability import Logbook

    return Logbook(frozenset(_names(settings.measured_clients)), settings.release)


def _lanes(settings: Common) -> dict[Lane, str]:
    """The URL of each lane's queue."""
    return {
        Lane.INTERACTIVE: settings.interactive_queue_url,
        Lane.STANDARD: settings.standard_queue_url,
        Lane.BULK: settings.bulk_queue_url,
    }


def _clients(*, patient: bool = False, hasty: bool = False) -> Callable[[str], Any]:
    """AWS clients by service, each made once: the first call of each costs a handshake, and its making 20 ms.

    `patient` callers may wait for AWS, the accept path may not; of `hasty` ones, whoever calls us is soon gone.
    """
    from backburner.adapters.aws import client

    # Patient is 9 s a call, so that a call that hangs does not let the leases of a batch (30 s) lapse.
    connect_seconds, read_seconds, tries = (1.0, 2.0, 3) if patient else (0.4, 0.7, 2) if hasty else (0.8, 0.9, 2)
    return cache(
        lambda service: client(service, connect_seconds=connect_seconds, read_seconds=read_seconds, tries=tries)
    )


def _names(text: str) -> tuple[str, ...]:
    """What stands between the commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _lifecycle(settings: Common, aws: Callable[[str], Any], journal: Journal | None = None) -> Lifecycle:
    """The life cycle over the AWS adapters; the journal is the log unless another is given."""
    from backburner.adapters.dynamodb import JobsTable
    from backburner.adapters.sqs import DeadLetters, LaneQueues, NoticesQueue
    from backburner.adapters.tallies import TalliesTable
    from backburner.lifecycle import Lifecycle

    return Lifecycle(
        store=JobsTable(aws("dynamodb"), settings.jobs_table),
        hints=LaneQueues(aws("sqs"), _lanes(settings)),
        dead_letters=DeadLetters(aws("sqs"), settings.dead_letter_queue_url),
        notices=NoticesQueue(aws("sqs"), settings.notifications_queue_url),
        clock=SystemClock(),
        chance=SystemChance(),
        journal=journal or _logbook(settings),
        tallies=TalliesTable(aws("dynamodb"), settings.limits_table, settings.jobs_table),
        attempts_max=settings.max_attempts,
        retention_seconds=settings.retention_days * 86_400,
        retry_unknown=settings.on_unknown_outcome == "retry",
    )


def _payloads(settings: Common, aws: Callable[[str], Any] | None = None) -> Any:
    """The payloads bucket; its client is made when a large payload first needs it."""
    from backburner.adapters.s3 import PayloadsBucket

    @cache
    def s3() -> Any:
        from backburner.adapters.aws import client

        return client("s3", connect_seconds=1, read_seconds=2, tries=2) if aws is None else aws("s3")

    return PayloadsBucket(s3, settings.payloads_bucket)


def _seals(settings: WebhookSettings, aws: Callable[[str], Any]) -> Any:
    """The seals of webhook secrets; client and key are got when the first secret comes."""
    from backburner.adapters.secrets import FernetSeals

    return FernetSeals(lambda: aws("secretsmanager"), settings.webhook_key_secret_arn)


def _receivers(settings: WebhookSettings) -> Receivers:
    from backburner.addresses import Receivers

    return Receivers(
        ports=frozenset(int(port) for port in settings.webhook_ports.split(",")),
        plain_http=settings.webhook_allow_http,
        loopback=settings.webhook_allow_loopback,
    )


def _limiter(settings: Common, lifecycle: Lifecycle, aws: Callable[[str], Any]) -> Limiter:
    from backburner.adapters.limits import LimitsTable
    from backburner.limits import SlotLimiter

    store = LimitsTable(aws("dynamodb"), settings.limits_table)
    return SlotLimiter(store, lifecycle.clock, lifecycle.chance, lifecycle.journal)


def _submission(
    settings: EndpointSettings, aws: Callable[[str], Any], lifecycle: Lifecycle | None = None, payloads: Any = None
) -> Submission:
    from backburner.adapters.dynamodb import ClientsTable
    from backburner.adapters.sqs import LaneDepths
    from backburner.budgets import Budgets
    from backburner.pricing import PriceList, cost_micro_usd
    from backburner.settings import IngestSettings, SlackSettings, StatusSettings
    from backburner.submission import Submission, Webhooks

    webhooks = None
    if isinstance(settings, IngestSettings):
        clients = ClientsTable(aws("dynamodb"), settings.clients_table)
        webhooks = Webhooks(_receivers(settings), _seals(settings, aws), clients)
    lifecycle = lifecycle or _lifecycle(settings, aws)
    more: dict[str, Any] = {}
    if isinstance(settings, SlackSettings):
        more = {"limiter": _limiter(settings, lifecycle, aws)}
    if isinstance(settings, StatusSettings):
        more = {
            "limiter": _limiter(settings, lifecycle, aws),
            "at_once": {
                Lane.INTERACTIVE: settings.interactive_concurrency * BATCH,
                Lane.STANDARD: settings.standard_concurrency * BATCH,
                Lane.BULK: settings.bulk_concurrency * BATCH,
            },
        }
    return Submission(
        store=lifecycle.store,
        payloads=payloads or _payloads(settings),
        lifecycle=lifecycle,
        catalogue=PriceList.load(settings.extra_models),
        clock=lifecycle.clock,
        chance=lifecycle.chance,
        journal=lifecycle.journal,
        budgets=Budgets(lifecycle.tallies, lifecycle.clock, lifecycle.chance, lifecycle.journal),
        price=cost_micro_usd,
        default_model=settings.default_model,
        default_max_tokens=settings.default_max_tokens,
        fallback_models=_names(settings.fallback_models),
        lanes=frozenset(Lane),
        depths=LaneDepths(aws("sqs"), _lanes(settings)),
        lane_depth_max=settings.lane_depth_max,
        deadline_seconds=settings.default_deadline_seconds,
        retention_seconds=lifecycle.retention_seconds,
        background=settings.background_calls,
        webhooks=webhooks,
        **more,
    )


def _doorkeeper(settings: EndpointSettings, aws: Callable[[str], Any]) -> Doorkeeper:
    from backburner.adapters.dynamodb import ClientsTable
    from backburner.http import Doorkeeper

    return Doorkeeper(ClientsTable(aws("dynamodb"), settings.clients_table))


def _connections(table: str, aws: Callable[[str], Any]) -> ConnectionsTable:
    from backburner.adapters.connections import ConnectionsTable

    return ConnectionsTable(aws("dynamodb"), table, lambda: int(time.time()))


def _posts() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=POSTS_MAX, thread_name_prefix="post")


def _sockets(url: str) -> Sockets:
    from backburner.adapters.sockets import ApiGatewaySockets

    def management() -> Any:
        from backburner.adapters.aws import client

        # One try of 1.5 s: whoever sends a frame knows best whether to send it again.
        return client("apigatewaymanagementapi", connect_seconds=0.5, read_seconds=1, tries=1, endpoint_url=url)

    return ApiGatewaySockets(management)


def ingest() -> Handler:
    """The handler of `POST /jobs` and `POST /v1/responses`."""
    from backburner.http import ingest_handler, with_openai
    from backburner.settings import IngestSettings

    settings = IngestSettings.from_environment(os.environ)
    aws = _clients(patient=False)
    desk = _submission(settings, aws), _doorkeeper(settings, aws), _logbook(settings)

    def openai() -> Handler:
        from backburner.http_openai import create_handler

        return create_handler(*desk)

    return with_openai(ingest_handler(*desk), openai)


def status() -> Handler:
    """The handler of everything else under the API."""
    from backburner.http import TicketOffice, status_handler, with_openai
    from backburner.settings import StatusSettings

    settings = StatusSettings.from_environment(os.environ)
    aws = _clients(patient=False)
    submission = _submission(settings, aws)
    office = TicketOffice(
        tickets=_connections(settings.connections_table, aws),
        clock=submission.clock,
        chance=submission.chance,
        socket_url=f"ws{settings.sockets_url.removeprefix('http')}",
    )
    desk = submission, _doorkeeper(settings, aws), _logbook(settings)

    def openai() -> Handler:
        from backburner.http_openai import responses_handler

        return responses_handler(*desk, settings.long_poll_seconds)

    return with_openai(status_handler(*desk, office, settings.long_poll_seconds), openai)


def websocket() -> Handler:
    """The handler of the WebSocket API."""
    from backburner.settings import WebsocketSettings
    from backburner.sockets import SocketApi

    settings = WebsocketSettings.from_environment(os.environ)
    aws = _clients(patient=False)
    submission = _submission(settings, aws)
    connections = _connections(settings.connections_table, aws)
    return SocketApi(
        authenticate=_doorkeeper(settings, aws).client,
        submission=submission,
        connections=connections,
        tickets=connections,
        sockets=_sockets(settings.sockets_url),
        clock=submission.clock,
        chance=submission.chance,
        journal=_logbook(settings),
    ).handle


def slack() -> Handler:
    """The handler of Slack's requests. The secret is read when the first one comes, and no SDK is imported."""
    from backburner.adapters.limits import MarksTable
    from backburner.adapters.secrets import ProviderSecret
    from backburner.settings import SlackSettings
    from backburner.slack_events import SlackDesk

    settings = SlackSettings.from_environment(os.environ)
    aws = _clients(hasty=True)  # after three seconds Slack sends the event again
    submission = _submission(settings, aws)
    secret = ProviderSecret(aws("secretsmanager"), settings.provider_secret_arn)
    desk = SlackDesk(
        client=_slack_client(settings, aws),
        submission=submission,
        marks=MarksTable(aws("dynamodb"), settings.limits_table),
        signing_secret=lambda: secret.get("slack_signing_secret"),
        renewed=lambda refused: secret.refresh("slack_signing_secret", refused),
        clock=submission.clock,
        journal=submission.journal,
        system_prompt=settings.slack_system_prompt,
        model=settings.slack_model,
        user_requests_per_minute=settings.slack_user_requests_per_minute,
        api_base_url=settings.slack_api_base_url,
    )
    return desk.handle


def _slack_client(settings: EndpointSettings, aws: Callable[[str], Any]) -> Callable[[], Client]:
    """The client that all people in Slack are, with the limits that `backburner clients limits slack` gave it."""
    from cachetools import TTLCache

    from backburner.adapters.dynamodb import ClientsTable
    from backburner.http import CLIENT_CACHE_SECONDS
    from backburner.models import Client

    clients = ClientsTable(aws("dynamodb"), settings.clients_table)
    known: TTLCache[str, Client] = TTLCache(maxsize=1, ttl=CLIENT_CACHE_SECONDS)

    def client() -> Client:
        found = known.get(SLACK)
        if found is None:
            found = known[SLACK] = clients.find(SLACK) or Client(SLACK, "Slack")
        return found

    return client


def worker() -> Handler:
    """The handler of the lane queues. SIGTERM hands back what is in hand."""
    import signal

    from backburner.adapters.aws import client
    from backburner.adapters.secrets import ProviderSecret
    from backburner.adapters.sqs import batch_handler, lane_of, parse_hint
    from backburner.channels.websocket import WebSocketChannel
    from backburner.delivery import ToldHere
    from backburner.execution import Execution, Leases
    from backburner.pricing import PriceList, cost_micro_usd
    from backburner.settings import WorkerSettings
    from backburner.streaming import LiveAnswers

    settings = WorkerSettings.from_environment(os.environ)
    aws = _clients(patient=True)
    lifecycle = _lifecycle(settings, aws)
    secret = ProviderSecret(
        client("secretsmanager", connect_seconds=2, read_seconds=5, tries=3), settings.provider_secret_arn
    )
    connections = _connections(settings.connections_table, _clients(patient=False))
    sockets, posts = _sockets(settings.sockets_url), _posts()
    live = LiveAnswers(
        connections=connections,
        sockets=sockets,
        store=lifecycle.store,
        posts=posts,
        monotonic=time.monotonic,
        journal=lifecycle.journal,
    )
    socket = WebSocketChannel(connections, sockets, posts, clock=lifecycle.clock, journal=lifecycle.journal)
    told_here = ToldHere(_delivery(lifecycle, {WEBSOCKET: socket}.__getitem__), lifecycle, lifecycle.journal)
    lifecycle = replace(lifecycle, told_here={WEBSOCKET: told_here})
    in_slack = _made_once(_slack_threads(settings, secret, lifecycle, aws))
    execution = Execution(
        lifecycle=lifecycle,
        payloads=_payloads(settings),
        dead_letters=lifecycle.dead_letters,
        providers=_providers(secret, {"openai": settings.openai_base_url, "anthropic": settings.anthropic_base_url}),
        catalogue=PriceList.load(settings.extra_models),
        price=cost_micro_usd,
        clock=lifecycle.clock,
        chance=lifecycle.chance,
        journal=lifecycle.journal,
        leases=Leases(lifecycle, lifecycle.clock, lifecycle.journal),
        limiter=_limiter(settings, lifecycle, aws),
        default_model=settings.default_model,
        default_max_tokens=settings.default_max_tokens,
        call_seconds=settings.call_timeout_seconds,
        fallback_models=_names(settings.fallback_models),
        deltas=_Listeners(lambda: in_slack("presence"), live),
        conversations=lambda: in_slack("threads"),
    )

    def hand_back(*_: Any) -> None:
        execution.stop()
        os._exit(0)  # the threads' calls are given up; waiting for them would outlast the grace period

    signal.signal(signal.SIGTERM, hand_back)
    lanes = _lanes(settings)
    return batch_handler(
        parse_hint, execution.run_batch, lambda body, queue: execution.reject(body, lane_of(lanes, queue))
    )


def _slack_api(secret: Any, base_url: str, *, seconds: int) -> SlackApi:
    """Slack's Web API by the deployment's token; each call ends within so many seconds."""
    from backburner.channels.slack_api import SlackApi

    token = "slack_bot_token"  # noqa: S105  its name
    return SlackApi(
        lambda: secret.get(token),
        lambda refused: secret.refresh(token, refused),
        base_url=base_url,
        timeout_seconds=seconds,
    )


def _slack_threads(
    settings: WorkerSettings, secret: Any, lifecycle: Lifecycle, aws: Callable[[str], Any]
) -> dict[str, Callable[[], Any]]:
    """What a worker does in Slack's threads: reads them (ports.Conversations), and shows itself (ports.Deltas)."""

    def api() -> SlackApi:
        return _slack_api(secret, settings.slack_api_base_url, seconds=2)

    def threads() -> Conversations:
        from backburner.channels.slack_thread import SlackThreads

        return SlackThreads(api(), time.monotonic, lifecycle.journal)

    def presence() -> Deltas:
        from backburner.adapters.limits import LimitsTable
        from backburner.channels.slack import seconds_to_turn
        from backburner.channels.slack_stream import LiveAnswer
        from backburner.channels.slack_thread import SlackPresence

        here, line = api(), LimitsTable(aws("dynamodb"), settings.limits_table)

        def live(job: Job) -> LiveAnswer:
            return LiveAnswer(
                here,
                job,
                record=lifecycle.shown_in,
                turn=lambda channel: seconds_to_turn(line, lifecycle.clock, channel),
                monotonic=time.monotonic,
                journal=lifecycle.journal,
            )

        return SlackPresence(here, time.monotonic, lifecycle.journal, live if settings.slack_streaming else None)

    return {"threads": threads, "presence": presence}


class _Listeners:
    """Who follows an answer while it is written, as ports.Deltas: the thread that asked, or whoever has subscribed."""

    def __init__(self, in_slack: Callable[[], Deltas], elsewhere: Deltas) -> None:
        self._in_slack, self._elsewhere = in_slack, elsewhere

    def listening(self, job: Job) -> AbstractContextManager[Audience | None]:
        """For the time of one attempt, where the pieces of its answer go."""
        return (self._elsewhere if job.slack is None else self._in_slack()).listening(job)


def _providers(secret: Any, base_urls: dict[str, str]) -> Callable[[str], Provider]:
    """Providers by name; each imports its SDK when a job first needs it."""
    from backburner.providers.account import Account

    def openai(account: Account) -> Provider:
        from backburner.providers.openai import OpenAI

        return OpenAI(account, base_urls["openai"])

    def anthropic(account: Account) -> Provider:
        from backburner.providers.anthropic import Anthropic

        return Anthropic(account, base_urls["anthropic"])

    def account(name: str) -> Account:
        entry = f"{name}_api_key"
        return Account(name, lambda: secret.get(entry), lambda refused: secret.refresh(entry, refused))

    return _made_once(
        {"openai": lambda: openai(account("openai")), "anthropic": lambda: anthropic(account("anthropic"))}
    )


def _made_once[T](registry: Mapping[str, Callable[[], T]]) -> Callable[[str], T]:
    """What the registry makes, by name, each once. Raises LookupError."""
    lock = threading.Lock()  # a cold function's first batch asks for it many times at once
    made: dict[str, T] = {}

    def get(name: str) -> T:
        with lock:
            if name not in made:
                made[name] = registry[name]()
            return made[name]

    return get


def notifier() -> Handler:
    """The handler of the notifications queue."""
    from backburner.adapters.sqs import batch_handler, parse_telling
    from backburner.settings import NotifierSettings

    settings = NotifierSettings.from_environment(os.environ)
    aws = _clients(patient=True)
    lifecycle = _lifecycle(settings, aws)
    return batch_handler(parse_telling, _delivery(lifecycle, _channels(settings, lifecycle, aws)).run_batch)


def _delivery(lifecycle: Lifecycle, channels: Callable[[str], Channel]) -> Delivery:
    """Telling by the channels that a target's name gives."""
    from backburner.delivery import Delivery

    return Delivery(
        store=lifecycle.store,
        lifecycle=lifecycle,
        channels=channels,
        clock=lifecycle.clock,
        chance=lifecycle.chance,
        journal=lifecycle.journal,
    )


def _channels(settings: NotifierSettings, lifecycle: Lifecycle, aws: Callable[[str], Any]) -> Callable[[str], Channel]:
    """Channels by the names of their targets; each is imported when a job first needs it."""
    payloads = _payloads(settings)

    def webhook() -> Channel:
        from backburner.adapters.dynamodb import ClientsTable
        from backburner.channels.outbound import Outbound
        from backburner.channels.webhook import WebhookChannel

        return WebhookChannel(
            receivers=_receivers(settings),
            outbound=Outbound(),
            payloads=payloads,
            seals=_seals(settings, aws),
            secrets=ClientsTable(aws("dynamodb"), settings.clients_table),
            clock=lifecycle.clock,
        )

    def websocket() -> Channel:
        from backburner.channels.websocket import WebSocketChannel

        connections = _connections(settings.connections_table, _clients(patient=False))
        sockets = _sockets(settings.sockets_url)
        return WebSocketChannel(connections, sockets, _posts(), clock=lifecycle.clock, journal=lifecycle.journal)

    def slack() -> Channel:
        from backburner.adapters.limits import LimitsTable
        from backburner.adapters.secrets import ProviderSecret
        from backburner.channels.slack import SlackChannel

        secret = ProviderSecret(aws("secretsmanager"), settings.provider_secret_arn)
        return SlackChannel(
            _slack_api(secret, settings.slack_api_base_url, seconds=10),
            payloads=payloads,
            line=LimitsTable(aws("dynamodb"), settings.limits_table),
            clock=lifecycle.clock,
            journal=lifecycle.journal,
            api_base_url=settings.slack_api_base_url,
        )

    return _made_once({SLACK: slack, WEBHOOK: webhook, WEBSOCKET: websocket})


def alerts() -> Handler:
    """The handler of the alarm topic. The SDK is imported when an alarm comes: its every second counts elsewhere."""
    from backburner.adapters.secrets import ProviderSecret
    from backburner.settings import AlertsSettings

    settings = AlertsSettings.from_environment(os.environ)
    secret = ProviderSecret(_clients(patient=True)("secretsmanager"), settings.provider_secret_arn)

    def handle(event: dict[str, Any], context: Any) -> dict[str, Any]:
        from backburner.channels.slack_alerts import SlackAlerts

        api = _slack_api(secret, settings.slack_api_base_url, seconds=10)
        return SlackAlerts(api, settings.slack_alerts_channel, settings.runbook_url, _logbook(settings)).handle(
            event, context
        )

    return handle


def repair() -> Handler:
    """The handler of the schedule."""
    from backburner.repair import Repair
    from backburner.settings import RepairSettings

    settings = RepairSettings.from_environment(os.environ)
    lifecycle = _lifecycle(settings, _clients(patient=True))
    repairer = Repair(
        store=lifecycle.store,
        lifecycle=lifecycle,
        dead_letters=lifecycle.dead_letters,
        clock=lifecycle.clock,
        journal=lifecycle.journal,
    )

    def handle(_event: dict[str, Any], _context: Any) -> dict[str, Any]:
        return {"seen": repairer.run_once()}

    return handle


def operator(environment: Mapping[str, str], aws: Callable[[str], Any], journal: Journal) -> tuple[Submission, Redrive]:
    """The core with an operator's rights. environment: the deployed status function's; aws: the operator's clients."""
    from backburner.redrive import Redrive
    from backburner.settings import StatusSettings

    settings = StatusSettings.from_environment(environment)
    submission = _submission(settings, aws, _lifecycle(settings, aws, journal), _payloads(settings, aws))
    return submission, Redrive(
        store=submission.store,
        payloads=submission.payloads,
        lifecycle=submission.lifecycle,
        dead_letters=submission.lifecycle.dead_letters,
        clock=submission.clock,
        check=submission.check,
    )
