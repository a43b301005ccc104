"""What holds for every chat: loss tokens spell the answers and their ends, each turn once."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fledge.contracts.conversation import Message
from fledge.data.masks import (
    MaskedSample,
    TokenTurn,
    join_turns,
)
from tests.unit.data.masks_support import A, U, samples_of, say
from tests.unit.data.template_zoo import (
    FAMILIES,
    end_ids,
    spell,
    target_tokenizer,
    turn_finder,
    vocabulary,
)

TEXT = st.text(st.sampled_from("abz<>|/[]{}\"'\n \té中🦅:"), max_size=12)
WITHOUT_SYSTEM = ("mistral", "mistral_tools")
THINKING = ("qwen3", "opened_think", "deepseek_r1", "harmony", "next_header")
ALWAYS_THINKING = ("deepseek_r1",)
NEVER_EMPTY = ("hermes_tools", "closed_block")
"""An answer without a word: their headers differ then, or nothing shows where it would be."""


@st.composite
def chats(draw: st.DrawFn, name: str) -> list[Message]:
    messages: list[Message] = []
    if name not in WITHOUT_SYSTEM and draw(st.booleans()):
        messages.append(say("system", draw(TEXT)))
    for _ in range(draw(st.integers(1, 4))):
        answer = say(A, ("a" if name in NEVER_EMPTY else "") + draw(TEXT))
        if name in ALWAYS_THINKING or (name in THINKING and draw(st.booleans())):
            answer["reasoning_content"] = "r" + draw(TEXT).strip()
        messages += [say(U, draw(TEXT)), answer]
    return messages


def said_by(name: str, sample: MaskedSample) -> list[str]:
    """The texts of each run of tokens with loss."""
    runs: list[list[int]] = []
    was_said = False
    for token, is_said in zip(sample.token_ids, sample.loss_mask, strict=True):
        if is_said and not was_said:
            runs.append([])
        if is_said:
            runs[-1].append(token)
        was_said = is_said
    return [target_tokenizer(name).decode(run, keeps_special_tokens=True) for run in runs]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12)
@given(data=st.data())
def test_loss_tokens_spell_the_answers_and_their_ends(name: str, data: st.DataObject) -> None:
    messages = data.draw(chats(name))
    answers = [message for message in messages if message["role"] == A]
    ends = {text for text, token in vocabulary(name).items() if token in end_ids(name)}
    specials = (*FAMILIES[name].specials, *FAMILIES[name].tags)
    assume(not any(one in str(m["content"]) for m in messages for one in specials))
    samples = samples_of(name, messages)
    said = [text for sample in samples for text in said_by(name, sample)]
    indices = {i: None for i, message in enumerate(messages) if message["role"] == A}
    texts = [turn.answer for turn in turn_finder(name).find(messages, [], indices)]
    # A turn whose reasoning is dropped later stands alone, before those around it.
    assert sorted(said) == sorted(texts)
    for text, message in zip(texts, answers, strict=True):
        end = next(end for end in ends if text.endswith(end))
        body = text.removesuffix(end)
        assert body.strip().endswith(message["content"].strip())
        assert (message.get("reasoning_content") or "") in body
        written = body.replace((message.get("reasoning_content") or "").strip(), "", 1)
        extra = written.strip().removesuffix(message["content"].strip())
        assert "".join(extra.split()) in (
            "",
            "<think></think>",
            "</think>",
            "<|channel|>final<|message|>",
            "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>",
        )
    num_loss = sum(sample.num_loss_tokens for sample in samples)
    assert num_loss == sum(len(spell(name, text)) for text in said)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=5),
    drops=st.sets(st.integers(0, 4)),
)
def test_every_turn_has_loss_once_behind_what_it_saw(
    lengths: list[tuple[int, int]], drops: set[int]
) -> None:
    """Histories that go on, or are written anew at some turns, as stripping templates do."""
    turns: list[TokenTurn] = []
    history: list[int] = []
    for number, (num_given, num_said) in enumerate(lengths):
        if number in drops:
            history = [-number - 1]
        history = history + list(range(num_given))
        answer_ids = [100 + number] * num_said
        turns.append(TokenTurn(number, history, answer_ids))
        history = history + answer_ids
    samples = join_turns(turns)
    starts = {0} | {number for number in drops if number < len(lengths)}
    assert len(samples) == len(starts)
    for turn in turns:
        homes = [
            sample
            for sample in samples
            if sample.token_ids[: len(turn.token_ids)] == turn.token_ids
            and all(sample.loss_mask[len(turn.prompt_ids) : len(turn.token_ids)])
        ]
        assert len(homes) == 1
    assert sum(sample.num_loss_tokens for sample in samples) == sum(one for _, one in lengths)
