"""Phone numbers: international ones by calling code, national ones by shape or words beside them.

A number with `+` or `00` needs a known calling code and the lengths used behind it. A national
number needs either a shape that other numbers do not have ("(555) 010-0199", "06 12 34 56 78") or
a word such as "phone" beside it.
"""

import re
from collections.abc import Callable

from fledge.data.privacy.number_rule import NumberRule, same_separator
from fledge.data.privacy.number_runs import Window
from fledge.data.privacy.words import Words

_STRONG_WORDS = (
    "phone|tel$|tel.|tel:|telephone|mobile$|cell$|cell:|cellphone|fax|whatsapp|sms$|hotline|"
    "landline|voicemail|toll-free|toll free|dial$|telefon|telefoon|handynummer|handy:|handy$|"
    "mobil$|mobilnummer|mobiltel|rufnummer|festnetz|"
    "durchwahl|téléphone|tél$|tél.|mon portable|portable:|telefono|teléfono|móvil|movil|"
    "celular|telefone|telemóvel|cellulare|cell.|gsm$|komórk|тел$|тел.|телефон|мобильн|电话|手机|"
    "热线|座机|传真|微信|致电|拨打|來電|电联|電話|携帯|手機|전화|휴대폰|연락처|फोन|फ़ोन|मोबाइल|"
    "هاتف|جوال"
)
_WEAK_WORDS = (
    "call$|call me|call us|text me|text us|ring me|reach|contact|ruf mich|anruf|ruf|"
    "erreich|nummer$|appel|joindre|numéro|numero|número|llám|llam|ligue|ligar|liga$|chiam|zadzwo|"
    "numer$|звон|联系|联络|号码|連絡|番号|번호|नंबर|संपर्क|رقم|номер"
)
_CALLS = "|".join(
    f"{verb}{whom}{how}{colon}\n"
    for verb in ("call", "text", "ring", "reach")
    for whom in ("", " me", " us")
    for how in ("", " at", " on")
    for colon in (" ", ": ", ":")
)
"""Right before a number; the line's end stands for the number itself."""

_NAMED = Words(f"{_STRONG_WORDS}|{_CALLS}")
_STRONG = Words(_STRONG_WORDS)
_HINTS = Words(f"{_WEAK_WORDS}|number is|number was|number:|number \n")

# National digits behind each calling code: fewest and most.
_NATIONAL_LENGTHS = {
    "1": (10, 10),
    "7": (10, 10),
    **dict.fromkeys(("20", "27", "30", "31", "32", "33", "34", "36"), (8, 10)),
    **dict.fromkeys(("39", "40", "41", "44", "45", "46", "47", "48"), (6, 11)),
    **dict.fromkeys(("43", "49"), (6, 12)),
    **dict.fromkeys(("51", "52", "53", "54", "55", "56", "57", "58"), (8, 11)),
    **dict.fromkeys(("60", "61", "62", "63", "64", "65", "66"), (8, 11)),
    **dict.fromkeys(("81", "82", "84", "86"), (8, 11)),
    **dict.fromkeys(("90", "91", "92", "93", "94", "95", "98"), (8, 10)),
}
# Codes of three digits: the ranges that are given out.
_THREE_DIGITS = re.compile(
    r"2[1-69][0-9]|3[578][0-9]|42[0-3]|50[0-9]|59[0-9]|6[7-9][0-9]|8[058][0-9]|96[0-8]|97[0-79]|99[2-8]"
)
_GROUPED = re.compile(r"\(?[0-9]{1,5}(?:[ .\-/()]{1,3}[0-9]{2,10}){1,5}|[0-9](?:[ .\-][0-9]){6,14}")


def is_international(digits: str) -> bool:
    """Digits behind `+` or `00` begin with a calling code and have a length used behind it."""
    for length in (1, 2):
        if digits[:length] in _NATIONAL_LENGTHS:
            low, high = _NATIONAL_LENGTHS[digits[:length]]
            national = digits[length:]
            # "+44 (0)20 ...": the zero in brackets is dialled only at home.
            return low <= len(national) <= high + national.startswith("0")
    return bool(_THREE_DIGITS.match(digits)) and 6 <= len(digits) - 3 <= 11


def _has_digits(pattern: str) -> Callable[[Window], bool]:
    compiled = re.compile(pattern)
    return lambda window: compiled.fullmatch(window.digits) is not None


def _is_french(window: Window) -> bool:
    """Small pairs that ascend are more likely a list of numbers."""
    pairs = [window.digits[i : i + 2] for i in range(0, 10, 2)]
    is_list = pairs == sorted(set(pairs)) and pairs[-1] < "50"
    return window.digits[0] == "0" and window.digits[1] != "0" and not is_list


def _is_dialled_abroad(window: Window) -> bool:
    """In groups, the first of which has both zeros: no decimal number, no bare one."""
    is_grouped = not window.shape.isdigit() and not window.shape.startswith("1.")
    return is_grouped and window.digits[:2] == "00" and is_international(window.digits[2:])


def _is_grouped(window: Window) -> bool:
    """Groups as people write them: no decimal, no difference or quotient."""
    separators = re.findall("[^0-9]+", window.shape)
    if len(separators) == 1 and len(window.digits) < 9 and separators[0] not in ("-", " "):
        return False
    if separators == ["."] or (" - " in separators and len(set(separators)) > 1):
        return False
    return _GROUPED.fullmatch(_spelled(window)) is not None and len(set(window.digits)) > 1


def _is_surely_grouped(window: Window) -> bool:
    """Also no two small numbers with a dash between them, unless as in "555-0199"."""
    num_groups = len(re.findall("[0-9]+", window.shape))
    is_pair = num_groups == 2 and len(window.digits) < 9 and window.shape != "3-4"
    return not is_pair and _is_grouped(window)


def _spelled(window: Window) -> str:
    """The digits as they are grouped in the text."""
    digits = iter(window.digits)
    return re.sub("[0-9]+", lambda n: "".join(next(digits) for _ in range(int(n[0]))), window.shape)


def _is_bare(window: Window) -> bool:
    return window.shape.isdigit() and len(set(window.digits)) > 2


_SLASHES = tuple(f"{a}{s}{b}" for a in (3, 4, 5) for b in range(4, 9) for s in ("/", " / "))
_LAST_GROUPS = ("4", "5", "6", "7", "8", "3 4", "4 4", "3-4", "4-4", "5-4")
_BRACKETS = tuple(
    f"({a}){s}{b}" for a in (2, 3, 4, 5) for b in _LAST_GROUPS for s in (" ", "", "-")
)

# Formats of North America, Japan, Korea and China, Brazil, Germany, Britain, Australia, Spain,
# Russia, Switzerland, Belgium, Turkey and Sweden, the Netherlands: shapes, digits, a score.
_NATIONAL: tuple[tuple[str, tuple[str, ...], str, float], ...] = (
    (
        "american",
        (
            *("(3) 3-4", "(3)3-4", "(3) 3 4", "(3) 3.4", "(3)-3-4", "3/3-4"),
            *same_separator("3_3_4", "-."),
            *same_separator("1_3_3_4", "-. "),
            *("1 (3) 3-4", "1-(3)-3-4", "1(3)3-4", "1 3-3-4"),
        ),
        r"1?[2-9][0-9]{9}|1?123[0-9]{7}",
        0.8,
    ),
    (
        "east asian",
        (
            *("2-4-4", "3-4-4", "3-3-4", "4-2-4", "4-3-3", "2-3-4", "3 4 4", "4-3-4"),
            *("3-8", "4-8", "4-7"),
        ),
        r"0[1-9][0-9]{7,10}|1[3-9][0-9]{9}",
        0.75,
    ),
    (
        "brazilian",
        ("2 5-4", "(2) 5-4", "(2)5-4", "(2) 4-4", "(2)4-4", "(2) 5 4"),
        r"[1-9][1-9](?:9[0-9]{8}|[2-5][0-9]{7})",
        0.8,
    ),
    ("in brackets", _BRACKETS, r"0[1-9][0-9]{5,10}", 0.75),
    ("german", (*_SLASHES, "4-6", "4-7", "4-8"), r"0[2-9][0-9]{5,10}|01[5-7][0-9]{7,9}", 0.65),
    ("british", ("5 6", "5 3 3", "3 4 4", "4 3 4"), r"0[1278][0-9]{9}", 0.7),
    ("australian", ("4 3 3",), r"04[0-9]{8}", 0.7),
    ("spanish", ("3 2 2 2", "2 3 2 2"), r"[6-9][0-9]{8}|0[1-9][0-9]{7}", 0.7),
    (
        "russian",
        (
            *("1 (3) 3-2-2", "1(3)3-2-2", "1-3-3-2-2", "1 3 3-2-2", "1 (3) 3 2 2", "1 3 3 2 2"),
            *("(3) 3-2-2", "1 (3) 3-4", "1(3)3-4"),
        ),
        r"[78]?[3-9][0-9]{9}",
        0.8,
    ),
    (
        "swiss",
        ("3 3 2 2", "3-3 2 2", "4 2 2 2", "4 3 2 2", "4/2.2.2", "3/3.2.2"),
        r"0[1-9][0-9]{7,9}",
        0.75,
    ),
    ("dutch", ("2-8", "3-7"), r"06[1-9][0-9]{7}|0[1-9][0-9]{8}", 0.65),
)
PHONE_RULES = (
    *(
        NumberRule(type="phone", kind=kind, check=_has_digits(digits), score=score, shapes=shapes)
        for kind, shapes, digits, score in _NATIONAL
    ),
    NumberRule(
        type="phone",
        kind="french",
        check=_is_french,
        score=0.8,
        shapes=same_separator("2_2_2_2_2", " .-"),
    ),
    NumberRule(
        type="phone",
        kind="dialled abroad",
        check=_is_dialled_abroad,
        score=0.8,
        lengths=tuple(range(10, 18)),
    ),
    NumberRule(
        type="phone",
        kind="grouped, named",
        check=_is_grouped,
        score=0.87,
        lengths=tuple(range(7, 14)),
        words=_STRONG,
    ),
    NumberRule(
        type="phone",
        kind="grouped, hinted",
        check=_is_surely_grouped,
        score=0.65,
        lengths=tuple(range(7, 14)),
        words=_HINTS,
        are_words_weak=True,
    ),
    NumberRule(
        type="phone",
        kind="bare, named",
        check=_is_bare,
        score=0.87,
        lengths=tuple(range(7, 16)),
        words=_NAMED,
    ),
)
