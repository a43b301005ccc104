"""Where templates of many families have the user begin to write, and how a user turn ends."""

import pytest

from fledge.contracts.errors import ConfigError
from fledge.data.user_turns import UserTurns
from fledge.models.tokenizer import TargetTokenizer
from fledge.testing import tiny_tokenizer
from tests.unit.data.template_zoo import FAMILIES, target_tokenizer

STARTS = {
    "chatml": ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
    "qwen3": ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
    "opened_think": ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
    "hermes_tools": ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
    "merging": ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
    "generation_block": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>",
    ),
    "llama3": ("Be kind.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama31_tools": (
        "Be kind.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "phi3": ("<|system|>\nBe kind.<|end|>\n<|user|>\n", "<|end|>"),
    "zephyr": ("<|system|>\nBe kind.</s>\n<|user|>\n", "</s>"),
    "deepseek_r1": ("<｜begin▁of▁sentence｜>Be kind.<｜User｜>", "<｜Assistant｜>"),
    "harmony": ("Be kind.<|end|><|start|>user<|message|>", "<|end|>"),
    "no_prompt": ("SYSTEM: Be kind.</s>\nUSER:", "</s>"),
    "gemma": ("<bos><start_of_turn>user\n", "<end_of_turn>"),
    "mistral": ("<s>[INST]", "[/INST]"),
    "mistral_tools": ("<s>[INST]", "[/INST]"),
}


def test_every_family_shows_where_users_write() -> None:
    for name in FAMILIES:
        turns = UserTurns(target_tokenizer(name))
        assert turns.is_raw or turns.stop_token_ids or turns.stop_texts, name


@pytest.mark.parametrize("name", STARTS)
def test_start_and_end_of_a_user_turn(name: str) -> None:
    tokenizer = target_tokenizer(name)
    turns = UserTurns(tokenizer)
    lead, end = STARTS[name]
    assert turns.takes_system == ("Be kind." in lead)
    ids = turns.lead_ids("Be kind." if turns.takes_system else None)
    assert tokenizer.decode(ids, keeps_special_tokens=True).endswith(lead)
    if turns.stop_texts:
        assert (turns.stop_texts, turns.stop_token_ids) == ((end,), ())
    else:
        assert turns.stop_token_ids == (tokenizer.special_tokens[end],)
    assert not turns.is_raw
    assert end in turns.marks


EARLIER = ("Why is the sky blue?", "Name three owls.", "Who wrote Emma?")
WITH_REPLIES = {"gemma", "mistral", "merging", "deepseek_r1", "next_header"}
"""Turns in a row are refused, run together, or ended by the next header instead of their own."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_user_writes_behind_earlier_turns(name: str) -> None:
    tokenizer = target_tokenizer(name)
    turns = UserTurns(tokenizer)
    end = turns.stop_texts or [tokenizer.decode(turns.stop_token_ids, keeps_special_tokens=True)]
    for system in ("Be kind.", None) if turns.takes_system else (None,):
        first = tokenizer.decode(turns.lead_ids(system), keeps_special_tokens=True)
        lead = tokenizer.decode(turns.lead_ids(system, EARLIER), keeps_special_tokens=True)
        # Every turn begins where a first one does and ends as it does, the earlier ones in order.
        assert lead.startswith(first)
        rest = lead
        for text in EARLIER:
            before, found, rest = rest.partition(text)
            assert found, text
            assert text not in rest
            assert rest.lstrip().startswith(end[0])
            header = before.rstrip(" ")[-5:]
            assert first.endswith(header)
            assert lead.endswith(header)
        assert ("the next question?" in lead) == (name in WITH_REPLIES)
        assert turns.lead_ids(system, EARLIER[:1]) != turns.lead_ids(system)


def with_template(template: str | None) -> TargetTokenizer:
    inner = tiny_tokenizer(has_chat_template=template is not None)
    if template is not None:
        inner.chat_template = template
    return TargetTokenizer(inner)


@pytest.mark.parametrize("template", [None, "{{ messages[-1]['content'] }}"])
def test_nothing_around_a_turn_means_raw_text(template: str | None) -> None:
    turns = UserTurns(with_template(template))
    assert turns.is_raw
    assert not turns.takes_system
    assert (turns.stop_token_ids, turns.stop_texts) == ((), ())
    assert turns.lead_ids(None) == []
    assert "<|user|>" in turns.marks


@pytest.mark.parametrize(
    "template",
    [
        # Only what was said last is written; only the first turn is told from other text.
        "<|user|>{{ messages[-1]['content'] }}<eos><|assistant|>",
        "<|user|>{% for one in messages %}{{ one['content'] }}<eos>{% endfor %}",
    ],
)
def test_templates_that_do_not_show_later_turns_are_refused(template: str) -> None:
    turns = UserTurns(with_template(template))
    assert turns.lead_ids(None)
    with pytest.raises(ConfigError, match="behind earlier turns; leave `like` out"):
        turns.lead_ids(None, EARLIER)


def test_text_ends_a_turn_where_no_special_token_does() -> None:
    template = "User: {{ messages[0]['content'] }}\n\nBot: "
    assert UserTurns(with_template(template)).stop_texts == ("Bot:",)
    template = "User: {{ messages[0]['content'] }}"
    assert UserTurns(with_template(template)).stop_texts == ("\n",)


def test_templates_that_do_not_show_the_place_are_refused() -> None:
    twice = "<|user|>{{ messages[0]['content'] }} {{ messages[0]['content'] }}<eos>"
    with pytest.raises(ConfigError, match="writes a user turn 2 times"):
        UserTurns(with_template(twice))
    never = "<|user|>hello<eos>"
    with pytest.raises(ConfigError, match="writes a user turn 0 times"):
        UserTurns(with_template(never))
    counting = "<|user|>{{ messages[0]['content'] | length }}:{{ messages[0]['content'] }}<eos>"
    with pytest.raises(ConfigError, match="depends on the turn"):
        UserTurns(with_template(counting))
