"""Where a webhook may go: the one way of writing each address, and the addresses that count as public."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backburner.addresses import Endpoint, Receivers, checked, endpoint_of, is_public
from backburner.errors import ForbiddenAddress
from tests.fakes.hostile import leads_inward, urls

DEVELOPER = Receivers(loopback=True)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("https://hooks.example.com", Endpoint("https", "hooks.example.com", 443, "/", False)),
        ("HTTPS://Hooks.Example.COM:8443/a/b?c=d&e", Endpoint("https", "hooks.example.com", 8443, "/a/b?c=d&e", False)),
        ("https://xn--b-xka.example/%C3%BC;v=1", Endpoint("https", "xn--b-xka.example", 443, "/%C3%BC;v=1", False)),
        ("https://hooks.example.xn--p1ai?x", Endpoint("https", "hooks.example.xn--p1ai", 443, "/?x", False)),
        ("https://a_b.example.com/~x", Endpoint("https", "a_b.example.com", 443, "/~x", False)),
        ("https://1.1.1.1/hook", Endpoint("https", "1.1.1.1", 443, "/hook", False)),
        ("https://[2606:4700::1111]:8443/", Endpoint("https", "2606:4700::1111", 8443, "/", False)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_public_receiver_is_taken_as_it_is_written(url: str, endpoint: Endpoint) -> None:
    """Path and query are sent byte for byte; the host is compared in lower case."""
    assert endpoint_of(url, Receivers()) == endpoint


@pytest.mark.parametrize(
    ("url", "header"),
    [
        ("https://hooks.example.com/", "hooks.example.com"),
        ("https://hooks.example.com:443/", "hooks.example.com"),
        ("https://hooks.example.com:8443/", "hooks.example.com:8443"),
        ("https://[2606:4700::1111]/", "[2606:4700::1111]"),
    ],
)
def test_the_host_header_is_what_a_browser_would_send(url: str, header: str) -> None:
    """RFC 9110: with the port unless it is the scheme's own."""
    assert endpoint_of(url, Receivers()).host_header == header


@pytest.mark.parametrize("url", list(urls()), ids=ascii)
def test_whk_02_no_disguise_of_an_inner_address_is_let_in(url: str) -> None:
    """However it is written, and with no word about what is there."""
    with pytest.raises(ForbiddenAddress) as refused:
        endpoint_of(url, Receivers())
    assert 0 < len(refused.value.message) < 120


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("http://hooks.example.com/", "https"),
        ("https://hooks.example.com:6379/", "443, 8443"),
        ("https://hooks.example.com:22/", "port 22"),
        ("https://hooks.example.com:99999/", "port 99999"),
        ("https://hooks.example.com:/", "usual form"),
        ("https://user:pw@hooks.example.com/", "user"),
        ("https://hooks.example.com/#here", "fragment"),
        ("https://hooks.example.com/a b", "ASCII"),
        ("https://hooks.example.com/\r\nX-Injected: 1", "ASCII"),
        ("https://hooks.example.com/%0d%0aX-Injected:%201", "control"),
        ("https://hooks.example.com/%7f", "control"),
        ("https://hooks.example.com/%zz", "percent-encode"),
        ('https://hooks.example.com/"', "percent-encode"),
        ("https://bücher.example/", "xn--"),
        ("https://hooks.example.com/ü", "percent-encode"),
        ("https://example/", "hooks.example.com"),
        ("https://-a.example.com/", "hooks.example.com"),
        ("https://a..example.com/", "hooks.example.com"),
        (f"https://{'a' * 64}.example.com/", "hooks.example.com"),
        (f"https://{'a.' * 127}com/", "hooks.example.com"),
        ("https://example.com/" + "a" * 2_048, "2048"),
        ("", "ASCII"),
        ("hooks.example.com", "https"),
    ],
)
def test_whk_02_what_is_wrong_with_a_url_is_said(url: str, word: str) -> None:
    """So that its owner can mend it."""
    with pytest.raises(ForbiddenAddress, match=word):
        endpoint_of(url, Receivers())


def test_plain_http_and_other_ports_are_the_deployments_choice() -> None:
    """Port 80 comes with the former; a private host does not."""
    lax = Receivers(ports=frozenset({443, 9000}), plain_http=True)
    assert endpoint_of("http://hooks.example.com/", lax).port == 80
    assert endpoint_of("http://hooks.example.com:9000/", lax).port == 9000
    for url in (
        "https://hooks.example.com:80/",
        "https://hooks.example.com:8443/",
        "http://10.0.0.1/",
        "http://[::1]/",
    ):
        with pytest.raises(ForbiddenAddress):
            endpoint_of(url, lax)


def test_a_developers_own_machine_is_let_in_by_name_and_nothing_else() -> None:
    """By any port and without TLS; what only leads there is refused as ever."""
    for host in ("localhost", "LOCALHOST", "127.0.0.1", "[::1]"):
        local = endpoint_of(f"http://{host}:54321/hook", DEVELOPER)
        assert local.is_local
        assert checked(local, ["127.0.0.1"]) == ("127.0.0.1",)
        for elsewhere in ("10.0.0.1", "169.254.169.254", "8.8.8.8"):
            with pytest.raises(ForbiddenAddress):
                checked(local, [elsewhere])
    for url in (
        "http://10.0.0.1/",
        "http://127.0.0.2:8000/",
        "http://127.1/",
        "http://hooks.example.com/",
        "https://hooks.example.com:9999/",
        "http://localhost:99999/",
        "http://localhost./",
    ):
        with pytest.raises(ForbiddenAddress):
            endpoint_of(url, DEVELOPER)
    with pytest.raises(ForbiddenAddress):
        checked(endpoint_of("https://hooks.example.com/", DEVELOPER), ["127.0.0.1"])


OUTER = endpoint_of("https://hooks.example.com/", Receivers())


@pytest.mark.parametrize(
    "answers",
    [
        [], ["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"], ["8.8.8.8", "fd00:ec2::254"],
        ["2606:4700::1111", "169.254.169.254"], ["::ffff:8.8.8.8"], ["64:ff9b::808:808"], ["fe80::1%eth0"],
        ["2606:4700::1111%eth0"], ["garbage"], ["100.64.0.1"], ["2002:808:808::1"], ["224.0.1.1"], ["168.63.129.16"],
    ],
    ids=str,
)  # fmt: skip
def test_whk_02_one_inner_address_among_a_names_answers_spoils_them_all(answers: list[str]) -> None:
    """Also a public one in disguise: nobody needs it written so."""
    with pytest.raises(ForbiddenAddress):
        checked(OUTER, answers)


def test_public_answers_are_kept_in_their_order() -> None:
    """The system's preference counts."""
    assert checked(OUTER, ["2606:4700::1111", "1.1.1.1"]) == ("2606:4700::1111", "1.1.1.1")


@given(st.integers(0, 2**32 - 1).map(IPv4Address) | st.integers(0, 2**128 - 1).map(IPv6Address))
@example(ip_address("192.88.99.1"))
@example(ip_address("224.0.1.1"))
@example(ip_address("3fff::1"))
@example(ip_address("2600:9000::5efe:a00:1"))
def test_no_address_of_a_special_registry_is_public(address: IPv4Address | IPv6Address) -> None:
    """Against the registries as the tests know them."""
    if is_public(address):
        assert not leads_inward(str(address))


@given(
    st.text(st.characters(max_codepoint=0x2FF), max_size=60).map(lambda text: f"https://{text}") | st.text(max_size=40)
)
def test_no_url_whatever_is_another_error(url: str) -> None:
    """An endpoint or a refusal; and what is let in has a host that no resolver takes for a number."""
    try:
        endpoint = endpoint_of(url, Receivers())
    except ForbiddenAddress:
        return
    assert endpoint.target.isascii()
    assert ":" in endpoint.host or endpoint.host.rpartition(".")[2].isalpha() or is_public(ip_address(endpoint.host))
