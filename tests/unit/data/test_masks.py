"""What masks promise beyond the golden ones: borders, sampled ids, cuts, refusals."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from fledge.contracts.conversation import Answer, Conversation, Message, Origin
from fledge.data.masks import (
    MaskedSample,
    TokenTurn,
    answers_with_loss,
    encode_turns,
    join_turns,
)
from fledge.models.chat_spans import TurnFinder, UnclearTurn
from fledge.models.tokenizer import TargetTokenizer, TemplateRefusal
from fledge.models.tokenizer_files import build_sentencepiece
from tests.unit.data.template_zoo import (
    FAMILIES,
    end_ids,
    fast_tokenizer,
    make_fast_tokenizer,
    parse,
    spell,
    target_tokenizer,
    turn_finder,
    vocabulary,
)

U, A = "user", "assistant"


def say(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def sampled(message: int, finish: Any = "stop", token_ids: list[int] | None = None) -> Answer:
    return Answer(
        message=message,
        model="m",
        temperature=0.0,
        seed=0,
        finish_reason=finish,
        token_ids=None if token_ids is None else tuple(token_ids),
    )


def samples_of(
    name: str,
    messages: list[Message],
    answers: dict[int, Answer | None] | None = None,
    finder: TurnFinder | None = None,
) -> list[MaskedSample]:
    if answers is None:
        answers = {i: None for i, message in enumerate(messages) if message["role"] == A}
    turns = (finder or turn_finder(name)).find(messages, [], answers)
    encoded = encode_turns(target_tokenizer(name), turns)
    errors = [turn for turn in encoded if isinstance(turn, UnclearTurn)]
    if errors:
        raise errors[0]
    return join_turns([turn for turn in encoded if isinstance(turn, TokenTurn)])


def finder_of(template: str, name: str = "chatml") -> TurnFinder:
    """A finder for another template over a family's tokens."""
    return TurnFinder(TargetTokenizer(make_fast_tokenizer(name, template)), end_ids(name))


CHAT = [say(U, "Hi"), say(A, "Hello!")]
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
HEAD = "<|im_start|>system\nYou are Eyas.<|im_end|>\n"


# --- who gets loss ---------------------------------------------------------------------------


def row(messages: list[Message], *answers: Answer) -> Conversation:
    origin = Origin(source="s", licence="MIT", file="f", row=1)
    return Conversation(id="s/1", messages=tuple(messages), origin=origin, answers=answers)


def test_only_answers_of_the_target_have_loss() -> None:
    messages = [*CHAT, say(U, "Bye"), say(A, "So")]
    answer = sampled(3)
    assert answers_with_loss(row(messages, answer), as_recorded=False) == {3: answer}
    assert answers_with_loss(row(messages, answer), as_recorded=True) == {1: None, 3: answer}
    (sample,) = samples_of("chatml", messages, {3: answer})
    expected = HEAD + PROMPT + "Hello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    expected += "<|im_start|>assistant\n⟦So<|im_end|>⟧"
    assert (sample.token_ids, sample.loss_mask) == parse("chatml", expected)


# --- sampled token ids -----------------------------------------------------------------------


def test_sampled_ids_are_taken_as_they_are() -> None:
    """Two ways to spell the same text: the sampled one counts, not the tokenizer's."""
    tokenizer = make_fast_tokenizer("chatml", fast_tokenizer("chatml").chat_template, (("l", "l"),))
    target = TargetTokenizer(tokenizer)
    assert len(target.encode("Hello!")) == 5
    token_ids = spell("chatml", "Hello!<|im_end|>")
    turns = TurnFinder(target, end_ids("chatml")).find(CHAT, [], {1: sampled(1, "stop", token_ids)})
    (turn,) = encode_turns(target, turns)
    assert isinstance(turn, TokenTurn)
    assert turn.answer_ids == token_ids


def test_turns_whose_ids_the_next_prompt_spells_otherwise_get_samples_of_their_own() -> None:
    tokenizer = make_fast_tokenizer("chatml", fast_tokenizer("chatml").chat_template, (("l", "l"),))
    target = TargetTokenizer(tokenizer)
    messages = [*CHAT, say(U, "Bye"), say(A, "So")]
    first = sampled(1, "stop", spell("chatml", "Hello!<|im_end|>"))
    second = sampled(3, "stop", spell("chatml", "So<|im_end|>"))
    turns = TurnFinder(target, end_ids("chatml")).find(messages, [], {1: first, 3: second})
    found = join_turns(
        [turn for turn in encode_turns(target, turns) if isinstance(turn, TokenTurn)]
    )
    assert [(sample.message, sample.num_loss_tokens) for sample in found] == [(1, 7), (3, 3)]


def test_a_cut_answer_has_no_end() -> None:
    cut = sampled(1, "length", spell("chatml", "Hel"))
    (sample,) = samples_of("chatml", [say(U, "Hi"), say(A, "Hel")], {1: cut})
    assert (sample.token_ids, sample.loss_mask) == parse("chatml", HEAD + PROMPT + "⟦Hel⟧")


def test_ids_of_another_text_are_refused() -> None:
    with pytest.raises(UnclearTurn, match=r"message 1 says 'Hello!'.*ids end in 'Goodbye<\|im_end"):
        samples_of("chatml", CHAT, {1: sampled(1, "stop", spell("chatml", "Goodbye<|im_end|>"))})
    with pytest.raises(UnclearTurn, match="the unknown id 9999"):
        samples_of("chatml", CHAT, {1: sampled(1, "stop", [9999])})


def test_text_of_an_engine_may_lack_special_tokens() -> None:
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4"
    messages = [say(U, "2+2?"), say(A, "analysishmassistantfinal4")]
    answer = sampled(1, "stop", spell("harmony", said + "<|return|>"))
    (sample,) = samples_of("harmony", messages, {1: answer})
    assert sample.num_loss_tokens == len(answer.token_ids or ())


# --- answers that were cut off ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message", "expected"),
    [
        ("chatml", say(A, "Hel"), HEAD + PROMPT + "⟦Hel⟧"),
        ("qwen3", say(A, "", reasoning_content="well"), PROMPT + "⟦<think>\nwell⟧"),
        ("qwen3", say(A, "t", reasoning_content="w"), PROMPT + "⟦<think>\nw\n</think>\n\nt⟧"),
        ("qwen3", say(A, "t"), PROMPT + "⟦<think>\n\n</think>\n\nt⟧"),
        ("opened_think", say(A, "", reasoning_content="w"), PROMPT + "<think>\n⟦w⟧"),
        (
            "deepseek_r1",
            say(A, "", reasoning_content="well"),
            "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n⟦well⟧",
        ),
        (
            "deepseek_r1",
            say(A, "<think>\nwell"),
            "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n⟦well⟧",
        ),
        (
            "deepseek_r1",
            say(A, "4", reasoning_content="well\n"),
            "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n⟦well\n</think>\n\n4⟧",
        ),
    ],
)
def test_text_that_was_cut_off_has_no_end(name: str, message: Message, expected: str) -> None:
    (sample,) = samples_of(name, [say(U, "Hi"), message], {1: sampled(1, "length")})
    assert (sample.token_ids, sample.loss_mask) == parse(name, expected)


def test_a_cut_answer_in_the_middle_keeps_the_templates_end_without_loss() -> None:
    messages = [say(U, "Hi"), say(A, "Hel"), say(U, "Bye"), say(A, "So")]
    (sample,) = samples_of("chatml", messages, {1: sampled(1, "length"), 3: sampled(3)})
    expected = HEAD + PROMPT + "⟦Hel⟧<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    expected += "<|im_start|>assistant\n⟦So<|im_end|>⟧"
    assert (sample.token_ids, sample.loss_mask) == parse("chatml", expected)


def test_a_cut_tool_call_loses_only_its_end() -> None:
    call = {"function": {"name": "weather", "arguments": "{}"}}
    messages = [say(U, "Hi"), say(A, None, tool_calls=[call])]
    (sample,) = samples_of("hermes_tools", messages, {1: sampled(1, "length")})
    tokenizer = target_tokenizer("hermes_tools")
    said = [t for t, is_said in zip(sample.token_ids, sample.loss_mask, strict=True) if is_said]
    assert tokenizer.decode(said).endswith("</tool_call>")


# --- borders between tokens ------------------------------------------------------------------


def test_a_token_over_the_border_is_taken_apart() -> None:
    """The prompt ends in a line break, the answer begins with one, and both together are a token:
    the target was given the first and said the second."""
    newline = "Ċ"
    template = fast_tokenizer("opened_think").chat_template
    tokenizer = make_fast_tokenizer("opened_think", template, ((newline, newline),))
    target = TargetTokenizer(tokenizer)
    turns = TurnFinder(target, end_ids("opened_think")).find(CHAT, [], {1: None})
    assert (turns[0].prompt[-1], turns[0].answer[0]) == ("\n", "\n")
    (turn,) = encode_turns(target, turns)
    assert isinstance(turn, TokenTurn)
    assert turn.prompt_ids == target.encode_chat(CHAT[:1])
    assert turn.answer_ids[0] == vocabulary("opened_think")[newline]
    assert target.decode(turn.answer_ids, keeps_special_tokens=True) == turns[0].answer


def sentencepiece(template: str | None) -> TargetTokenizer:
    """A tokenizer that puts a space before every text, as Llama-2's does."""
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    pieces += ["▁H", "BB"]
    backend = build_sentencepiece(pieces, [("▁", "H"), ("B", "B")], unk_token="<unk>")
    backend.add_special_tokens([AddedToken(one, special=True) for one in pieces[:3]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return TargetTokenizer(tokenizer)


@pytest.mark.parametrize("answer", ["Hello", "BHello", " Hello", "\nHello"])
def test_no_space_is_invented_before_an_answer(answer: str) -> None:
    target = sentencepiece(
        "{% for m in messages %}{{ 'AB' if m.role == 'assistant' }}{{ m.content }}"
        "{{ eos_token }}{% endfor %}{{ 'AB' if add_generation_prompt }}"
    )
    turns = TurnFinder(target, frozenset({2})).find([say(U, "x"), say(A, answer)], [], {1: None})
    (turn,) = encode_turns(target, turns)
    assert isinstance(turn, TokenTurn)
    assert turn.prompt_ids == target.encode_chat([say(U, "x")])
    assert turn.answer_ids[-1] == 2
    whole = target.decode(turn.token_ids, keeps_special_tokens=True)
    assert whole == f"x</s>AB{answer}</s>"


# --- targets without a template --------------------------------------------------------------


def test_without_a_template_the_answer_continues_the_prompt() -> None:
    target = sentencepiece(None)
    finder = TurnFinder(target, frozenset({2}))
    turns = finder.find([say(U, "Once upon"), say(A, " Hey")], [], {1: sampled(1)})
    (turn,) = encode_turns(target, turns, is_raw=finder.is_raw)
    assert isinstance(turn, TokenTurn)
    assert turn.prompt_ids == target.encode("Once upon")
    assert target.decode(turn.answer_ids, keeps_special_tokens=True) == "Hey</s>"
    cut = finder.find([say(U, "Once"), say(A, " He")], [], {1: sampled(1, "length")})
    assert cut[0].answer == " He"


def test_raw_answers_of_a_target_with_a_template() -> None:
    finder = TurnFinder(target_tokenizer("chatml"), end_ids("chatml"), is_raw=True)
    (turn,) = finder.find(CHAT, [], {1: sampled(1, "stop", spell("chatml", "Hello!<|im_end|>"))})
    assert (turn.prompt, turn.answer) == ("Hi", "Hello!<|im_end|>")
    with pytest.raises(TemplateRefusal, match="one prompt and its answer.*system, user, assistant"):
        finder.find([say("system", "Be"), *CHAT], [], {2: sampled(2)})


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "messages", "error", "words"),
    [
        ("mistral", [say("system", "S"), *CHAT], TemplateRefusal, "roles must alternate"),
        ("gemma", [say(U, "a"), say(U, "b"), say(A, "c")], TemplateRefusal, "must take turns"),
        ("mistral_tools", [say("system", "S"), *CHAT], TemplateRefusal, "role system is not sup"),
        ("chatml", [say(A, "Hello!")], TemplateRefusal, "begins with an answer"),
        (
            "chatml",
            [say(U, "Hi"), say(A, "a<|im_end|>b")],
            TemplateRefusal,
            r"spells <\|im_end\|> in its middle",
        ),
        (
            "deepseek_r1",
            CHAT,
            UnclearTurn,
            r"ends in <think>, .* no reasoning .*\n  prompt: .*<think>\\n'\n  render: .*Hello!<",
        ),
        (
            "chatml",
            [say(U, "Hi"), say(A, "2", reasoning_content="1+1")],
            UnclearTurn,
            r"message 1 says '1\+1', and the template renders it as '2<",
        ),
        (
            "chatml",
            [say(U, "Hi"), say(A, "", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])],
            UnclearTurn,
            "the template renders it as",
        ),
        (
            "merging",
            [say(U, "Hi"), say(A, "a"), say(A, "b")],
            UnclearTurn,
            r"message 2: the prompt and the render with its answer part at",
        ),
    ],
)
def test_refused_with_what_is_wrong(
    name: str, messages: list[Message], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        samples_of(name, messages)


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    finder = finder_of(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}"
    )
    with pytest.raises(UnclearTurn, match="without a special token behind it"):
        finder.find(CHAT, [], {1: None})
    (cut,) = finder.find(CHAT, [], {1: sampled(1, "length")})
    assert cut.answer == " Hello!"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            "{% if m.role == 'assistant' %}{{ m.content }}{% else %}"
            "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}",
            "takes in 'H' at character 17, in",
        ),
        ("{% generation %}{{ m.content }}{% endgeneration %}", "takes in 'H'"),
        (
            "{% if m.role == 'assistant' %}{{ m.content[:2] }}{% generation %}"
            "{{ m.content[2:] }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
            "leaves out 'H'",
        ),
    ],
)
def test_a_generation_block_that_says_otherwise_is_refused(block: str, words: str) -> None:
    finder = finder_of(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + block + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UnclearTurn, match=words):
        finder.find(CHAT, [], {1: None})


@pytest.mark.parametrize("ending", ["{{ m.content }}{% endgeneration %}<|im_end|>\n"])
def test_a_generation_block_may_leave_the_end_out(ending: str) -> None:
    finder = finder_of(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}" + ending + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (turn,) = finder.find(CHAT, [], {1: None})
    assert turn.answer == "Hello!<|im_end|>"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_header_that_always_follows_has_no_loss() -> None:
    (turn,) = finder_of(CHATML + "<|im_start|>assistant\n").find(CHAT, [], {1: None})
    assert turn.answer == "Hello!<|im_end|>"


def test_white_space_alone_does_not_make_a_turn_unclear() -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content }} ").replace(
        "assistant\n{% endif", "assistant \n\n{% endif"
    )
    (turn,) = finder_of(template).find(CHAT, [], {1: None})
    assert turn.prompt.endswith("assistant \n\n")
    assert turn.answer == "Hello! <|im_end|>"
    (cut,) = finder_of(template).find(CHAT, [], {1: sampled(1, "length")})
    assert cut.answer == "Hello!"


def test_reasoning_that_the_prompt_rules_out_is_refused() -> None:
    """The prompt opens it and the render never closes it; or the prompt has closed it already."""
    thinks = [say(U, "Hi"), say(A, "2", reasoning_content="1+1")]
    opened = CHATML.replace("assistant\n", "assistant\n<think>\n").replace(
        "{{ m.role }}\n", "{{ m.role }}\n{{ '<think>\n' if m.role == 'assistant' }}"
    )
    with pytest.raises(UnclearTurn, match="the prompt ends in <think>"):
        finder_of(opened, "qwen3").find(CHAT, [], {1: None})
    (turn,) = finder_of(opened, "qwen3").find(thinks, [], {1: None})
    assert turn.answer == "1+1\n</think>\n\n2<|im_end|>"
    closed = CHATML.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(UnclearTurn, match="does not begin|part at character"):
        finder_of(closed, "qwen3").find(thinks, [], {1: None})
    (turn,) = finder_of(closed, "qwen3").find(CHAT, [], {1: None})
    assert turn.answer == "Hello!<|im_end|>"


def test_no_content_is_not_spelled_none() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    template = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
    )
    finder = finder_of(template)
    (turn,) = finder.find([say(U, "Hi"), say(A, None, tool_calls=[call])], [], {1: None})
    assert turn.answer == "f<|im_end|>"


def test_a_call_that_the_template_drops_is_named() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(UnclearTurn, match=r"message 1 calls f, and the template renders it as '<"):
        finder_of(CHATML).find([say(U, "Hi"), say(A, "", tool_calls=[call])], [], {1: None})


def test_tool_arguments_stay_text_for_templates_that_want_it() -> None:
    finder = finder_of(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"function": {"name": "f", "arguments": '{"b":  1}'}}
    (turn,) = finder.find([say(U, "Hi"), say(A, "", tool_calls=[call])], [], {1: None})
    assert turn.answer == 'f{"b":  1}<|im_end|>'


def test_unknown_ends_leave_the_last_special_token() -> None:
    """No config says what ends answers: the last special token of the turn does."""
    finder = TurnFinder(target_tokenizer("phi3"), frozenset())
    (turn,) = finder.find(CHAT, [], {1: None})
    assert turn.answer == "Hello!<|end|>\n<|endoftext|>"


# --- properties ------------------------------------------------------------------------------

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
