"""What masks promise beyond the golden ones: who gets loss, sampled ids, cuts, borders."""

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from fledge.contracts.conversation import Answer, Conversation, Message, Origin
from fledge.data.masks import (
    TokenTurn,
    answers_with_loss,
    encode_turns,
    join_turns,
)
from fledge.models.chat_spans import TurnFinder, UnclearTurn
from fledge.models.tokenizer import TargetTokenizer, TemplateRefusal
from fledge.models.tokenizer_files import build_sentencepiece
from tests.unit.data.masks_support import CHAT, HEAD, PROMPT, A, U, sampled, samples_of, say
from tests.unit.data.template_zoo import (
    end_ids,
    fast_tokenizer,
    make_fast_tokenizer,
    parse,
    spell,
    target_tokenizer,
    vocabulary,
)

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
