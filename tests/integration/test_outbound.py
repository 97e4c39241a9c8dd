"""The way out over real sockets and TLS: the name kept, the deadline kept, little read, nothing followed."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from backburner.addresses import Endpoint, Receivers, endpoint_of
from backburner.channels import outbound as module
from backburner.channels.outbound import READ_BYTES_MAX, Outbound, Reply, Unreached, resolve
from tests.fakes.hostile import RecordingNetwork, RecordingResolver
from tests.fakes.receiver import Received, Receiver, Step

NAME, PUBLIC = "hooks.example.com", "1.1.1.1"
SECONDS = 1.0
SLACK_SECONDS = 5.0
"""For a busy machine; without its deadline each of them would take longer than this still."""
"""What a busy machine may take on top."""


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and NAME.pem and other.example.com.pem that it signed."""
    folder = tmp_path_factory.mktemp("certificates")
    now = datetime.now(UTC)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Test CA")])

    def signed(subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
        )
        for extension in (
            *extensions,
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        ):
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)

    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    (folder / "ca.pem").write_bytes(signed(ca_name, ca_key, x509.BasicConstraints(ca=True, path_length=None), usage))
    for name in (NAME, "other.example.com"):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        pem = signed(subject, key, x509.SubjectAlternativeName([x509.DNSName(name)]))
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / f"{name}.pem").write_bytes(pem + secret)
    return folder


@contextmanager
def over_tls(
    certificates: Path, *script: Step, name: str = NAME
) -> Iterator[tuple[Receiver, Outbound, RecordingNetwork]]:
    """A receiver with a certificate for the name, and a way out that finds it at a public address."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificates / f"{name}.pem")
    trusting = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with Receiver(list(script), tls=server) as receiver:
        network = RecordingNetwork(receiver.port)
        yield receiver, Outbound(RecordingResolver({NAME: [PUBLIC]}), network, trusting, SECONDS), network


def the_endpoint(url: str = f"https://{NAME}/in?x=1") -> Endpoint:
    """A receiver's."""
    return endpoint_of(url, Receivers(loopback=True))


@contextmanager
def in_the_clear(*script: Step) -> Iterator[tuple[Receiver, Outbound, Endpoint]]:
    """A receiver on this machine, without TLS."""
    with Receiver(list(script)) as receiver:
        yield receiver, Outbound(seconds=SECONDS), the_endpoint(receiver.url)


def the_request(receiver: Receiver) -> Received:
    """The one that came."""
    (request,) = receiver.requests
    return request


def test_the_connection_goes_to_the_checked_address_and_keeps_the_name(certificates: Path) -> None:
    """SNI, the certificate's check and the Host header have the name; the resolver was asked once."""
    with over_tls(certificates) as (receiver, outbound, network):
        assert outbound.post(the_endpoint(), [("X-A", "b")], b"body") == Reply(204, None)
        request = the_request(receiver)
    assert network.tried == [(PUBLIC, 443)]
    assert outbound.resolve.asked == [f"{NAME}."]  # type: ignore[attr-defined]
    assert (request.line, request.server_name) == ("POST /in?x=1 HTTP/1.1", NAME)
    assert (request.headers["host"], request.headers["x-a"]) == (NAME, "b")


def test_a_certificate_for_another_name_is_refused_before_anything_is_sent(certificates: Path) -> None:
    """Whoever has the address has not the name."""
    with over_tls(certificates, name="other.example.com") as (receiver, outbound, _):
        with pytest.raises(Unreached, match="tls"):
            outbound.post(the_endpoint(), [], b"body")
        assert receiver.requests == []


def test_a_certificate_that_nobody_signed_is_refused(certificates: Path) -> None:
    """The system's authorities count, here none of ours."""
    with over_tls(certificates) as (receiver, outbound, network):
        strict = Outbound(outbound.resolve, network, seconds=SECONDS)
        with pytest.raises(Unreached, match="tls"):
            strict.post(the_endpoint(), [], b"body")
        assert receiver.requests == []


def test_whk_01_the_bytes_that_are_given_are_the_bytes_that_arrive() -> None:
    """With their length in bytes, and nothing added that the caller did not give but Host, length and close."""
    body = '{"text":"héllo 中 😀 \u2028 \\" / <tag> &","n":1e21}'.encode()
    with in_the_clear() as (receiver, outbound, endpoint):
        outbound.post(endpoint, [("webhook-id", "a")], body)
        request = the_request(receiver)
    assert request.body == body
    assert request.headers == {
        "host": f"127.0.0.1:{endpoint.port}",
        "content-length": str(len(body)),
        "connection": "close",
        "webhook-id": "a",
    }


def test_a_large_body_arrives_whole() -> None:
    """A quarter of a megabyte, in as many pieces as the connection takes."""
    body = bytes(range(256)) * 1_000
    with in_the_clear() as (receiver, outbound, endpoint):
        outbound.post(endpoint, [], body)
        assert the_request(receiver).body == body


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_answer_and_is_not_followed(status: int) -> None:
    """Not even to where it might be harmless."""
    with Receiver() as elsewhere, in_the_clear(Step(status, [("Location", elsewhere.url)])) as (receiver, outbound, at):
        assert outbound.post(at, [], b"").status == status
        assert (receiver.connections, elsewhere.connections) == (1, 0)


def test_retry_after_comes_along_and_nothing_else_of_the_reply() -> None:
    """Status and one header."""
    with in_the_clear(Step(429, [("retry-AFTER", "30"), ("X-Secret", "s")], b"secret")) as (_, outbound, endpoint):
        assert outbound.post(endpoint, [], b"") == Reply(429, "30")


@pytest.mark.parametrize(
    "step",
    [
        Step(hang=True),
        Step(drip_seconds=0.05),
        Step(raw=b"HTTP/1.1 100 Continue\r\n\r\n" * 100, drip_seconds=0.01),
        Step(raw=b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 1_000, drip_seconds=0.02),
    ],
    ids=["no answer", "a byte now and then", "continue, continue", "a header without end"],
)  # fmt: skip
def test_a_receiver_that_drips_does_not_stretch_the_deadline(step: Step) -> None:
    """Each byte comes well before a read would time out; together they have one deadline."""
    began = time.monotonic()
    with in_the_clear(step) as (_, outbound, endpoint), pytest.raises(Unreached, match="timeout"):
        outbound.post(endpoint, [], b"")
    assert SECONDS <= time.monotonic() - began < SECONDS + SLACK_SECONDS


def test_a_handshake_that_never_ends_is_ended_by_the_deadline() -> None:
    """A port that accepts and says nothing in TLS."""
    began = time.monotonic()
    with in_the_clear() as (_, outbound, endpoint), pytest.raises(Unreached, match="timeout"):
        outbound.post(the_endpoint(f"https://127.0.0.1:{endpoint.port}/"), [], b"")
    assert time.monotonic() - began < SECONDS + SLACK_SECONDS


def test_a_receiver_that_does_not_take_the_body_is_left_at_the_deadline() -> None:
    """The body is larger than what the system buffers on the way."""
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(Unreached, match="timeout"):
        Outbound(seconds=SECONDS).post(
            the_endpoint(f"http://127.0.0.1:{deaf.getsockname()[1]}/"), [], bytes(50_000_000)
        )
    assert time.monotonic() - began < SECONDS + SLACK_SECONDS


def test_a_resolver_that_hangs_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own takes no timeout."""
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: answered.wait(30))
    began = time.monotonic()
    with pytest.raises(Unreached, match="timeout"):
        Outbound(seconds=0.2).post(the_endpoint(), [], b"")
    assert time.monotonic() - began < 0.2 + SLACK_SECONDS
    answered.set()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "protocol"),
        (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", "protocol"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * READ_BYTES_MAX, "protocol"),
        (b"HTTP/1.1 2000" + b" " * READ_BYTES_MAX, "protocol"),
        (b"HTTP/1.1 200 OK\r\nX: y\r\n", "protocol"),
    ],
    ids=["nothing", "another protocol", "endless continues", "no status", "half a head"],
)
def test_a_reply_that_is_none_is_no_success(raw: bytes, reason: str) -> None:
    """And little of it is read."""
    with in_the_clear(Step(raw=raw)) as (_, outbound, endpoint), pytest.raises(Unreached) as unreached:
        outbound.post(endpoint, [], b"")
    assert unreached.value.reason in (reason, "connection")


LARGE = {
    "a body": b"HTTP/1.1 503 No\r\nContent-Length: 10000000\r\n\r\n" + b"a" * 10_000_000,
    "a body without end": b"HTTP/1.1 503 No\r\n\r\n" + b"a" * 10_000_000,
    "a header": b"HTTP/1.1 503 No\r\nX-Filler: " + b"a" * 10_000_000,
    "headers": b"HTTP/1.1 503 No\r\n" + b"X: y\r\n" * 1_000_000,
    "a reason": b"HTTP/1.1 503 " + b"a" * 10_000_000,
    "a head just too large": b"HTTP/1.1 503 No\r\nX: " + b"a" * (READ_BYTES_MAX - 23) + b"\r\n\r\n",
}


@pytest.mark.parametrize("raw", LARGE.values(), ids=LARGE)
def test_of_a_large_reply_at_most_four_kilobytes_are_read(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    """Head and body together; the status counts all the same, so that a talkative receiver is not told again."""
    read: list[int] = []
    plain = module._Bounded.read

    def counted(self: module._Bounded, max_bytes: int, timeout: float | None = None) -> bytes:
        data = plain(self, max_bytes, timeout)
        read.append(len(data))
        return data

    monkeypatch.setattr(module._Bounded, "read", counted)
    with in_the_clear(Step(raw=raw)) as (_, outbound, endpoint):
        assert outbound.post(endpoint, [], b"") == Reply(503, None)
    assert sum(read) <= READ_BYTES_MAX == 4_096


def test_a_closed_port_and_an_unknown_name_have_their_own_words() -> None:
    """For the job's deliveries."""
    with Receiver() as receiver:
        endpoint = the_endpoint(receiver.url)
    with pytest.raises(Unreached, match="connection"):
        Outbound(seconds=SECONDS).post(endpoint, [], b"")

    def unknown(_host: str, _port: int, _seconds: float) -> list[str]:
        raise OSError

    with pytest.raises(Unreached, match="unresolved"):
        Outbound(unknown).post(the_endpoint(), [], b"")


def test_the_systems_resolver_is_asked_for_all_addresses() -> None:
    """Of this machine, at least; and an unknown name is an error."""
    assert set(resolve("localhost", 443, 5.0)) <= {"127.0.0.1", "::1"}
    with pytest.raises(OSError):  # noqa: PT011  it is the operating system's to say which
        resolve("no-such-name.invalid.", 443, 5.0)
