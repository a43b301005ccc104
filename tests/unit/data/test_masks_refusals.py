"""Templates that change what was said: refused with what is wrong, or understood."""

import pytest

from fledge.contracts.conversation import Message
from fledge.models.chat_spans import TurnFinder, UnclearTurn
from fledge.models.tokenizer import TemplateRefusal
from tests.unit.data.masks_support import CHAT, A, U, finder_of, sampled, samples_of, say
from tests.unit.data.template_zoo import (
    target_tokenizer,
)


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
