from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_portable.media.addresses import (
    MAX_URL_CHARS,
    AddressPolicy,
    Domains,
    MediaUrlError,
    is_web,
    read_url,
    redirected,
)

ANY_NAME = Domains(["*"])
FORM = "neither a name nor an address"
NUMBERS = "another form than four decimal numbers"
UNPRINTABLE = "no spaces, backslashes or control characters"
NO_URL = "no http or https URL with a host"
NOT_AMONG = "is not among front.media.urls.allowed_domains"
USER = "user or password"
PORT = "its port is no number"

HOSTILE = {
    NO_URL: (
        *("file:///etc/passwd", "ftp://example.com/a.png", "gopher://example.com/_GET"),
        *("dict://example.com:11211/stats", "javascript:alert(1)", "https:example.com/a.png"),
        *("https:/example.com/a.png", "https//example.com/a.png", "//example.com/a.png"),
        *("/etc/passwd", "", "unix:///var/run/docker.sock"),
        *("https+unix://%2Fvar%2Frun%2Fdocker.sock/a",),
    ),
    FORM: (
        *("https://", "https:///a.png", "https://?a.png", "http://127.0.0.1../"),
        *("http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[::1%lo]/"),
        *("http://[::1/", "http://::1/", "http://[v1.127.0.0.1]/", "http://[::1]example.com/"),
        *("http://[::ffff:0x7f000001]/", "http://%31%32%37.0.0.1/", "http://127%2e0%2e0%2e1/"),
        *("http://localhost%00.example.com/", "http://-example.com/", "http://example-.com/"),
        *("http://.example.com/", "http://example..com/", "http://example.com../", "http://./"),
        *("http://*/", "http://exa$mple.com/"),
        *("http://aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.com/",),
        *("http://example.com:80:80/",),
    ),
    UNPRINTABLE: (
        *(" https://example.com/a.png", "https://example.com/a.png\n"),
        *("https://example.com/a\r\nHost: metadata\r\n\r\n",),
        *("https://example.com\r\n@127.0.0.1/", "https://exam\tple.com/a.png"),
        *("https://example.com/a b.png", "https://example.com\\@127.0.0.1/"),
        *("https:\\\\127.0.0.1\\a", "https://example.com\x00.evil.test/"),
        *("https://example.com\x85/", "https://example.com/\x7f"),
    ),
    USER: (
        *("https://user:password@example.com/a.png", "https://example.com@127.0.0.1/a.png"),
        *("https://127.0.0.1:80@example.com/", "https://@example.com/"),
        *("https://example.com:443:80@evil.test/", "http://example.com\u2044@127.0.0.1/"),
    ),
    NOT_AMONG: (
        *("http://127.0.0.1/", "http://127.1.2.3/", "http://0.0.0.0/", "http://10.0.0.1/"),
        *("http://192.168.1.1/", "http://169.254.169.254/latest/meta-data/"),
        *("http://100.100.100.200/latest/meta-data/", "http://[::1]/", "http://[::]/"),
        *("http://[fd00:ec2::254]/latest/meta-data/", "http://[fe80::1]/"),
        *("http://[::ffff:127.0.0.1]/", "http://[::ffff:a9fe:a9fe]/"),
        *("http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://8.8.8.8/"),
        *("http://127.0.0.1./", "http://example.com:22/", "http://example.com:6379/"),
    ),
    NUMBERS: (
        *("http://2130706433/", "http://0x7f000001/", "http://0x7f.0.0.1/", "http://0x7f.1/"),
        *("http://127.0.0.0x1/", "http://0177.0.0.1/", "http://017700000001/", "http://127.1/"),
        *("http://127.0.1/", "http://127.0.0.01/", "http://1.2.3.4.5/", "http://a.0x/"),
        *("http://256.256.256.256/", "http://999.0.0.1/"),
    ),
    "no IPv6 address": (*("http://[127.0.0.1]/",),),
    "beyond ASCII": (
        *("http://\uff11\uff12\uff17.\uff10.\uff10.\uff11/", "http://127\u30020\u30020\u30021/"),
        *("http://\u24dbocalhost/", "http://\u2113ocalhost/", "http://ex\u0430mple.com/"),
        *("http://example.com\u200b/", "http://example.com:\u0668\u0660/"),
    ),
    "characters: no name has": (
        *(
            "http://a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.com/",
        ),
    ),
    PORT: (
        *("http://example.com:0/", "http://example.com:/", "http://example.com:65536/"),
        *("http://example.com:99999999999/", "http://example.com:0080/"),
        *("http://example.com:-80/", "http://example.com:8O/"),
    ),
    f"may have {MAX_URL_CHARS} characters": ("https://example.com/" + "a" * MAX_URL_CHARS,),
}
"""URLs that are no URL, are parsed in two ways, or lead inside; by what is said of them."""


@pytest.mark.parametrize(
    ("words", "url"),
    [(words, url) for words, urls in HOSTILE.items() for url in urls],
    ids=lambda value: ascii(value)[:60],
)
def test_a_hostile_url_is_refused_where_every_name_is_allowed(words: str, url: str) -> None:
    with pytest.raises(MediaUrlError) as refused:
        ANY_NAME.check(read_url(url))
    assert words in str(refused.value)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://Example.COM", "https://example.com/"),
        ("HTTPS://example.com.:443/a.png", "https://example.com/a.png"),
        ("http://example.com:80?x=1", "http://example.com/?x=1"),
        ("http://example.com:8080/a", "http://example.com:8080/a"),
        ("https://example.com:80/a", "https://example.com:80/a"),
        ("https://example.com/a#b", "https://example.com/a"),
        ("https://example.com/a?b#c?d", "https://example.com/a?b"),
        ("https://example.com/bilder/ä.png?ü", "https://example.com/bilder/%C3%A4.png?%C3%BC"),
        ("https://example.com/%C3%A4%20x", "https://example.com/%C3%A4%20x"),
        (
            "https://example.com/a?sig=a%2Fb+c=&d='(1)'",
            "https://example.com/a?sig=a%2Fb+c=&d='(1)'",
        ),
        ("https://example.com/@user:x", "https://example.com/@user:x"),
        ("https://xn--bcher-kva.example/a", "https://xn--bcher-kva.example/a"),
        ("https://my_bucket.example.com/a", "https://my_bucket.example.com/a"),
        ("http://[2001:DB8:0::1]:8080/a", "http://[2001:db8::1]:8080/a"),
        ("http://192.0.2.1", "http://192.0.2.1/"),
    ],
)
def test_a_url_has_one_usual_form(url: str, expected: str) -> None:
    target = read_url(url)
    assert target.url == expected
    assert read_url(target.url) == target


@given(st.text(max_size=60))
def test_address_is_read_like_its_normal_form(text: str) -> None:
    for url in (text, f"https://{text}", f"http://example.com/{text}"):
        try:
            target = read_url(url)
        except MediaUrlError:
            continue
        assert read_url(target.url) == target
        assert target.url.isascii()
        assert target.url.isprintable()


def test_queries_are_not_shown() -> None:
    target = read_url("https://example.com/a.png?signature=secret")
    assert target.shown == "https://example.com/a.png?…"
    assert len(read_url("https://example.com/" + "a" * 500).shown) < 130


@pytest.mark.parametrize(
    ("entries", "allowed", "refused"),
    [
        (["media.example.com"], ["media.example.com", "MEDIA.example.com."], ["example.com"]),
        (["media.example.com"], [], ["a.media.example.com", "media.example.com.evil.test"]),
        (["*.example.com"], ["a.example.com", "a.b.example.com"], ["example.com"]),
        (
            ["*.example.com"],
            [],
            ["evilexample.com", "a.example.com:8080", "a.example.com.evil.test"],
        ),
        (["*"], ["anything", "a.b"], ["8.8.8.8", "[2606:4700::1]", "a.b:8080"]),
        (["*:8080"], ["a.b:8080"], ["a.b", "8.8.8.8:8080"]),
        (["*.example.com:81"], ["a.example.com:81"], ["a.example.com", "b.test:81"]),
        (["a.b:8080"], ["a.b:8080"], ["a.b", "a.b:8081"]),
        (["8.8.8.8"], ["8.8.8.8", "8.8.8.8."], ["8.8.8.88", "8.8.8.8:8080"]),
        (["[2606:4700:0::1]"], ["[2606:4700::1]"], ["[2606:4700::2]"]),
        ([], [], ["example.com"]),
    ],
)
def test_hosts_are_allowed_by_entries(
    entries: list[str], allowed: list[str], refused: list[str]
) -> None:
    domains = Domains(entries)
    for host in allowed:
        domains.check(read_url(f"http://{host}/"))
    for host in refused:
        with pytest.raises(MediaUrlError, match=r"front\.media\.urls\.allowed_domains"):
            domains.check(read_url(f"http://{host}/"))


@pytest.mark.parametrize(
    "entry", ["", "https://example.com", "example.com/a", "a@b", "*example.com", "a.*.b", "bü.de"]
)
def test_an_entry_that_names_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="write for example"):
        Domains([entry])


PUBLIC = ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1", "64:ff9b::808:808"]
NOT_PUBLIC = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.255"),
    *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1"),
    *("192.88.99.1", "192.168.0.1", "198.18.0.1", "198.19.255.255", "198.51.100.1"),
    *("203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("100.100.100.200", "168.63.129.16"),
    *("::", "::1", "::127.0.0.1", "::8.8.8.8", "fe80::1", "fe80::1%eth0", "2606:4700::1%1"),
    *("fc00::1", "fd00:ec2::254", "fd20:ce::254", "fec0::1", "ff02::1", "100::1"),
    # IPv4 in IPv6: mapped, translated, Teredo, 6to4, ISATAP.
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b::10.0.0.1", "64:ff9b:1::808:808"),
    *("2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2002:7f00:1::", "2002:808:808::1"),
    *("2606:4700::5efe:127.0.0.1", "2606:4700::200:5efe:10.0.0.1"),
    *("2001:db8::1", "3fff::1", "5f00::1", "4000::1"),
    *("localhost", "", "1.2.3", "0x7f.0.0.1", "127.1"),
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_public_is_not_connected_to(address: str) -> None:
    assert not AddressPolicy().allows(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_connected_to(address: str) -> None:
    assert AddressPolicy().allows(address)


def test_networks_can_be_named() -> None:
    policy = AddressPolicy(["10.1.0.0/16", "127.0.0.0/8", "::1/128", "fd12::/16"])
    assert all(map(policy.allows, ["10.1.2.3", "::ffff:10.1.2.3", "127.0.0.1", "::1", "fd12::1"]))
    assert not any(map(policy.allows, ["10.2.0.1", "192.168.0.1", "fd13::1", "2002:a01:203::1"]))


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "fe80::1", "fd00:ec2::254", "0.0.0.0", "::", "224.0.0.1"),
        *("168.63.129.16", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::"),
    ],
)
def test_no_network_opens_what_tells_a_machines_secrets(address: str) -> None:
    assert not AddressPolicy(["0.0.0.0/0", "::/0"]).allows(address)


HERE = read_url("https://example.com/pictures/a.png?x=1")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("b.png", "https://example.com/pictures/b.png"),
        ("/b.png", "https://example.com/b.png"),
        ("?y=2", "https://example.com/pictures/a.png?y=2"),
        ("//cdn.example.com/b.png", "https://cdn.example.com/b.png"),
        ("https://other.test:8443/b", "https://other.test:8443/b"),
    ],
)
def test_a_redirect_leads_to(location: str, expected: str) -> None:
    assert redirected(HERE, location).url == expected


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("http://example.com/a.png", "from https to http"),
        ("file:///etc/passwd", "refused: it is no http"),
        ("ftp://example.com/a", "refused: it is no http"),
        ("data:image/png;base64,AAAA", "refused: it is no http"),
        ("https://user@example.com/", "refused: a URL with a user"),
        ("//127.1/", "refused: its host is an address in another form"),
        ("https://[::1/", "no URL"),
        ("\\\\127.0.0.1\\a", "no URL"),
        ("b.png\r\nSet-Cookie: a=b", "no URL"),
        ("b" * 5000, "no URL"),
    ],
)
def test_a_redirect_is_not_followed(location: str, words: str) -> None:
    with pytest.raises(MediaUrlError, match=words):
        redirected(HERE, location)


def test_url_of_the_web_is_known_by_its_beginning() -> None:
    assert all(map(is_web, [b"http://x", b"HTTPS://x", b"https:x", b"http:"]))
    assert not any(map(is_web, [b"", b"httpx://", b" http://x", b"data:image/png", b"file:///x"]))
