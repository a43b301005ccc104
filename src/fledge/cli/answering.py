"""One prompt, one answer, shown while it is made."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fledge.cli.render import write_text
from fledge.contracts.outputs import Completion
from fledge.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    from fledge.engine.engine import Engine
    from fledge.engine.request import Prompt


def show_answer(engine: "Engine", prompt: "Prompt", params: SamplingParams) -> Completion:
    """Stream the answer to stdout, ending in a line break."""
    completion = None
    for chunk in engine.stream(prompt, params):
        write_text(chunk.text)
        completion = chunk.completion
    write_text("\n")
    assert completion is not None, "the last chunk carries the completion"
    return completion


def as_prompts(engine: "Engine", texts: Sequence[str], *, raw: bool) -> "list[Prompt]":
    """Prompts for the engine: texts for the chat template, token ids where it is not wanted."""
    tokenizer = engine.target.tokenizer
    if not raw or tokenizer is None:
        return list(texts)
    return [tokenizer.encode(text) for text in texts]
