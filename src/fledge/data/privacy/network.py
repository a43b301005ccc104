"""Addresses in networks: IP addresses that reach somebody, and MAC addresses.

Only addresses of the public internet count, not whole networks (`/24`). Private, loopback,
link-local and documentation ranges name nobody; neither do the well-known public resolvers. Four
numbers with dots are as often a version or a section, so small ones need words beside them.
"""

import ipaddress
import re
from collections.abc import Iterator

from fledge.data.privacy.finding import Finding
from fledge.data.privacy.words import Around, Words

_V4 = re.compile(
    r"[0-9](?<![A-Za-z0-9_].)(?<![0-9][.,].)(?<![A-Za-z0-9][-/=~^].)"
    r"[0-9]{0,2}(?:\.[0-9]{1,3}){3}"
    r"(?![A-Za-z0-9_]|\.[0-9A-Za-z]|-[A-Za-z]|/(?:[12]?[0-9]|3[01])(?![0-9]))"
)
_V6 = re.compile(r"[23](?<![0-9A-Za-z:.].)[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,35}(?![0-9A-Za-z:])")
_MAC = re.compile(
    r"(?<![0-9A-Za-z:\-])[0-9A-Fa-f]{2}(?:(:|-)[0-9A-Fa-f]{2})(?:\1[0-9A-Fa-f]{2}){4}"
    r"(?![0-9A-Za-z]|[:\-][0-9A-Fa-f]{2})"
)
_IP_WORDS = Words(
    "ip$|ips$|ipv4|ip-|address|host|server|ping|ssh|client|login|logged in|connect|request|"
    "visitor|adresse|dirección|endereço|indirizzo|地址|服务器|アドレス|사용자|адрес"
)
_VERSION_WORDS = Words(
    "version|v$|ver$|release|build|firmware|driver|section|chapter|clause|article|oid|upgrade|"
    "update|chrome|firefox|kapitel|abschnitt|versión|versão|versione|版本|バージョン|버전|версия|"
    "संस्करण"
)
_SMALL = 50
_LOOK_BACK = 24
_PUBLIC_RESOLVERS = frozenset(
    ("8.8.8.8", "8.8.4.4", "1.1.1.1", "1.0.0.1", "9.9.9.9", "208.67.222.222", "208.67.220.220")
)
_V6_RESOLVERS = tuple(
    map(ipaddress.ip_network, ("2001:4860:4860::/48", "2606:4700:4700::/48", "2620:fe::/48"))
)


def find_addresses(text: str) -> Iterator[Finding]:
    """Public IP addresses and MAC addresses."""
    if text.count(".") >= 3:
        for match in _V4.finditer(text):
            if _is_public_v4(match[0]) and _is_no_version(text, match):
                yield Finding("ip", *match.span(), 0.9)
    if ":" in text:
        for match in _V6.finditer(text):
            if _is_public_v6(match[0]):
                yield Finding("ip", *match.span(), 0.95)
    if text.count(":") >= 5 or text.count("-") >= 5:
        for match in _MAC.finditer(text):
            if len(set(match[0].lower()) - set(":-")) > 1:
                yield Finding("mac", *match.span(), 0.9)


def _is_public_v4(text: str) -> bool:
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return address.is_global and not address.is_multicast and text not in _PUBLIC_RESOLVERS


def _is_public_v6(text: str) -> bool:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return address.is_global and not any(address in network for network in _V6_RESOLVERS)


def _is_no_version(text: str, match: re.Match[str]) -> bool:
    around = Around(text, *match.span())
    if around.says(_IP_WORDS):
        return True
    is_small = all(int(part) < _SMALL for part in match[0].split("."))
    return not is_small and _VERSION_WORDS.last_start(around.before[-_LOOK_BACK:]) is None
