"""IBANs: a country of the registry, its length and structure, and the check digits."""

import re
from collections.abc import Iterator
from functools import cache

from stdnum import iban

from fledge.data.privacy.finding import Finding

# Lengths by country, from the registry of ISO 13616.
_LENGTHS = """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18
    DO28 EE20 EG29 ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23
    IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31
    MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24
    SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30
"""
_LENGTH_BY_COUNTRY = {entry[:2]: int(entry[2:]) for entry in _LENGTHS.split()}
_CHECK_DIGITS = re.compile(
    r"[0-9](?<=[A-Za-z]{2}.)(?<![A-Za-z0-9][A-Za-z]{2}.)[0-9](?=[ .\-]?[A-Za-z0-9]{2})"
)
_SEPARATORS = str.maketrans("", "", " .-")


def find_ibans(text: str) -> Iterator[Finding]:
    """Every IBAN, written in groups or not; words that follow it are not part of it."""
    for digits in _CHECK_DIGITS.finditer(text):
        start = digits.start() - 2
        length = _LENGTH_BY_COUNTRY.get(text[start : start + 2].upper())
        match = _characters(length).match(text, start) if length else None
        if match and iban.is_valid(match[0].translate(_SEPARATORS).upper(), check_country=False):
            yield Finding("iban", *match.span(), 0.99)


@cache
def _characters(length: int) -> re.Pattern[str]:
    """So many letters and digits with separators between them, and no more."""
    return re.compile(rf"[A-Za-z](?:[ .\-]?[A-Za-z0-9]){{{length - 1}}}(?![A-Za-z0-9])")
