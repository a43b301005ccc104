"""IBANs: a country of the registry, its structure, and the check digits."""

import re
from collections.abc import Iterator

from stdnum import iban

from fledge.data.privacy.finding import Finding

_MIN_LEN, _MAX_LEN = 15, 34
_CANDIDATE = re.compile(r"(?<![A-Za-z0-9])(?=([A-Za-z]{2}[0-9]{2}(?:[ \-]?[A-Za-z0-9]){11,30}))")
_SEPARATORS = str.maketrans("", "", " -")


def find_ibans(text: str) -> Iterator[Finding]:
    """Every IBAN, written in groups or not; words that follow it are not part of it."""
    for match in _CANDIDATE.finditer(text):
        for end in range(match.end(1), match.start() + _MIN_LEN - 1, -1):
            if text[end : end + 1].isascii() and text[end : end + 1].isalnum():
                continue
            compact = text[match.start() : end].translate(_SEPARATORS).upper()
            is_len = _MIN_LEN <= len(compact) <= _MAX_LEN
            if is_len and iban.is_valid(compact, check_country=False):
                yield Finding("iban", match.start(), end, 0.99)
                break
