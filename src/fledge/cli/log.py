"""The only place where log handlers are set up: libraries log, the program decides who sees it."""

import logging
import os
import sys
import warnings

_SHOWN_NEWS = ("fledge.ops.native_library",)
"""Who does something that takes so long that a user must know, where no progress is at hand."""


class _StderrHandler(logging.Handler):
    """Writes to what stderr is now, not to what it was when the handler was made."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


class _Wording(logging.Formatter):
    """News in its own words; what may be wrong with its level and place."""

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno == logging.INFO and record.name in _SHOWN_NEWS:
            return record.getMessage()
        return super().format(record)


def set_up_logging(*, debug: bool) -> None:
    """Warnings of fledge on stderr; with `debug` everything, other libraries' advice included."""
    logger = logging.getLogger("fledge")
    for handler in [h for h in logger.handlers if isinstance(h, _StderrHandler)]:
        logger.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(_Wording("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    for name in _SHOWN_NEWS:
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.INFO)
    if not debug:
        # Advice for programmers, such as deprecations, tells a user of the program nothing.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
