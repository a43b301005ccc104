"""Crypto wallets: Bitcoin addresses by their checksums, Ethereum ones by words beside them.

Lower-case Ethereum addresses have no checksum, and 160-bit constants look the same.
"""

import re
from collections.abc import Iterator

from stdnum import bitcoin

from fledge.data.privacy.finding import Finding
from fledge.data.privacy.words import Around, Words

_BASE58 = "1-9A-HJ-NP-Za-km-z"
_BECH32_LETTERS = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_BITCOIN = re.compile(
    rf"[13b](?<![A-Za-z0-9].)(?:(?<=[13])[{_BASE58}]{{25,34}}|(?<=b)c1[{_BECH32_LETTERS}]{{11,71}})"
    r"(?![A-Za-z0-9])"
)
_ETHEREUM = re.compile(r"(?<![A-Za-z0-9])0x[0-9a-fA-F]{40}(?![A-Za-z0-9])")
_ETHEREUM_WORDS = Words(
    "wallet|eth$|ether|metamask|usdt|usdc|deposit|send|donat|pay|brieftasche|portefeuille|"
    "billetera|cartera|carteira|钱包|地址|ウォレット"
)
# What the checksum of a taproot address (version 1 and later) comes to, and "bc" in its alphabet.
_BECH32M = 0x2BC830A3
_PREFIX = [3, 3, 0, 2, 3]


def find_wallets(text: str) -> Iterator[Finding]:
    """Every address whose checksum is right, or that words call a wallet."""
    for match in _BITCOIN.finditer(text):
        if bitcoin.is_valid(match[0]) or _is_taproot(match[0]):
            yield Finding("wallet", *match.span(), 0.99)
    if "0x" in text:
        for match in _ETHEREUM.finditer(text):
            is_used = len(set(match[0][2:].lower())) > 2
            if is_used and Around(text, *match.span()).says(_ETHEREUM_WORDS):
                yield Finding("wallet", *match.span(), 0.8)


def _is_taproot(address: str) -> bool:
    if not address.startswith("bc1p"):
        return False
    values = [_BECH32_LETTERS.index(letter) for letter in address[3:]]
    return bool(bitcoin.bech32_checksum(_PREFIX + values) == _BECH32M)
