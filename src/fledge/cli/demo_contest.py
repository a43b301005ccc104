"""The same prompts answered without and with a head, in turns: one loaded target, two engines.

Each prompt is answered four times, without, with, with, without the head, so that a machine that
grows slower or faster on the way favours neither. What comes before counts for neither as well:
both engines answer something short first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fledge.cli.loading import Loaded
from fledge.contracts.outputs import Completion
from fledge.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    pass

Arm = Literal["without", "with"]
TURNS: tuple[Arm, ...] = ("without", "with", "with", "without")
_WARM_UP = "Say hello."
_WARM_UP_TOKENS = 12

OnPiece = Callable[[int, str], None]
"""Called with the number of a turn and the new text of its answer."""


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt and its answers, in the order of TURNS."""

    prompt: str
    answers: tuple[Completion, ...]

    def of(self, arm: Arm) -> list[Completion]:
        return [one for turn, one in zip(TURNS, self.answers, strict=True) if turn == arm]

    @property
    def parting(self) -> int | None:
        """The first token at which two of the answers differ; None where all are the same."""
        first = self.answers[0].token_ids
        for other in self.answers[1:]:
            if other.token_ids != first:
                pairs = enumerate(zip(first, other.token_ids, strict=False))
                unlike = (place for place, (one, two) in pairs if one != two)
                return next(unlike, min(len(first), len(other.token_ids)))
        return None


class Contest:
    """Asks both engines in turns."""

    def __init__(self, loaded: Loaded, max_tokens: int) -> None:
        from fledge.engine.engine import Engine

        engine = loaded.engine
        self._engines: dict[Arm, Engine] = {
            "without": Engine(engine.target, None, engine.settings),
            "with": engine,
        }
        self._params = SamplingParams(max_tokens=max_tokens)

    def warm_up(self) -> None:
        for engine in self._engines.values():
            engine.generate([_WARM_UP], SamplingParams(max_tokens=_WARM_UP_TOKENS))

    def ask(self, prompt: str, on_piece: OnPiece) -> Round:
        answers = []
        for number, arm in enumerate(TURNS):
            for chunk in self._engines[arm].stream(prompt, self._params):
                on_piece(number, chunk.text)
                completion = chunk.completion
            assert completion is not None, "the last chunk carries the completion"
            answers.append(completion)
        return Round(prompt, tuple(answers))


def summarise(rounds: Sequence[Round]) -> dict[str, Any]:
    """All figures of a contest, over all prompts and for each of them."""
    return {**_figures(rounds), "prompts": [describe_round(one) for one in rounds]}


def describe_round(one: Round) -> dict[str, Any]:
    """Figures of one prompt."""
    plain, drafted = one.of("without")[0], one.of("with")[0]
    return {
        "prompt": one.prompt,
        "text": plain.text,
        **({} if one.parting is None else {"text_with_head": drafted.text}),
        "num_tokens": len(plain.token_ids),
        "finish_reason": plain.finish_reason,
        **_figures([one]),
        "first_different_token": one.parting,
        "seconds": [round(_seconds(answer), 6) for answer in one.answers],
    }


def _figures(rounds: Sequence[Round]) -> dict[str, Any]:
    plain = [answer for one in rounds for answer in one.of("without")]
    drafted = [answer for one in rounds for answer in one.of("with")]
    before, after = _tokens_per_s(plain), _tokens_per_s(drafted)
    cycles = sum(answer.stats.cycles for answer in drafted)
    emitted = sum(answer.stats.num_tokens - 1 for answer in drafted)
    return {
        "outputs_identical": all(one.parting is None for one in rounds),
        "baseline_tokens_per_s": round(before, 3),
        "speculative_tokens_per_s": round(after, 3),
        "speedup": round(after / before, 4) if before else None,
        "accept_length": round(emitted / cycles, 4) if cycles else None,
    }


def _tokens_per_s(answers: Sequence[Completion]) -> float:
    """Over the whole time of the answers, reading the prompt included."""
    seconds = sum(_seconds(answer) for answer in answers)
    return sum(answer.stats.num_tokens for answer in answers) / seconds if seconds else 0.0


def _seconds(answer: Completion) -> float:
    return answer.stats.prefill_s + answer.stats.decode_s
