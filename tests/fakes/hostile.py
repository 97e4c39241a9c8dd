"""URLs that lead inward in one disguise or another, and a resolver and a network that note what becomes of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import httpcore2

INNER = (
    "127.0.0.1", "127.255.255.254", "169.254.169.254", "169.254.170.2", "10.0.0.1", "172.16.0.1", "172.31.255.255",
    "192.168.1.1", "100.64.0.1", "100.127.255.255", "0.0.0.0", "198.18.0.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "192.0.0.9",
)  # fmt: skip
"""This host, the metadata services, private and shared networks, benchmarks, multicast, what is reserved."""
INNER_6 = (
    "::1", "::", "fe80::1", "fe80::1%eth0", "fe80::1%25eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "ff0e::1",
    "fec0::1", "2001:db8::1", "3fff::1", "100::1", "5f00::1", "2001:10::1", "2001:20::1",
)  # fmt: skip


def _value(address: str) -> int:
    return int(IPv4Address(address))


def _octets(address: str, form: Callable[[int], str]) -> str:
    return ".".join(form(octet) for octet in IPv4Address(address).packed)


def _embedded(prefix: str, address: str, shift: int = 0) -> str:
    return f"[{IPv6Address(int(IPv6Address(prefix)) | (_value(address) << shift))}]"


FORMS: dict[str, Callable[[str], str]] = {
    "as it is": lambda a: a,
    "with a dot at its end": lambda a: f"{a}.",
    "decimal": lambda a: str(_value(a)),
    "hexadecimal": lambda a: hex(_value(a)),
    "octal": lambda a: f"0{_value(a):o}",
    "hexadecimal octets": lambda a: _octets(a, hex),
    "octal octets": lambda a: _octets(a, lambda octet: f"0{octet:o}"),
    "padded octets": lambda a: _octets(a, lambda octet: f"{octet:05d}"),
    "two parts": lambda a: f"{_value(a) >> 24}.{_value(a) & 0xFFFFFF}",
    "three parts": lambda a: f"{_value(a) >> 24}.{_value(a) >> 16 & 0xFF}.{_value(a) & 0xFFFF}",
    "hexadecimal and decimal parts": lambda a: f"{hex(_value(a) >> 24)}.{_value(a) & 0xFFFFFF}",
    "an overflow": lambda a: str(_value(a) + 2**32),
    "full-width digits": lambda a: a.translate({ord(d): 0xFF10 + int(d) for d in "0123456789"}),
    "ideographic dots": lambda a: a.replace(".", "。"),
    "percent-encoded dots": lambda a: a.replace(".", "%2e"),
    "user info": lambda a: f"hooks.example.test@{a}",
    "a backslash": lambda a: f"hooks.example.test\\@{a}",
    "a fragment": lambda a: f"{a}#.hooks.example.test",
    "IPv4-mapped": lambda a: _embedded("::ffff:0:0", a),
    "IPv4-mapped, dotted": lambda a: f"[::ffff:{a}]",
    "IPv4-compatible": lambda a: f"[::{a}]",
    "IPv4-translated": lambda a: _embedded("::ffff:0:0:0", a),
    "NAT64": lambda a: _embedded("64:ff9b::", a),
    "local NAT64": lambda a: _embedded("64:ff9b:1::", a),
    "6to4": lambda a: _embedded("2002::", a, 80),
    "Teredo": lambda a: f"[{IPv6Address(int(IPv6Address('2001::')) | (_value(a) ^ 0xFFFFFFFF))}]",
    "ISATAP": lambda a: _embedded("2600:9000::5efe:0:0", a),
}
"""Each way of writing an IPv4 address that some parser, resolver or router takes for it."""


def urls() -> Iterator[str]:
    """All of them, each a receiver's URL but for its host."""
    for address in INNER:
        for form in FORMS.values():
            yield f"https://{form(address)}/hook"
    for address in INNER_6:
        yield f"https://[{address}]/hook"
        yield f"https://[{address}]:8443/hook"
    for name in NAMES:
        yield f"https://{name}/hook"
    yield from ODD


NAMES = (
    "localhost", "LOCALHOST", "localhost.", "LOCALHOST.", "a.localhost", "localhost.localdomain", "printer.local",
    "metadata.google.internal", "ip-10-0-0-1.ec2.internal", "instance-data", "intranet", "1.0.0.10.in-addr.arpa",
)  # fmt: skip
ODD = (
    "https:\\\\10.0.0.1\\", "https:/10.0.0.1/", "https:10.0.0.1", "//10.0.0.1/", "https://", "https:///hook",
    "https://@10.0.0.1/", "https://:@10.0.0.1/", "https://10.0.0.1:443:8443/", "https://10.0.0.1:0443/",
    "https://[::1", "https://::1/", "https://[::1]8443/", "https://[[::1]]/", "https://10.0.0.1\t/", " https://10.0.0.1/",
    "https://10.0.0.1 /", "https://10.0.0.1\x00.example.test/", "https://hooks.example.test\r\nHost: 10.0.0.1/",
    "http://10.0.0.1/", "ftp://10.0.0.1/", "file:///etc/passwd", "gopher://10.0.0.1/", "https+unix://10.0.0.1/",
)  # fmt: skip

_INNER_NETWORKS = tuple(
    (IPv6Network if ":" in text else IPv4Network)(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4", "::/8", "64:ff9b::/32", "100::/8", "2001::/23", "2001:db8::/32", "2002::/16",
        "3ffe::/16", "3fff::/20", "4000::/2", "8000::/1",
    )
)  # fmt: skip
"""From IANA's special-purpose registries; said anew, so that the program's own list is not measured by itself."""


def leads_inward(address: str) -> bool:
    """Whether a connection to this address would not leave for one public host."""
    parsed = ip_address(address)
    return any(parsed in network for network in _INNER_NETWORKS if network.version == parsed.version) or (
        ":5efe:" in IPv6Address(parsed).exploded if isinstance(parsed, IPv6Address) else False
    )


class RecordingResolver:
    """Answers as it is told; what it is not told, as the system would, which takes numbers in every form."""

    def __init__(self, answers: dict[str, Sequence[str]] | None = None) -> None:
        self.answers = answers or {}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int, _seconds: float) -> Sequence[str]:
        self.asked.append(host)
        name = host.removesuffix(".").lower()
        if name in self.answers:
            return self.answers[name]
        try:
            return [str(entry[4][0]) for entry in socket.getaddrinfo(name, port, flags=socket.AI_NUMERICHOST)]
        except socket.gaierror:
            return ["10.0.0.1"]  # of all names unknown it is to be feared that they lead inward


class RecordingNetwork(httpcore2.NetworkBackend):
    """Notes where a connection is tried to, and lets none through, or all of them to a port of this machine."""

    def __init__(self, port: int | None = None) -> None:
        self._port = port
        self.tried: list[tuple[str, int]] = []

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.NetworkStream:
        self.tried.append((host, port))
        if self._port is None:
            raise httpcore2.ConnectError("nobody is there")
        return httpcore2.SyncBackend().connect_tcp("127.0.0.1", self._port, timeout, local_address, socket_options)
