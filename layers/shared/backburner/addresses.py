"""Where a webhook may go: the form of its URL at intake, and the addresses its host stands for when it is sent.

Only one way of writing each thing is let in, so that no disguise has to be recognised: a host is a name whose last
label is a word, or an address in its usual form. Python's `is_global` alone does not do: it is true of multicast, of
NAT64 (64:ff9b::/96), of IPv4-compatible and 6to4 relay addresses, which lead elsewhere than they seem to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

from backburner.errors import ForbiddenAddress

URL_CHARACTERS_MAX = 2_048
HOST_CHARACTERS_MAX = 253
PORTS_DEFAULT = frozenset({443, 8443})
HTTP_PORT, HTTPS_PORT = 80, 443

_ISATAP: Final = frozenset({0x0000_5EFE, 0x0200_5EFE})
_NOT_RECEIVERS_4: Final = tuple(
    map(
        IPv4Network,
        (
            "192.0.0.0/24",  # IETF protocol assignments, of which Python takes two for global
            "192.88.99.0/24",  # 6to4 relays
            "168.63.129.16/32",  # a cloud's metadata service, at a public address
        ),
    )
)
_UNICAST_6: Final = IPv6Network("2000::/3")
"""All that is given out. Mapped, compatible, translated (SIIT, NAT64), unique local, link-local lie outside."""
_NOT_RECEIVERS_6: Final = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # Teredo, ORCHID, benchmarking and other protocols' own
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4, which holds an IPv4 address
            "3ffe::/16",  # the 6bone's, given back
            "3fff::/20",  # documentation
        ),
    )
)
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_LOCAL_DOMAINS: Final = frozenset({"localhost", "local", "localdomain", "internal", "arpa", "onion"})
"""Last labels that name no public host (RFC 6761, 6762, 8375, 9476)."""
_VISIBLE: Final = re.compile(r"[!-~]+")
_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?]*)(?P<target>.*)")
_AUTHORITY: Final = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[1-9][0-9]{0,4}))?")
_TARGET: Final = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[2-9A-Fa-f][0-9A-Fa-f])*")
"""Path and query as RFC 3986 has them, without percent-encoded control characters."""
_DELETE: Final = re.compile(r"%7[Ff]")
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_LAST_LABEL: Final = re.compile(r"[a-z]{2,63}|xn--[a-z0-9-]{1,59}")
"""A word: whatever a resolver would take for a number (2130706433, 0x7f.1, 127.1) does not end so."""


@dataclass(frozen=True, slots=True)
class Receivers:
    """Which receivers the deployment sends to.

    plain_http: also without TLS, to port 80 besides. loopback: for development, also to this machine, by any port.
    """

    ports: frozenset[int] = PORTS_DEFAULT
    plain_http: bool = False
    loopback: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A receiver's URL, taken apart. `host` is lower-case and, of an IPv6 address, without brackets.

    target: path and query as they were given. is_local: this machine, where the deployment allows that.
    """

    scheme: str
    host: str
    port: int
    target: str
    is_local: bool

    @property
    def host_header(self) -> str:
        """Host, and port where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = HTTPS_PORT if self.scheme == "https" else HTTP_PORT
        return host if self.port == usual else f"{host}:{self.port}"


def endpoint_of(url: str, receivers: Receivers) -> Endpoint:
    """Take a URL apart. Raises ForbiddenAddress if it may not be sent to, as far as its form tells."""
    if len(url) > URL_CHARACTERS_MAX:
        raise ForbiddenAddress(f"longer than {URL_CHARACTERS_MAX} characters")
    if not _VISIBLE.fullmatch(url):
        raise ForbiddenAddress("must be visible ASCII: percent-encode other characters, give a host's xn-- form")
    parts = _URL.fullmatch(url)
    scheme = parts["scheme"].lower() if parts else ""
    if parts is None or scheme not in ("https", "http"):
        raise ForbiddenAddress("must be an https:// URL")
    authority = _AUTHORITY.fullmatch(parts["authority"])
    if "@" in parts["authority"]:
        raise ForbiddenAddress("must hold no user or password")
    if authority is None:
        raise ForbiddenAddress("its host is not written in the usual form")
    target = parts["target"]
    if not _TARGET.fullmatch(target) or _DELETE.search(target):
        raise ForbiddenAddress("must hold no fragment, no control characters, and percent-encode what is not plain")
    host = _host(authority["host"].lower())
    local = receivers.loopback and host in _LOCAL_HOSTS
    if scheme == "http" and not receivers.plain_http and not local:
        raise ForbiddenAddress("must be an https:// URL")
    port = int(authority["port"] or (HTTPS_PORT if scheme == "https" else HTTP_PORT))
    allowed = receivers.ports | ({HTTP_PORT} if scheme == "http" else frozenset())
    if not (port in allowed or (local and port < 65_536)):
        listed = ", ".join(str(each) for each in sorted(allowed))
        raise ForbiddenAddress(f"port {port} is not among those that are sent to: {listed}")
    if not local:
        _refuse_inner(host)
    return Endpoint(scheme, host, port, target if target.startswith("/") else f"/{target}", local)


def _host(written: str) -> str:
    """The host without brackets. Raises ForbiddenAddress unless it is a full name, or an address in its usual form."""
    try:
        if written.startswith("["):
            return str(IPv6Address(written[1:-1]))
        if re.fullmatch(r"[0-9.]+", written):
            return str(IPv4Address(written))
    except AddressValueError as error:
        raise ForbiddenAddress("its host is no address in the usual form") from error
    labels = written.split(".")
    if written in _LOCAL_HOSTS:
        return written
    if (
        len(written) > HOST_CHARACTERS_MAX
        or len(labels) < 2
        or not all(_LABEL.fullmatch(label) for label in labels)
        or not _LAST_LABEL.fullmatch(labels[-1])
    ):
        raise ForbiddenAddress("its host must be a full public name, such as hooks.example.com")
    return written


def _refuse_inner(host: str) -> None:
    """Refuse what is no public host by its mere form. Raises ForbiddenAddress."""
    if host.rpartition(".")[2] in _LOCAL_DOMAINS:
        raise ForbiddenAddress("its host must be a full public name, such as hooks.example.com")
    try:
        literal = ip_address(host)
    except ValueError:
        return  # a name; what it stands for is looked up when the webhook is sent
    if not is_public(literal):
        raise ForbiddenAddress("its host must be a public address")


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether the address is one host's, reachable from anywhere, and not another address in disguise."""
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast and not any(address in net for net in _NOT_RECEIVERS_4)
    return (
        address in _UNICAST_6
        and address.is_global
        and address.scope_id is None
        and (int(address) >> 32) & 0xFFFF_FFFF not in _ISATAP
        and not any(address in net for net in _NOT_RECEIVERS_6)
    )


def checked(endpoint: Endpoint, resolved: Sequence[str]) -> tuple[str, ...]:
    """The addresses that the endpoint's host stands for, if each of them may be sent to. Raises ForbiddenAddress.

    One that may not spoils them all: whoever mixes them is up to something.
    """
    if not resolved:
        raise ForbiddenAddress("its host has no address")
    for text in resolved:
        try:
            address = ip_address(text)
        except ValueError as error:
            raise ForbiddenAddress("its host stands for no address") from error
        if not (address.is_loopback if endpoint.is_local else is_public(address)):
            raise ForbiddenAddress("its host stands for an address that is not public")
    return tuple(resolved)
