"""What is known of chat templates and tokenizers without asking a model."""

from datetime import date
from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError
from fledge.models.target_facts import read_facts
from fledge.models.template_facts import asks_the_date, marks_generation, stop_clock
from fledge.models.tokenizer import TargetTokenizer, TemplateRefusal
from tests.unit.data.template_zoo import fast_tokenizer, make_fast_tokenizer, target_tokenizer
from tests.unit.data.tokenize_support import save_target

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.mark.parametrize(
    ("template", "is_marked"),
    [
        ("{% generation %}x{% endgeneration %}", True),
        ("{%-  generation -%}x{%- endgeneration -%}", True),
        ("{{ generation }}", False),
        ("{% generation %}{{ 'open", False),
        ("{# {% generation %} #}", False),
        ("{{ '{% generation %}' }}", False),
    ],
)
def test_generation_blocks_are_found_by_jinja_itself(template: str, is_marked: bool) -> None:
    assert marks_generation(template) is is_marked


def test_the_clock_is_stopped() -> None:
    template = (
        "\n{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}"
        '{% if strftime_now is defined %}{{ strftime_now("%d %b %Y") }}{% endif %} {{ day() }}'
    )
    assert asks_the_date(template)
    assert not asks_the_date("{{ 'strftime_now' }}")
    tokenizer = TargetTokenizer(make_fast_tokenizer("chatml", template))
    today = tokenizer.render(HI, add_generation_prompt=True)
    fixed = tokenizer.on_day(date(2024, 7, 26)).render(HI, add_generation_prompt=True)
    assert fixed == "\n26 Jul 2024 2024-07-26"
    assert today != fixed
    assert stop_clock(template, date(2024, 7, 26))[1] == {
        "fledge_days": {"%Y-%m-%d": "2024-07-26", "%d %b %Y": "26 Jul 2024"}
    }


def test_identity_follows_vocabulary_template_and_special_tokens(tmp_path: Path) -> None:
    chatml = target_tokenizer("chatml").identity
    assert chatml == target_tokenizer("chatml").identity
    other = TargetTokenizer(make_fast_tokenizer("chatml", "{{ messages }}")).identity
    assert other["chat_template"] != chatml["chat_template"]
    assert other["vocabulary"] == chatml["vocabulary"]
    assert other["sha256"] != chatml["sha256"]
    assert TargetTokenizer(make_fast_tokenizer("chatml", None)).identity["chat_template"] is None
    saved = TargetTokenizer.load(save_target(tmp_path / "a")).identity
    assert saved == TargetTokenizer.load(save_target(tmp_path / "b")).identity


def test_tokens_that_open_and_close() -> None:
    assert target_tokenizer("qwen3").tags == {
        "<think>": "</think>",
        "<tool_call>": "</tool_call>",
    }
    assert target_tokenizer("zephyr").special_tokens == {"</s>": 0, "<s>": 1}


def test_a_second_template_serves_tools() -> None:
    tokenizer = fast_tokenizer("chatml")
    twofold = make_fast_tokenizer("chatml", None)
    twofold.chat_template = {"default": tokenizer.chat_template, "tool_use": "tools: {{ tools }}"}
    target = TargetTokenizer(twofold)
    assert "Hi" in target.render(HI, add_generation_prompt=False)
    assert target.render(HI, [WEATHER], add_generation_prompt=False).startswith("tools: [{")
    assert target.identity["chat_template"] != target_tokenizer("chatml").identity["chat_template"]


@pytest.mark.parametrize(
    "words", ["turn.content", "turn.content + turn.tool_calls[0].function.arguments"]
)
def test_a_turn_without_content_goes_into_templates_that_add_texts(words: str) -> None:
    other = "{% if turn.tool_calls is not defined %}{{ '[' + turn.content + ']' }}"
    template = (
        "{% for turn in messages %}"
        + other
        + "{% else %}{{ '[' + "
        + words
        + " + ']' }}{% endif %}"
        "{% endfor %}"
    )
    target = TargetTokenizer(make_fast_tokenizer("chatml", template))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    expected = "[Hi][]" if words == "turn.content" else '[Hi][{"x": 1}]'
    assert target.render(turns, add_generation_prompt=False) == expected
    with pytest.raises(TemplateRefusal, match="chat template refuses these messages"):
        target.render([{"role": "user"}], add_generation_prompt=False)


def test_a_broken_template_is_said_to_be_broken() -> None:
    target = TargetTokenizer(make_fast_tokenizer("chatml", "{% for %}"))
    with pytest.raises(TemplateRefusal, match="chat template refuses these messages"):
        target.render(HI, add_generation_prompt=True)


def test_ends_come_from_the_configs_or_the_tokenizer(tmp_path: Path) -> None:
    target = save_target(tmp_path / "phi", "phi3")
    assert read_facts(target).eos_token_ids == {0, 4}
    (target / "generation_config.json").unlink()
    (target / "config.json").write_text('{"model_type": "llama", "eos_token_id": 3}')
    assert read_facts(target).eos_token_ids == {3}
    (target / "config.json").write_text('{"model_type": "llama", "eos_token_id": null}')
    assert read_facts(target).eos_token_ids == {4}
    (target / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"has no config.json"):
        read_facts(target)
