"""When a window of digits is an identifier."""

from collections.abc import Callable
from typing import NamedTuple

from fledge.data.privacy.number_runs import Window
from fledge.data.privacy.words import Words

OTHER_THINGS = Words(
    "order|invoice|ticket|tracking|part$|part n|serial|model|sku|ref|version|isbn|issn|doi$|"
    "patent|case|batch|lot$|item|article|build|product|barcode|upc|ean$|commit|hash|checksum|"
    "sum$|bestell|rechnung|auftrag|artikel|serien|vorgang|az$|aktenzeichen|commande|facture|"
    "dossier|colis|réf|pedido|factura|fatura|expediente|ordine|fattura|pratica|zamówieni|faktur|"
    "订单|单号|编号|序列号|注文|伝票|型番|品番|追跡|주문|송장|ऑर्डर|заказ|артикул"
)
"""Words that say a number counts things, not people."""


class NumberRule(NamedTuple):
    """One way in which a window is an identifier."""

    type: str
    kind: str
    """The format, or the country and its number; for tests and figures."""

    check: Callable[[Window], bool]
    score: float
    shapes: tuple[str, ...] = ()
    """Shapes in which it is recognised anywhere."""

    lengths: tuple[int, ...] = ()
    """Numbers of digits accepted in any shape, near the words before a run or as a whole run."""

    words: Words | None = None
    """One of these must stand beside it."""

    other_words: Words | None = OTHER_THINGS
    """None of these may stand beside it, or nearer before it than one of `words`."""

    are_words_weak: bool = False
    """One of `other_words` anywhere beside it outweighs `words`."""


def same_separator(template: str, separators: str) -> tuple[str, ...]:
    """Shapes with each of the separators in place of every `_`."""
    return tuple(template.replace("_", separator) for separator in separators)
