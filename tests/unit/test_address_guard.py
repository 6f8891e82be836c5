"""Which addresses the broker connects to for its users, and which URLs it takes."""

from ipaddress import ip_address

import pytest

from headrace.model.errors import AddressRefused, InvalidArgument
from headrace.model.receiver_url import parse_receiver_url
from headrace.push.address_guard import AddressGuard

REFUSED = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "10.255.255.255",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "100.127.255.255",
    "100.100.100.200",
    "169.254.169.254",
    "169.254.0.1",
    "168.63.129.16",
    "192.0.0.1",
    "192.0.0.192",
    "192.0.2.1",
    "198.51.100.1",
    "203.0.113.1",
    "198.18.0.1",
    "198.19.255.255",
    "192.88.99.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::1",
    "2002:7f00:1::1",
    "2002:808:808::1",
    "2001:0:1::1",
    "2001:2::1",
    "2001:10::1",
    "2001:db8::1",
    "3fff::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "2606:4700::1%eth0",
    "fec0::1",
    "ff02::1",
    "100::1",
    "5f00::1",
    "4000::1",
]
ALLOWED = [
    "8.8.8.8",
    "93.184.216.34",
    "11.0.0.1",
    "172.15.255.255",
    "172.32.0.1",
    "100.63.255.255",
    "100.128.0.1",
    "126.255.255.255",
    "128.0.0.1",
    "169.253.255.255",
    "192.0.1.1",
    "223.255.255.255",
    "2606:4700::1111",
    "2a00:1450:4001::1",
    "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
    "2001:4860:4860::8888",
]


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_is_not_of_the_public_internet_is_refused(address: str) -> None:
    with pytest.raises(AddressRefused, match="webhook_networks") as caught:
        AddressGuard().check(ip_address(address), 443, "receiver.example")
    assert caught.value.details["address"] == str(ip_address(address))
    assert not caught.value.retryable


@pytest.mark.parametrize("address", ALLOWED)
def test_an_address_of_the_public_internet_is_allowed(address: str) -> None:
    AddressGuard().check(ip_address(address), 443, "receiver.example")


def test_the_operator_allows_networks() -> None:
    guard = AddressGuard(["10.1.0.0/16", "fd00:1::/32", "loopback"])
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd00:1::9", "127.0.0.1", "127.9.9.9", "::1"):
        guard.check(ip_address(address), 25, "receiver.example")  # every port of it
    for address in ("10.2.0.1", "fd00:2::9", "169.254.169.254", "::ffff:10.2.0.1"):
        with pytest.raises(AddressRefused):
            guard.check(ip_address(address), 443, "receiver.example")


def test_ports_of_other_protocols_are_refused() -> None:
    guard = AddressGuard()
    for port in (80, 443, 1024, 8080, 65535):
        guard.check(ip_address("8.8.8.8"), port, "receiver.example")
    for port in (1, 22, 25, 53, 1023):
        with pytest.raises(AddressRefused, match=f"port {port}"):
            guard.check(ip_address("8.8.8.8"), port, "receiver.example")


@pytest.mark.parametrize("network", ["10.0.0.0/33", "10.0.0.1/8", "localhost", "", "*", "fe80::%1/10"])
def test_a_network_that_is_none_is_refused_when_the_guard_is_made(network: str) -> None:
    with pytest.raises(InvalidArgument, match="webhook_networks"):
        AddressGuard([network])


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://example.org", "http://example.org/"),
        ("HTTP://Example.ORG:80/a?b=c", "http://example.org/a?b=c"),
        ("https://example.org.:443/", "https://example.org/"),
        ("https://example.org:8443/ü/%41?q=ü", "https://example.org:8443/%C3%BC/%41?q=%C3%BC"),
        ("http://[2001:DB8:0::1]:8080/x", "http://[2001:db8::1]:8080/x"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://\uff11\uff12\uff17.\uff10.\uff10.\uff11/", "http://127.0.0.1/"),
        ("http://0x7f.1/", "http://0x7f.1/"),
        ("http://a?b", "http://a/?b"),
    ],
)
def test_a_url_has_one_normal_form(url: str, text: str) -> None:
    parsed = parse_receiver_url(url)
    assert parsed.text == text
    assert parse_receiver_url(text) == parsed


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org",
        "/path",
        "//example.org/",
        "ftp://example.org/",
        "file:///etc/passwd",
        "gopher://example.org/",
        "javascript:alert(1)",
        "http://",
        "http:///path",
        "http://:80/",
        "http://user@example.org/",
        "http://user:secret@example.org/",
        "http://example.org@127.0.0.1/",
        "http://example.org\\@127.0.0.1/",
        "http://example.org/\r\nX: y",
        "http://example.org/a b",
        "http://example.org/\x00",
        "http://exa\tmple.org/",
        "http://example.org/\u2028",
        "http://example.org/#fragment",
        "http://example.org:0/",
        "http://example.org:65536/",
        "http://example.org:x/",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://[127.0.0.1]/",
        "http://[::1/",
        "http://[::1]x/",
        "http://exa%6dple.org/",
        "http://-example.org/",
        "http://a..b/",
        "http://" + "a" * 254 + "/",
        "http://example.org/" + "a" * 2048,
        "http://\ud800.example/",
        "http://xn--\u00fc.example/",
        "http://a\u2100b.example/",
    ],
)
def test_a_url_that_could_be_understood_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_receiver_url(url)


def test_an_address_in_a_url_is_refused_before_anything_is_sent() -> None:
    for url in ("http://127.0.0.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://169.254.169.254/latest/"):
        with pytest.raises(AddressRefused):
            AddressGuard().check_url(parse_receiver_url(url))
    for url in ("http://8.8.8.8/", "http://localhost/"):  # a name is checked when it is resolved
        AddressGuard().check_url(parse_receiver_url(url))
