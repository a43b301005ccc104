"""What a chat template is made of: read from Jinja's own tokens, never by patterns over its text.

Templates of some families write today's date into every prompt. A corpus must not depend on the
day it is made, so `stop_clock` gives such a template a fixed day.
"""

from datetime import date
from functools import lru_cache
from itertools import pairwise

from jinja2 import Environment, TemplateSyntaxError

_CLOCK = "strftime_now"
_DAYS = "fledge_days"
# It ends in an expression, since a block would take the template's first line break with it.
_STOPPED_CLOCK = (
    f"{{%- macro {_CLOCK}(format) -%}}{{{{ {_DAYS}[format] }}}}{{%- endmacro -%}}{{{{ '' }}}}"
)


@lru_cache
def marks_generation(template: str) -> bool:
    """Whether the template says itself, by `{% generation %}`, what the assistant wrote."""
    return any(
        kind == "block_begin" and following == ("name", "generation")
        for (kind, _), following in pairwise(_tokens(template))
    )


def asks_the_date(template: str) -> bool:
    """Whether the template writes the day it is used on."""
    return ("name", _CLOCK) in _tokens(template)


@lru_cache
def stop_clock(template: str, day: date) -> tuple[str, dict[str, dict[str, str]]]:
    """The template as it writes on one day for ever, and the variables it then needs."""
    formats = {text[1:-1] for kind, text in _tokens(template) if kind == "string" and "%" in text}
    return _STOPPED_CLOCK + template, {_DAYS: {text: day.strftime(text) for text in formats}}


def _tokens(template: str) -> list[tuple[str, str]]:
    """Kind and text of each token, spaces inside blocks left out."""
    try:
        lexed = list(Environment().lex(template))
    except TemplateSyntaxError:
        return []  # rendering says what is wrong with it
    return [(kind, text) for _, kind, text in lexed if kind != "whitespace"]
