"""What is found in a text and where, under every disguise we know, and how fast at worst."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.data.privacy import Finding, find, redact
from fledge.data.privacy.finding import resolve
from fledge.data.privacy.readable import make_readable

CARD = "4111 1111 1111 1111"
IBAN = "DE89 3704 0044 0532 0130 00"


def found(text: str) -> list[tuple[str, str]]:
    return [(finding.type, text[finding.start : finding.end]) for finding in find(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4111111111111111", "4111111111111111"),
        ("4111-1111-1111-1111", "4111-1111-1111-1111"),
        ("4111.1111.1111.1111", "4111.1111.1111.1111"),
        ("4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1", "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1"),
        ("41111111-11111111", "41111111-11111111"),
        ("x 4111\u00a01111\u00a01111\u00a01111 y", "4111\u00a01111\u00a01111\u00a01111"),
        ("x 4111‑1111‑1111‑1111 y", "4111‑1111‑1111‑1111"),
        ("卡号是4111111111111111吗", "4111111111111111"),
        ("**4111 1111 1111 1111**", CARD),
        ("`4111 1111 1111 1111`", CARD),
        ('{"n": "4111 1111 1111 1111"}', CARD),
        ("4111 1111 1111 1111 12/27 123", CARD),
        ("12 4111 1111 1111 1111", CARD),
        ("４１１１１１１１１１１１１１１１", "４１１１１１１１１１１１１１１１"),
        ("٤١١١١١١١١١١١١١١١", "٤١١١١١١١١١١١١١١١"),
        ("4111\u200b1111\u200b1111\u200b1111", "4111\u200b1111\u200b1111\u200b1111"),
        ("😀😀 4111 1111 1111 1111 😀", CARD),
        ("a\\n4111 1111 1111 1111\\nb", CARD),
        ("maestro card 6759649826438453", "6759649826438453"),
    ],
)
def test_a_card_is_found_however_it_is_written(text: str, expected: str) -> None:
    assert found(text) == [("card", expected)]


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",  # Luhn
        "1111 1111 1111 1117",  # no issuer
        "0.4111111111111111",
        "a4111111111111111",
        "4111111111111111b",
        "id-4111111111111111",
        "Serial 4111111111111111",
        "4111111111111111€",
        "4000 4020 4040 4066",
        "2.718281828459045",
        "978-0-306-40615-7",
        "12345678901234567890123",
    ],
)
def test_other_long_numbers_are_no_cards(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("an a.b+c@mail.example.org.", "a.b+c@mail.example.org"),
        ("邮箱a@example.cn谢谢", "a@example.cn"),
        ("[x](mailto:a@example.org)", "a@example.org"),
        ("<a@example.org>", "a@example.org"),
        ("ｊｏ＠ｅｘａｍｐｌｅ．ｃｏｍ", "ｊｏ＠ｅｘａｍｐｌｅ．ｃｏｍ"),
        ("jo\u200b@example\u200b.com", "jo\u200b@example\u200b.com"),
        ("müller@firma.example", "müller@firma.example"),
        ("foo\\_bar@example.org", "foo\\_bar@example.org"),
        ("hi\\nfoo@example.org", "foo@example.org"),
        ("jo [at] example [dot] org", "jo [at] example [dot] org"),
        ("jo%40example.org", "jo%40example.org"),
        ("𝒳𝒳 jo@example.org 𝒳", "jo@example.org"),
    ],
)
def test_an_address_is_found_however_it_is_written(text: str, expected: str) -> None:
    assert found(text) == [("email", expected)]


@pytest.mark.parametrize(
    "text",
    [
        "git@github.com:a/b.git",
        "logo@2x.png",
        "react@18.2.0",
        "A@B.sum()",
        "x = X@W.T",
        "@app.route",
        "a@b",
        "@@@",
        f"{'.' * 70}@example",
        "f'{user}@{host}.com'",
        "(at) 10 (dot) 5",
    ],
)
def test_other_uses_of_the_at_sign_are_no_addresses(text: str) -> None:
    assert found(text) == []


def test_the_same_characters_are_found_once() -> None:
    text = f"phone/card {CARD}, tel 219-44-7710, https://bob:hunter22@example.org/x@example.org"
    spans = [(finding.start, finding.end) for finding in find(text)]
    assert spans == sorted(spans)
    assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))
    assert found("mysql://bob:hunter22@db.example.org/x") == [("secret", "bob:hunter22")]


def test_the_better_finding_wins_then_the_longer_one() -> None:
    card = Finding("card", 0, 16, 0.9)
    phone = Finding("phone", 0, 8, 0.8)
    ip = Finding("ip", 10, 20, 0.8)
    longer = Finding("mac", 10, 22, 0.8)
    for order in ([card, phone, ip, longer], [longer, ip, phone, card]):
        assert resolve(order) == [card]
    assert resolve([ip, longer]) == resolve([longer, ip]) == [longer]
    assert resolve([Finding("b", 0, 2, 0.5), Finding("a", 0, 2, 0.5)])[0].type == "a"


def test_the_view_of_a_text_knows_where_its_characters_are() -> None:
    text = "a\u200b\u200b\uff11\u00ad2"
    view = make_readable(text)
    assert view.text == "a12"
    assert [view.span(i, i + 1) for i in range(3)] == [(0, 1), (3, 4), (5, 6)]
    assert make_readable("plain").offsets is None
    assert make_readable("ünï").text == "ünï"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (IBAN, IBAN),
        ("IBAN:DE89370400440532013000.", "DE89370400440532013000"),
        ("de89 3704 0044 0532 0130 00", "de89 3704 0044 0532 0130 00"),
        ("DE89-3704-0044-0532-0130-00 and more", "DE89-3704-0044-0532-0130-00"),
        ("转账DE89370400440532013000谢谢", "DE89370400440532013000"),
        (f"{IBAN} GB82", IBAN),
    ],
)
def test_an_iban_is_found_however_it_is_written(text: str, expected: str) -> None:
    assert found(text) == [("iban", expected)]


@pytest.mark.parametrize("text", ["DE88 3704 0044 0532 0130 00", "ZZ89370400440532013000", "DE89"])
def test_wrong_check_digits_or_country_is_no_iban(text: str) -> None:
    assert [kind for kind, _ in found(text) if kind == "iban"] == []


def test_private_and_documentation_addresses_are_not_found() -> None:
    for text in (
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "192.168.0.17", "172.16.0.9", "169.254.1.1"),
        *("192.0.2.44", "198.51.100.3", "203.0.113.9", "224.0.0.251", "255.255.255.0", "8.8.8.8"),
        *("::1", "fe80::1", "2001:db8::7", "2001:4860:4860::8888", "300.1.2.3", "1.2.3.4"),
    ):
        assert found(f"server ip {text} up") == [] or text == "1.2.3.4"
    assert found("IP 45.33.32.156, build 45.33.32.156") == [
        ("ip", "45.33.32.156"),
        ("ip", "45.33.32.156"),
    ]
    assert found("ip 45.33.32.0/24") == []
    assert found("v45.33.32.156 and Chrome/45.33.32.156") == []


def test_placeholders_of_tutorials_are_no_secrets() -> None:
    for text in (
        *("sk-" + "x" * 40, "ghp_" + "X" * 36, "AKIAIOSFODNN7EXAMPLE"),
        *("ftp://user:password@example.org", "amqp://guest:guest@localhost", "a://b:$PW@c.org"),
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
    ):
        assert [kind for kind, _ in found(text) if kind == "secret"] == [], text


def test_a_private_key_is_found_as_a_whole_even_when_it_is_cut_off() -> None:
    body = "MIIEowIBAAKCAQEAn7Zk" * 6
    key = f"-----BEGIN EC PRIVATE KEY-----\n{body}\n-----END EC PRIVATE KEY-----"
    assert found(f"Look: {key} ok") == [("secret", key)]
    cut = f"-----BEGIN EC PRIVATE KEY-----\n{body}\n{body}"
    assert found(f"{cut}\n\nWhy is it wrong?") == [("secret", cut)]
    assert found(f"{cut} {key}") == [("secret", cut), ("secret", key)]
    assert found("A PRIVATE KEY is private; -----END PRIVATE KEY----- ends one.") == []


def test_wallets_are_checked() -> None:
    right = "bc1p5cyxnuxmeuwuvkwfem96lqzszd02n6xdcjrs20cac6yqjjwudpxqkedrcr"
    assert found(right) == [("wallet", right)]
    for wrong in (right[:-1] + "q", "19J69TwkT8aoSyaajYPptpdauHFUAiZSp7", "0x" + "ab" * 20):
        assert found(wrong) == []
    assert found("send ETH to 0x" + "ab12" * 10) == [("wallet", "0x" + "ab12" * 10)]


PIECES = st.sampled_from(
    [
        *("4111 1111 1111 1111", "4111", "1111", "jo@example.org", "@", "+49 30 901820", "+", "("),
        *(")", " ", "\n", "\\n", "-", ".", "/", "phone", "SSN", "536-22-8613", "DE89", "3704 0044"),
        *(
            "0532 0130 00",
            "😀",
            "\u200b",
            "７",
            "我",
            "BEGIN PRIVATE KEY",
            "-----",
            "eyJ",
            "://a:b@",
        ),
        *("93.184.216.34", "2001:", "::1", "ab:", "0x", "[EMAIL_1]", "[at]", "x", "Z", "12345678Z"),
    ]
)


@given(st.lists(PIECES | st.characters(), max_size=40).map("".join))
@settings(deadline=None, max_examples=150)
def test_any_text_gives_ordered_findings_that_redact_for_good(text: str) -> None:
    findings = find(text)
    ends = [0, *(end for finding in findings for end in (finding.start, finding.end)), len(text)]
    assert ends == sorted(ends)
    assert all(finding.start < finding.end for finding in findings)
    assert find(text) == findings
    between = [text[start:end] for start, end in zip(ends[::2], ends[1::2], strict=True)]
    expected = r"\[[A-Z_]+_\d+\]".join(map(re.escape, between))
    assert re.fullmatch(expected, redact(text, findings), re.DOTALL)


def test_redacting_keeps_the_rest_of_the_text() -> None:
    text = f"A: {CARD}; B: 4111111111111111; C: 5555555555554444; jo@example.org"
    assert redact(text, find(text)) == "A: [CARD_1]; B: [CARD_1]; C: [CARD_2]; [EMAIL_1]"
    assert redact("nothing", []) == "nothing"


HOSTILE = {
    "digits": "7",
    "card digits": "4111111111111111",
    "at signs": "@",
    "dots": "a.a.a.",
    "spaces": " ",
    "addresses": "a.a@a.",
    "tokens": "eyJaaaaaaaaa.",
    "dashes": "sk-",
    "urls": "a://b:c",
    "keys": "-----BEGIN PRIVATE KEY-----",
    "escapes": "\\n",
    "zero width": "7\u200b",
    "colons": "2001:",
    "brackets": "a[at]",
    "letters": "A",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_million_hostile_characters_take_linear_time(name: str) -> None:
    text = (HOSTILE[name] * 1_000_000)[:1_000_000]
    start = time.process_time()
    find(text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "unit", ["1 ", "12 ", "4111 1111 1111 1112 ", "1.1.1.1 ", "phone 1234567 "]
)
def test_hostile_numbers_take_linear_time(unit: str) -> None:
    """Numbers in groups are the costliest text: fifty thousand characters of nothing else."""
    start = time.process_time()
    find((unit * 50_000)[:50_000])
    assert time.process_time() - start < 5
