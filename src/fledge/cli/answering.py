"""One prompt, one answer, shown while it is made."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fledge.cli.progress import terminal_progress
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


def answer_all(
    engine: "Engine", prompts: "Sequence[Prompt]", params: SamplingParams
) -> list[Completion]:
    """Answer several prompts together, or one that is not shown, with a count of the tokens."""
    most = len(prompts) * params.max_tokens
    with terminal_progress().task("answering", most, "tokens") as task:
        sequences = [engine.add(engine.make_request(prompt, params)) for prompt in prompts]
        num_made = 0
        try:
            while not all(one.is_finished for one in sequences):
                failed = next((one for one in sequences if one.error is not None), None)
                if failed is not None and failed.error is not None:
                    raise failed.error
                engine.step()
                fresh = sum(len(one.output_ids) for one in sequences) - num_made
                task.advance(fresh)
                num_made += fresh
        finally:
            engine.abort(sequences)
        # Answers that ended early are whole too.
        task.update_total(num_made)
    return [one.completion() for one in sequences]


def as_prompts(engine: "Engine", texts: Sequence[str], *, raw: bool) -> "list[Prompt]":
    """Prompts for the engine: texts for the chat template, token ids where it is not wanted."""
    tokenizer = engine.target.tokenizer
    if not raw or tokenizer is None:
        return list(texts)
    return [tokenizer.encode(text) for text in texts]
