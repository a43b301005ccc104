"""Grammars for one target: compiled once, and where each answer stands in its own.

The library is llguidance, an extra that is imported when the first grammar is asked for. Compiling
may happen in any thread and holds up nobody; what the library needs to know of the vocabulary is
made by `prepare`, which does hold up every thread, and belongs into loading.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fledge.contracts.errors import ConfigError, RequestError
from fledge.contracts.grammar import WHITE_SPACE, Grammar
from fledge.models.tokenizer import TargetTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_KEPT = 64
"""Compiled grammars that are kept for the next request that has the same."""

_MAX_MASK_S = 0.05
"""A grammar whose first mask takes longer would hold up everybody in its passes; it is refused."""

_STEP_FUEL = 60_000
"""What the library may spend on the regular expressions of one mask: some milliseconds."""


class GrammarState:
    """Where one answer stands in its grammar."""

    def __init__(self, start: "LLMatcher") -> None:
        """`start` is the grammar before its first token; it stays as it is."""
        self._start, self._token_ids = start, list[int]()
        self.matcher = start.deep_copy()

    def take(self, token_id: int) -> bool:
        """The answer goes on with this token; whether nothing may follow."""
        self._token_ids.append(token_id)
        self.matcher.consume_token(token_id)
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def recover(self) -> None:
        """Begin again and go to where the answer stands: looking further ahead went wrong."""
        self.matcher = self._start.deep_copy()
        self.matcher.consume_tokens(self._token_ids)

    @property
    def error(self) -> RequestError | None:
        """Why the grammar cannot be followed any more."""
        if not self.matcher.is_error():
            return None
        return RequestError(f"the grammar cannot be followed: {_first(self.matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for a target's vocabulary."""

    def __init__(
        self, tokenizer: TargetTokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(one for one in eos_token_ids if one < vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def can_compile(self) -> bool:
        """Whether there is a tokenizer and the library."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            return False
        return self._tokenizer is not None

    def prepare(self) -> None:
        """Tell the library the vocabulary: seconds for a large one, while no other thread runs."""
        with self._lock:
            self._known_vocabulary()

    def has_compiled(self, grammar: Grammar) -> bool:
        with self._lock:
            return grammar in self._kept

    def start(self, grammar: Grammar) -> GrammarState:
        """The beginning of an answer; compiles the grammar unless it is kept."""
        return GrammarState(self.compile(grammar))

    def compile(self, grammar: Grammar) -> "LLMatcher":
        """The grammar before its first token, kept for later."""
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                return kept
            vocabulary = self._known_vocabulary()
        matcher = _compile(grammar, vocabulary)
        with self._lock:
            self._kept[grammar] = matcher
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _known_vocabulary(self) -> "LLTokenizer":
        if self._vocabulary is None:
            if self._tokenizer is None:
                raise RequestError("a grammar needs a tokenizer; this target was built without.")
            try:
                from llguidance import LLTokenizer
            except ImportError as error:
                raise ConfigError(
                    "grammars need the package llguidance; pip install 'fledge[serve]' brings it."
                ) from error
            num_tokens = max(self._vocab_size, self._tokenizer.largest_token_id + 1)
            self._vocabulary = LLTokenizer(
                self._tokenizer.backend_json(),
                n_vocab=num_tokens,
                eos_token=self._eos_token_ids or None,
            )
        return self._vocabulary


def _compile(grammar: Grammar, vocabulary: "LLTokenizer") -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    try:
        if grammar.kind == "json_schema":
            text = LLMatcher.grammar_from_json_schema(
                grammar.text,
                overrides={
                    "whitespace_pattern": WHITE_SPACE,
                    "lenient": grammar.is_lenient,
                    "coerce_one_of": grammar.is_lenient,
                },
            )
        elif grammar.kind == "regex":
            text = LLMatcher.grammar_from_regex(grammar.text)
        else:
            text = LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        raise RequestError(f"the grammar cannot be read: {_first(str(error))}") from error
    limits = LLParserLimits(step_lexer_fuel=_STEP_FUEL, verbose_errors=False)
    matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
    # The first mask of all finds out much that is then known; the next one shows what masks cost.
    for _ in range(2):
        probe = matcher.deep_copy()
        began = time.thread_time()
        if not probe.is_error():
            probe.compute_bitmask()
        spent = time.thread_time() - began
        if probe.is_error():
            raise RequestError(f"the grammar cannot be used: {_first(probe.get_error())}")
    if spent > _MAX_MASK_S:
        raise RequestError(
            f"the grammar is too complex: what may follow takes {spent * 1e3:.0f} ms to find out, "
            f"and {_MAX_MASK_S * 1e3:g} ms are allowed; make it simpler."
        )
    return matcher


def _first(message: str) -> str:
    """A message of the library in one line."""
    return " ".join(message.split())[:300]
