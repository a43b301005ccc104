"""Payment cards: the issuer's first digits, its lengths, and Luhn's check.

Of random numbers of 16 digits about one in forty passes, so a number without spaces or dashes must
not be part of anything longer, and rare lengths need a word such as "card" beside them.
"""

from stdnum import luhn

from fledge.data.privacy.number_rule import NumberRule, same_separator
from fledge.data.privacy.number_runs import Window
from fledge.data.privacy.words import Words

CARD_WORDS = Words(
    "card|visa|mastercard|master card|amex|american express|discover|diners|jcb|maestro|unionpay|"
    "cc$|cvv|cvc|expir|exp$|pan$|debit|credit|karte|kreditkarte|girocard|carte|tarjeta|cartão|"
    "cartao|carta|kart|карт|卡号|信用卡|银行卡|カード|카드|कार्ड|بطاقة"
)

_PREFIXES_BY_LENGTH: dict[int, tuple[tuple[int, int], ...]] = {
    14: ((300, 305), (309, 309), (36, 36), (38, 39)),
    15: ((34, 34), (37, 37)),
    16: (
        *((4, 4), (51, 55), (2221, 2720), (2200, 2204), (6011, 6011), (644, 649), (65, 65)),
        *((3528, 3589), (62, 62), (81, 82), (508, 508), (9792, 9792)),
    ),
    17: ((62, 62),),
    18: ((62, 62),),
    19: ((62, 62),),
}
_RARE_PREFIXES_BY_LENGTH: dict[int, tuple[tuple[int, int], ...]] = {
    12: ((50, 50), (56, 58), (6, 6)),
    13: ((4, 4), (50, 50), (56, 58), (6, 6)),
    14: ((50, 50), (56, 58), (6, 6)),
    15: ((50, 50), (56, 58), (6, 6), (1800, 1800), (2131, 2131)),
    16: ((50, 50), (56, 58), (60, 60), (63, 63), (67, 69), (30, 30), (36, 36)),
    17: ((50, 50), (56, 58), (6, 6)),
    18: ((50, 50), (56, 58), (6, 6)),
    19: ((4, 4), (50, 50), (56, 58), (6, 6)),
}


def _begins(digits: str, prefixes: tuple[tuple[int, int], ...]) -> bool:
    return any(low <= int(digits[: len(str(low))]) <= high for low, high in prefixes)


def _is_card(window: Window) -> bool:
    prefixes = _PREFIXES_BY_LENGTH.get(len(window.digits), ())
    return _begins(window.digits, prefixes) and luhn.is_valid(window.digits)


def _is_grouped_card(window: Window) -> bool:
    """Groups of four that ascend are more likely years or readings."""
    groups = [window.digits[i : i + 4] for i in range(0, len(window.digits), 4)]
    return groups != sorted(set(groups)) and _is_card(window)


def _is_split_card(window: Window) -> bool:
    """Any other grouping, when it is all there is, has one separator, and is no decimal."""
    separators = [character for character in window.shape if not character.isdigit()]
    is_even = len(set(separators)) == 1 and separators != ["."]
    return window.is_whole and is_even and _is_card(window)


def _is_rare_card(window: Window) -> bool:
    if not (window.is_whole or window.shape.isdigit()):
        return False
    prefixes = _RARE_PREFIXES_BY_LENGTH[len(window.digits)]
    return (_begins(window.digits, prefixes) and luhn.is_valid(window.digits)) or _is_card(window)


CARD_RULES = (
    NumberRule(
        type="card",
        kind="grouped",
        check=_is_grouped_card,
        score=0.95,
        shapes=(
            *same_separator("4_4_4_4", " -."),
            *same_separator("4_4_4_4_3", " -"),
            *same_separator("4_6_5", " -."),
            *same_separator("4_6_4", " -."),
        ),
        other_words=None,
    ),
    NumberRule(
        type="card",
        kind="bare",
        check=_is_card,
        score=0.9,
        shapes=("14", "15", "16", "17", "18", "19"),
    ),
    NumberRule(
        type="card",
        kind="split",
        check=_is_split_card,
        score=0.85,
        lengths=tuple(_PREFIXES_BY_LENGTH),
    ),
    NumberRule(
        type="card",
        kind="named",
        check=_is_rare_card,
        score=0.95,
        lengths=tuple(_RARE_PREFIXES_BY_LENGTH),
        words=CARD_WORDS,
    ),
)
