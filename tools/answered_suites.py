"""Prompts of suites, answered greedily by a target alone: the texts that measurements go along."""

from collections.abc import Sequence

from fledge import Engine, EngineSettings, SamplingParams
from fledge.lab.suites import load_suite
from fledge.models.target import Target


def answered(
    target: Target, suites: Sequence[str], *, prompts: int, max_tokens: int
) -> list[tuple[list[int], tuple[int, ...]]]:
    """Token ids of each prompt and its answer, of at most so many prompts of each task."""
    assert target.tokenizer is not None
    asked = [
        target.tokenizer.encode_chat(prompt.messages())
        for name in suites
        for prompt in load_suite(name, max_prompts=prompts).prompts
    ]
    engine = Engine(target, settings=EngineSettings(max_requests=8))
    answers = engine.generate(asked, SamplingParams(max_tokens=max_tokens))
    return [
        (prompt, tuple(answer.token_ids)) for prompt, answer in zip(asked, answers, strict=True)
    ]
