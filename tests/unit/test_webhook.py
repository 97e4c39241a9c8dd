"""The webhook channel: what is signed, what is sent, whither, and what the replies mean."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpcore2
import pytest
from standardwebhooks import Webhook as Verifier

from backburner.addresses import Endpoint, Receivers
from backburner.channels.outbound import Outbound, Reply, Unreached
from backburner.channels.webhook import BODY_BYTES_MAX, WebhookChannel, body_of, headers_of
from backburner.delivery import TELLING_MS, WAITS_SECONDS
from backburner.errors import ForbiddenAddress, InvalidRequest, PortUnavailable, ProviderRefusedRequest, Untold
from backburner.models import Job, JobStatus, NoticeStatus, Payload, Webhook
from tests.fakes.hostile import RecordingNetwork, RecordingResolver, leads_inward, urls
from tests.fakes.house import ALICE, House
from tests.fakes.memory import START, ScriptedProvider

SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="
OTHER = "whsec_" + "b3RoZXIta2V5LTAxMjM0NTY3ODlhYmNkZWYwMQ=="
URL = "https://hooks.example.com/in?x=1"


class Postbox:
    """Notes what would be sent, and answers by a script."""

    def __init__(self, *script: int | Reply | Exception) -> None:
        self.script = list(script)
        self.sent: list[tuple[Endpoint, dict[str, str], bytes]] = []

    def post(self, endpoint: Endpoint, headers: Any, body: bytes) -> Reply:
        self.sent.append((endpoint, dict(headers), body))
        step = self.script.pop(0) if self.script else 204
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, Reply) else Reply(step, None)


def house_with(postbox: Any, *script: Any, receivers: Receivers | None = None) -> House:
    """A house whose webhooks go into the postbox."""
    house = House(provider=ScriptedProvider(*script), receivers=receivers or Receivers())
    house.channels = {"webhook": channel_of(house, postbox)}
    return house


def channel_of(house: House, postbox: Any) -> WebhookChannel:
    """The channel over a house's ports."""
    return WebhookChannel(
        receivers=house.receivers,
        outbound=postbox,
        payloads=house.payloads,
        seals=house.seals,
        secrets=house.webhook_secrets,
        clock=house.clock,
    )


def accepted(house: House, *, secret: str | None = SECRET, url: str = URL, **fields: Any) -> Job:
    """A job that came with a webhook."""
    webhook = {"url": url} | ({"secret": secret} if secret else {})
    return house.accept(webhook=webhook, **fields)


def told(house: House, job: Job) -> Any:
    """The webhook's notice."""
    (notice,) = (notice for notice in house.job(job.job_id).outbox if notice.target == "webhook")
    return notice


# ── Signatures ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_whk_04_the_vector_reproduces() -> None:
    """A secret with its prefix is decoded; id, timestamp and body are signed with dots between."""
    body = '{"type":"job.completed","data":{"id":"job-0001","text":"héllo 中"}}'
    moment = datetime.fromtimestamp(1_760_000_000, UTC)
    assert Verifier(SECRET).sign("msg_0001", moment, body) == "v1,c2x4DTdIyaXrW0Un2hxPzeoMD9MpJwoGWxoVAuGhx98="


def test_headers_of_a_job_are_those_of_the_standard_and_one_for_plain_receivers() -> None:
    """Both signatures by hand; no dot in the id, since dots part what is signed."""
    house = House()
    job = replace(house.accept(), status=JobStatus.COMPLETED, claims=2)
    headers = dict(headers_of(job, "{ü}".encode(), [SECRET, OTHER], 1_760_000_000))
    key = b"example-key-0123456789abcdef"
    assert headers["X-Signature-SHA256"] == hmac.new(key, "{ü}".encode(), hashlib.sha256).hexdigest()
    assert headers["webhook-id"] == f"{job.job_id}-2-completed"
    assert "." not in headers["webhook-id"]
    assert headers["webhook-timestamp"] == "1760000000"
    moment = datetime.fromtimestamp(1_760_000_000, UTC)
    assert headers["webhook-signature"].split() == [
        Verifier(secret).sign(headers["webhook-id"], moment, "{ü}") for secret in (SECRET, OTHER)
    ]
    assert headers["Content-Type"] == "application/json; charset=utf-8"
    assert headers["User-Agent"].startswith("Backburner/")


def test_whk_04_tries_of_one_event_share_an_id_and_nothing_else() -> None:
    """500, 500, 200 over 20 minutes, with the client's secret replaced between the first two."""
    postbox = Postbox(500, Reply(500, "1100"), 200)
    house = house_with(postbox)
    house.webhook_secrets.sealed["alice"] = [(house.seals.seal(OTHER), None)]
    job = accepted(house, secret=None)
    house.work()
    house.tell()
    day = house.clock.now() + 86_400_000
    house.webhook_secrets.sealed["alice"] = [(house.seals.seal(SECRET), None), (house.seals.seal(OTHER), day)]
    house.settle()
    first, second, third = [headers for _, headers, _ in postbox.sent]
    assert len({each["webhook-id"] for each in (first, second, third)}) == 1
    assert len({each["webhook-timestamp"] for each in (first, second, third)}) == 3
    assert [len(each["webhook-signature"].split()) for each in (first, second, third)] == [1, 2, 2]
    assert int(third["webhook-timestamp"]) - int(first["webhook-timestamp"]) > 1_100
    assert told(house, job).status is NoticeStatus.DELIVERED
    body = postbox.sent[-1][2].decode()
    for secret in (SECRET, OTHER):
        moment = datetime.fromtimestamp(int(third["webhook-timestamp"]), UTC)
        assert Verifier(secret).sign(third["webhook-id"], moment, body) in third["webhook-signature"].split()


def test_a_secret_that_was_replaced_signs_until_its_time_is_over() -> None:
    """And no longer."""
    postbox = Postbox(Reply(503, "14000"), 200)
    house = house_with(postbox)
    sealed = house.seals.seal
    house.webhook_secrets.sealed["alice"] = [(sealed(SECRET), None), (sealed(OTHER), house.clock.now() + 60_000)]
    accepted(house, secret=None)
    house.work()
    house.settle()
    assert [len(headers["webhook-signature"].split()) for _, headers, _ in postbox.sent] == [2, 1]


def test_a_jobs_next_end_is_another_event() -> None:
    """Redriven after its death, it has a new id; both ends are told."""
    from backburner.errors import Authentication
    from backburner.models import Hint

    postbox = Postbox()
    house = house_with(postbox, Authentication(), "an answer")
    job = accepted(house)
    house.work()
    house.settle()
    house.run(Hint(job.job_id, died=house.job(job.job_id).claims))
    house.settle()
    ids = [headers["webhook-id"] for _, headers, _ in postbox.sent]
    assert ids == [f"{job.job_id}-1-failed", f"{job.job_id}-2-completed"]


# ── Bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_kind_of_end_is_told_as_what_it_is() -> None:
    """completed, failed, cancelled, expired; the job as its owner would get it."""
    postbox = Postbox()
    house = house_with(postbox, "an answer", ProviderRefusedRequest())
    accepted(house, metadata={"order": 4711})
    house.work()
    accepted(house)
    house.work()
    house.submission.cancel(ALICE, accepted(house).job_id)
    accepted(house, deadline_seconds=1)
    house.clock.advance(2)
    house.repair.run_once()
    house.tell()
    bodies = [json.loads(body) for _, _, body in postbox.sent]
    assert [body["type"] for body in bodies] == ["job.completed", "job.failed", "job.cancelled", "job.expired"]
    assert {body["version"] for body in bodies} == {1}
    completed, failed, cancelled, expired = (body["data"] for body in bodies)
    assert completed["result"]["text"] == "an answer"
    assert (completed["status"], completed["metadata"], completed["attempts"]) == ("completed", {"order": 4711}, 1)
    assert failed["error"]["code"] == "invalid_request"
    assert (cancelled["status"], expired["error"]["code"]) == ("cancelled", "deadline_passed")
    assert all("deliveries" not in body["data"] for body in bodies)
    assert bodies[0]["timestamp"] == datetime.fromtimestamp(START / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def test_a_large_result_is_a_link_that_is_made_anew_for_each_try() -> None:
    """As in GET; a smaller one comes along wherever it is kept."""
    house = House()
    job = replace(house.accept(), status=JobStatus.COMPLETED, finished_at=START)
    house.payloads.put("results/x", json.dumps({"text": "a" * BODY_BYTES_MAX}))
    house.payloads.put("results/y", json.dumps({"text": "a" * 150_000}))
    large = json.loads(body_of(replace(job, result=Payload(None, "results/x")), house.payloads))["data"]
    assert large["result_url"].startswith("https://payloads.example.test/results/x")
    assert "result" not in large
    small = json.loads(body_of(replace(job, result=Payload(None, "results/y")), house.payloads))["data"]
    assert len(small["result"]["text"]) == 150_000


@pytest.mark.parametrize("text", ["héllo 中 😀", 'line\nbreak "quote" \\ slash / <tag> & \u2028', "", "1e21 -0.0 \x00"])
def test_whk_01_the_body_is_the_jobs_document_byte_for_byte(text: str) -> None:
    """One serialisation: what is signed is what is sent."""
    postbox = Postbox()
    house = house_with(postbox)
    job = replace(house.accept(), status=JobStatus.COMPLETED, webhook=Webhook(URL, house.seals.seal(SECRET)))
    job = replace(job, result=Payload(json.dumps({"text": text})), metadata='{"f":1.0,"g":1e+21,"z":-0.0}')
    channel_of(house, postbox).tell(job)
    [(_, headers, body)] = postbox.sent
    moment = datetime.fromtimestamp(int(headers["webhook-timestamp"]), UTC)
    assert Verifier(SECRET).sign(headers["webhook-id"], moment, body.decode()) == headers["webhook-signature"]
    data = json.loads(body)["data"]
    assert data["result"]["text"] == text
    assert json.dumps(data["metadata"]) == '{"f": 1.0, "g": 1e+21, "z": -0.0}'


# ── What replies mean ────────────────────────────────────────────────────────────────────────────────────────────────

TIMEOUT, REFUSED = Unreached("timeout"), Unreached("connection")


@pytest.mark.parametrize(
    ("script", "tries", "last_error"),
    [
        ([500, 503, 200], 3, "http_503"),
        ([TIMEOUT, 200], 2, "timeout"),
        ([REFUSED, 200], 2, "connection"),
        ([Unreached("tls"), Unreached("unresolved"), Unreached("protocol"), 200], 4, "protocol"),
        ([400], 1, "http_400"),
        ([401], 1, "http_401"),
        ([404], 1, "http_404"),
        ([410], 1, "http_410"),
        ([Reply(429, "30"), 200], 2, "http_429"),
        ([408, 425, 200], 3, "http_425"),
        ([200], 1, None),
        ([204], 1, None),
        ([301], 1, "http_301"),
        ([500] * 99, len(WAITS_SECONDS) + 1, "http_500"),
        ([TIMEOUT] * 99, len(WAITS_SECONDS) + 1, "timeout"),
        ([ForbiddenAddress()], 1, "forbidden_address"),
    ],
    ids=str,
)
def test_whk_05_a_receivers_reply_decides_over_its_telling_and_nothing_else(
    script: list[Any], tries: int, last_error: str | None
) -> None:
    """The job stays completed, one call was made; the last failure is there to be seen, also after a try went well."""
    postbox = Postbox(*script)
    house = house_with(postbox)
    job = accepted(house)
    house.settle(minutes=2_000)
    row = house.job(job.job_id)
    assert (row.status, len(house.provider.questions)) == (JobStatus.COMPLETED, 1)  # type: ignore[attr-defined]
    assert row.result is not None
    notice = told(house, job)
    assert (notice.tries, notice.last_error) == (tries, last_error)
    arrived = len(script) == tries and script[-1] in (200, 204)
    assert notice.status is (NoticeStatus.DELIVERED if arrived else NoticeStatus.GIVEN_UP)
    assert row.due_at is None


def test_whk_05_a_webhook_that_fails_does_not_hide_why_its_job_failed() -> None:
    """Both are told."""
    house = house_with(Postbox(410), ProviderRefusedRequest())
    job = accepted(house)
    house.settle()
    row = house.job(job.job_id)
    assert row.error is not None
    assert (row.error.code, told(house, job).last_error) == ("invalid_request", "http_410")


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [
        ("120", 120.0),
        (" 120 ", 120.0),
        ("0", 0.0),
        (datetime.fromtimestamp(START / 1000 + 90, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), 90.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("١٢", None),
        ("9" * 400, None),
        ("Thu, 99 Jan 99999 00:00:00 GMT", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_date(retry_after: str | None, seconds: float | None) -> None:
    """What is neither says nothing."""
    house = House()
    with pytest.raises(Untold) as untold:
        channel_of(house, Postbox(Reply(429, retry_after))).tell(
            replace(house.accept(), webhook=Webhook(URL, house.seals.seal(SECRET)))
        )
    assert untold.value.retry_after_seconds == seconds


@pytest.mark.parametrize("status", range(300, 600))
def test_a_status_that_is_no_success_is_tried_again_or_not_by_rule(status: int) -> None:
    """Redirects are not followed and, like most 4xx, final."""
    house = House()
    job = replace(house.accept(), webhook=Webhook(URL, house.seals.seal(SECRET)))
    with pytest.raises(Untold) as untold:
        channel_of(house, Postbox(status)).tell(job)
    assert untold.value.again is (status in (408, 425, 429) or status >= 500)
    assert untold.value.message == f"http_{status}"


def test_secrets_out_of_reach_are_waited_for() -> None:
    """Nothing is sent unsigned; the job has ended all the same."""
    postbox = Postbox()
    house = house_with(postbox)
    house.webhook_secrets.sealed["alice"] = [(house.seals.seal(SECRET), None)]
    jobs = [accepted(house), accepted(house, secret=None)]
    house.work()
    sealed = house.webhook_secrets.sealed.pop("alice")
    house.seals.broken = True
    house.tell()
    assert [told(house, job).last_error for job in jobs] == ["secret_unreadable", "no_secret"]
    assert postbox.sent == []
    house.seals.broken = False
    house.webhook_secrets.sealed["alice"] = sealed
    house.settle()
    assert [told(house, job).status for job in jobs] == [NoticeStatus.DELIVERED] * 2


def test_a_job_without_a_webhook_has_nobody_to_tell() -> None:
    """Which no row of ours asks for."""
    house = House()
    job = house.accept()
    with pytest.raises(Untold, match="no_webhook"):
        channel_of(house, Postbox()).tell(job)


def test_the_tries_end_within_a_day_and_each_within_its_lease() -> None:
    """The schedule is documented: ten tries, some fifteen hours."""
    assert (len(WAITS_SECONDS), sum(WAITS_SECONDS)) == (9, 56_172)
    assert 1000 * Outbound().seconds < TELLING_MS / 2


# ── Taking one in ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_secret_is_kept_sealed_and_nowhere_else() -> None:
    """Neither in the stored request nor anywhere in the row; metadata and prompt are where they were."""
    house = House()
    job = accepted(house, metadata={"a": 1})
    assert job.webhook == Webhook(URL, house.seals.seal(SECRET))
    assert job.targets == ("webhook",)
    assert SECRET[6:20] not in repr(replace(job, webhook=None))
    assert "webhook" not in (job.request.text or "")
    assert SECRET[6:20] not in str(house.journal.events)


def test_two_secrets_are_two_requests() -> None:
    """Under one key they are a conflict; the same one is a replay."""
    from backburner.errors import IdempotencyConflict

    house = House()
    first = accepted(house, key="k")
    assert accepted(house, key="k").job_id == first.job_id
    with pytest.raises(IdempotencyConflict):
        accepted(house, key="k", secret=OTHER)
    with pytest.raises(IdempotencyConflict):
        house.accept("k")


def test_without_any_secret_a_webhook_is_refused_with_what_to_do() -> None:
    """Nothing unsigned is ever promised."""
    house = House()
    with pytest.raises(InvalidRequest, match=r"whsec_.*rotate") as refused:
        accepted(house, secret=None)
    assert refused.value.field == "webhook.secret"
    assert house.store.rows == {}
    house.webhook_secrets.sealed["alice"] = [(house.seals.seal(SECRET), None)]
    assert accepted(house, secret=None).webhook == Webhook(URL, None)


def test_a_seal_that_cannot_be_made_is_a_passing_trouble() -> None:
    """503, and nothing stored."""
    from backburner.errors import Unavailable

    house = House()

    def seal(_: str) -> str:
        raise PortUnavailable("AccessDenied")

    house.seals.seal = seal  # type: ignore[method-assign, assignment]
    with pytest.raises(Unavailable):
        accepted(house)
    assert house.store.rows == {}


# ── Whither ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def recording(resolver: RecordingResolver) -> tuple[Outbound, RecordingNetwork]:
    """A way out that leads nowhere and says where it would have led."""
    network = RecordingNetwork()
    return Outbound(resolve=resolver, network=network), network


def test_whk_02_hundreds_of_hostile_urls_open_no_connection_to_an_inner_address() -> None:
    """Each is refused at intake; and had it got in, by an older version say, it would be refused when it is sent."""
    outbound, network = recording(RecordingResolver())
    hostile = list(urls())
    assert len(hostile) >= 200
    house = house_with(outbound)
    for url in hostile:
        with pytest.raises(InvalidRequest) as refused:
            accepted(house, url=url)
        assert refused.value.field == "webhook.url"
        job = replace(house.accept(), webhook=Webhook(url, house.seals.seal(SECRET)))
        with pytest.raises(Untold, match="forbidden_address"):
            channel_of(house, outbound).tell(job)
    assert network.tried == []


def test_whk_02_hostile_hosts_are_refused_by_the_address_also_where_their_form_was_let_through() -> None:
    """The second wall by itself: endpoints as a laxer parser would make them, resolved as the system does it."""
    resolver = RecordingResolver()
    outbound, network = recording(resolver)
    tried = 0
    for url in urls():
        host = url.removeprefix("https://").partition("/")[0].rpartition("@")[2].partition("#")[0]
        if not host or not host.isascii() or any(c in host for c in "\\%\t\r\n \x00"):
            continue
        endpoint = Endpoint("https", host.removesuffix(":8443").strip("[]"), 443, "/", is_local=False)
        tried += 1
        try:
            outbound.post(endpoint, [], b"")
        except ForbiddenAddress:
            continue
        except (Unreached, httpcore2.LocalProtocolError):
            pass
        assert not [address for address, _ in network.tried if leads_inward(address)], url
    assert tried > 200


@pytest.mark.parametrize(
    "answers",
    [
        ["127.0.0.1"],
        ["1.1.1.1", "10.0.0.1"],
        ["1.1.1.1", "fd00:ec2::254"],
        ["::ffff:169.254.169.254"],
        ["64:ff9b::a9fe:a9fe"],
        [],
    ],
    ids=str,
)
def test_whk_02_a_name_that_turns_inward_after_intake_is_not_connected_to(answers: list[str]) -> None:
    """DNS rebinding: public when the job was accepted, inner, or mixed, when it is told. Final, with a plain reason."""
    resolver = RecordingResolver({"hooks.example.com": ["1.1.1.1"]})
    outbound, network = recording(resolver)
    house = house_with(outbound)
    job = accepted(house)
    house.work()
    resolver.answers["hooks.example.com"] = answers
    house.settle()
    assert network.tried == []
    notice = told(house, job)
    assert (notice.status, notice.tries, notice.last_error) == (NoticeStatus.GIVEN_UP, 1, "forbidden_address")


def test_whk_02_a_name_is_looked_up_once_and_connected_to_where_it_was_checked() -> None:
    """A resolver that changes its answer at the second question is not asked one."""
    answers = iter([["1.1.1.1"], ["10.0.0.1"], ["10.0.0.1"]])
    asked = []

    def turning(host: str, _port: int, _seconds: float) -> list[str]:
        asked.append(host)
        return next(answers)

    network = RecordingNetwork()
    with pytest.raises(Unreached):
        Outbound(resolve=turning, network=network).post(
            Endpoint("https", "hooks.example.com", 8443, "/", is_local=False), [], b""
        )
    assert asked == ["hooks.example.com."]
    assert network.tried == [("1.1.1.1", 8443)]


def test_further_addresses_are_tried_but_not_for_ever() -> None:
    """Three of them."""
    resolver = RecordingResolver({"hooks.example.com": [f"1.1.1.{n}" for n in range(1, 10)]})
    outbound, network = recording(resolver)
    with pytest.raises(Unreached, match="connection"):
        outbound.post(Endpoint("https", "hooks.example.com", 443, "/", is_local=False), [], b"")
    assert [address for address, _ in network.tried] == ["1.1.1.1", "1.1.1.2", "1.1.1.3"]
