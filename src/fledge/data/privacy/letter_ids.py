"""National ids with letters in them: check letters, tax codes, passports."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from stdnum.cl import rut
from stdnum.cn import ric
from stdnum.es import dni, nie
from stdnum.fi import hetu
from stdnum.fr import nir
from stdnum.ie import pps
from stdnum.in_ import pan
from stdnum.it import codicefiscale
from stdnum.mx import curp
from stdnum.pt import cc

from fledge.data.privacy.finding import Finding
from fledge.data.privacy.number_rule import OTHER_THINGS
from fledge.data.privacy.words import Around, Words

_SEPARATORS = str.maketrans("", "", " .")


def _valid(module: Any) -> Callable[[str], bool]:
    return lambda code: bool(module.is_valid(code.upper()))


def _is_singaporean(code: str) -> bool:
    """The check letter of a Singapore NRIC or FIN, by its published weights."""
    weights = (2, 7, 6, 5, 4, 3, 2)
    total = sum(w * int(d) for w, d in zip(weights, code[1:8], strict=True))
    total += {"S": 0, "F": 0, "T": 4, "G": 4, "M": 3}[code[0]]
    letters = {"S": "JZIHGFEDCBA", "T": "JZIHGFEDCBA", "F": "XWUTRQPNMLK", "G": "XWUTRQPNMLK"}
    return letters.get(code[0], "KLJNPQRTUWX")[total % 11] == code[8]


def _is_nino(code: str) -> bool:
    return code[:2] not in ("BG", "GB", "NK", "KN", "TN", "NT", "ZZ")


def _has_digits(code: str) -> bool:
    return sum(character.isdigit() for character in code) >= 3


class _Code(NamedTuple):
    """A code with letters: how it is written, its check, words it needs beside it."""

    kind: str
    pattern: str
    check: Callable[[str], bool]
    score: float
    words: Words | None = None


_PASSPORT = (
    r"[A-Z]{0,3}[0-9]{6,9}[A-Z]?|[CFGHJKL][0-9CFGHJKLMNPRTVWXYZ]{8}|[0-9]{2}[A-Z]{2}[0-9]{5}"
)
_PASSPORT_WORDS = Words(
    "passport|reisepass|passeport|pasaporte|passaport|paszport|паспорт|护照|パスポート|여권|पासपोर्ट"
)
_PENSION_WORDS = Words("rentenversicherung|sozialversicherung|rvnr|svnr|sv-nummer")
_TAX_WORDS = Words("pan$|pan card|income tax|permanent account|पैन")

CODES = (
    _Code("es_dni", r"[0-9]{8}-?[A-Z]|[0-9]{1,2}\.[0-9]{3}\.[0-9]{3}-?[A-Z]", _valid(dni), 0.85),
    _Code("es_nie", r"[XYZ]-?[0-9]{7}-?[A-Z]", _valid(nie), 0.85),
    _Code(
        "it_codice_fiscale",
        r"[A-Z]{6}[0-9]{2}[A-EHLMPRST][0-9]{2}[A-Z][0-9]{3}[A-Z]",
        _valid(codicefiscale),
        0.95,
    ),
    _Code(
        "gb_nino",
        r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?[0-9]{2} ?[0-9]{2} ?[0-9]{2} ?[A-D]",
        _is_nino,
        0.8,
    ),
    _Code("fi_hetu", r"[0-3][0-9][01][0-9]{3}[-+A-FU-Y][0-9]{3}[0-9A-Y]", _valid(hetu), 0.9),
    _Code("mx_curp", r"[A-Z]{4}[0-9]{6}[HMX][A-Z]{5}[0-9A-Z][0-9]", _valid(curp), 0.95),
    _Code(
        "fr_nir",
        r"[1278] ?[0-9]{2} ?[0-9]{2} ?2[AB] ?[0-9]{3} ?[0-9]{3} ?[0-9]{2}",
        _valid(nir),
        0.9,
    ),
    _Code("cn_ric", r"[1-9][0-9]{16}[Xx]", _valid(ric), 0.95),
    _Code("pt_cc", r"[0-9]{8} ?[0-9] ?[A-Z]{2}[0-9]", _valid(cc), 0.85),
    _Code("sg_nric", r"[STFGM][0-9]{7}[A-Z]", _is_singaporean, 0.8),
    _Code("cl_rut", r"[0-9]{1,2}\.[0-9]{3}\.[0-9]{3}-[Kk]", _valid(rut), 0.9),
    _Code("in_pan", r"[A-Z]{5}[0-9]{4}[A-Z]", _valid(pan), 0.9, _TAX_WORDS),
    _Code("ie_pps", r"[0-9]{7}[A-W][A-IW]?", _valid(pps), 0.9, Words("pps|personal public")),
    _Code(
        "de_rvnr",
        r"[0-9]{2} ?[0-3][0-9][01][0-9]{3} ?[A-Z] ?[0-9]{3}",
        _has_digits,
        0.9,
        _PENSION_WORDS,
    ),
    _Code("passport", _PASSPORT, _has_digits, 0.75, _PASSPORT_WORDS),
)
_COMPILED = tuple((code, re.compile(rf"(?:{code.pattern})(?![A-Za-z0-9])")) for code in CODES)
_ANY = re.compile(rf"(?:{'|'.join(code.pattern for code in CODES)})(?![A-Za-z0-9_])")
# Where a code may begin: cheap, as most texts have no such place.
_PLACE = re.compile(
    r"[A-Z0-9](?<![A-Za-z0-9].)(?<![A-Za-z0-9][-_/].)(?<![0-9][.,].)(?=[A-Z0-9 .+\-]{5})"
)


def find_letter_ids(text: str) -> Iterator[Finding]:
    """National ids with letters, and passports."""
    for place in _PLACE.finditer(text):
        if not _ANY.match(text, place.start()):
            continue
        for code, pattern in _COMPILED:
            match = pattern.match(text, place.start())
            if match and code.check(match[0].translate(_SEPARATORS)):
                around = Around(text, *match.span())
                if around.says(code.words) if code.words else not around.says(OTHER_THINGS):
                    yield Finding("national_id", *match.span(), code.score)
