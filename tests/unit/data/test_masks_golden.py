"""Masks of twenty template styles, token by token against expectations written by hand.

⟦ ⟧ surround what the target said, its end-of-turn token included.
"""

import json
from typing import Any

import pytest

from fledge.contracts.conversation import Message
from fledge.data.masks import TokenTurn, encode_turns, join_turns
from tests.unit.data.template_zoo import parse, target_tokenizer, turn_finder

U, A = "user", "assistant"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
WEATHER_JSON = '{"type": "function", "function": {"name": "weather", "parameters": {}}}'


def say(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(city: str, content: str | None = None, **more: Any) -> Message:
    """A tool call as the API has it: arguments are a text."""
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    calls = [{"id": f"call_{city}", "type": "function", "function": function}]
    return say(A, content, tool_calls=calls, **more)


def result(text: str) -> Message:
    return say("tool", text, name="weather", tool_call_id="call_Oslo")


TWO_TURNS = [say(U, "Hi"), say(A, "Hello!"), say(U, "Bye"), say(A, "So long.")]
TOOL_TURNS = [say(U, "Oslo?"), call("Oslo"), result("9°"), say(A, "Nine.")]
THOUGHTS = [
    say(U, "1+1?"),
    say(A, "2", reasoning_content="easy"),
    say(U, "2+2?"),
    say(A, "4", reasoning_content="hm"),
]

GOLDEN: list[tuple[str, str, list[Message], list[str]]] = [
    (
        "chatml",
        "default system prompt",
        TWO_TURNS,
        [
            "<|im_start|>system\nYou are Eyas.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦So long.<|im_end|>⟧"
        ],
    ),
    (
        "chatml",
        "own system prompt, other scripts, a question left open at the end",
        [say("system", "Be kind."), say(U, "привет"), say(A, "你好 🦅\n"), say(U, "and?")],
        [
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nпривет<|im_end|>\n"
            "<|im_start|>assistant\n⟦你好 🦅\n<|im_end|>⟧"
        ],
    ),
    (
        "llama3",
        "contents are trimmed",
        [
            say("system", " Sys "),
            say(U, "Hi\n"),
            say(A, "  Hello! \n"),
            say(U, "Bye"),
            say(A, "So"),
        ],
        [
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nSys<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦So<|eot_id|>⟧"
        ],
    ),
    (
        "qwen3",
        "earlier thinking is removed: one sample for each answer",
        THOUGHTS,
        [
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
            "⟦<think>\neasy\n</think>\n\n2<|im_end|>⟧",
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
            "⟦<think>\nhm\n</think>\n\n4<|im_end|>⟧",
        ],
    ),
    (
        "qwen3",
        "without thinking the block is empty, and said",
        [say(U, "Hi"), say(A, "Hello!")],
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            "⟦<think>\n\n</think>\n\nHello!<|im_end|>⟧"
        ],
    ),
    (
        "qwen3",
        "thinking around tool calls is kept: the whole loop is one sample",
        [
            say(U, "Oslo?"),
            call("Oslo", reasoning_content="ask"),
            result("9°"),
            say(A, "Nine.", reasoning_content="ok"),
        ],
        [
            "<|im_start|>user\nOslo?<|im_end|>\n<|im_start|>assistant\n"
            '⟦<think>\nask\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": '
            '{"city": "Oslo"}}\n</tool_call><|im_end|>⟧\n'
            "<|im_start|>user\n<tool_response>\n9°\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nok\n</think>\n\nNine.<|im_end|>⟧"
        ],
    ),
    (
        "qwen3",
        "reasoning that the server left in the content",
        [say(U, "1+1?"), say(A, "<think>\neasy\n</think>\n\n2")],
        [
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
            "⟦<think>\neasy\n</think>\n\n2<|im_end|>⟧"
        ],
    ),
    (
        "opened_think",
        "the prompt opens the reasoning",
        THOUGHTS,
        [
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n"
            "⟦easy\n</think>\n\n2<|im_end|>⟧",
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
            "⟦hm\n</think>\n\n4<|im_end|>⟧",
        ],
    ),
    (
        "gemma",
        "the model's role, the system prompt merged into the first turn",
        [say("system", "Sys"), *TWO_TURNS],
        [
            "<bos><start_of_turn>user\nSys\n\nHi<end_of_turn>\n"
            "<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
            "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n⟦So long.<end_of_turn>⟧"
        ],
    ),
    (
        "mistral",
        "no header: the space is the first thing said",
        TWO_TURNS,
        ["<s>[INST] Hi [/INST]⟦ Hello!</s>⟧[INST] Bye [/INST]⟦ So long.</s>⟧"],
    ),
    (
        "mistral_tools",
        "tools stand before the last question, so they move",
        [*TOOL_TURNS, say(U, "Bye"), say(A, "So")],
        [
            f"<s>[AVAILABLE_TOOLS][{WEATHER_JSON}][/AVAILABLE_TOOLS][INST]Oslo?[/INST]"
            '⟦[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]</s>⟧'
            '[TOOL_RESULTS]{"content": "9°"}[/TOOL_RESULTS]⟦ Nine.</s>⟧',
            '<s>[INST]Oslo?[/INST][TOOL_CALLS][{"name": "weather", "arguments": '
            '{"city": "Oslo"}}]</s>[TOOL_RESULTS]{"content": "9°"}[/TOOL_RESULTS] Nine.</s>'
            f"[AVAILABLE_TOOLS][{WEATHER_JSON}][/AVAILABLE_TOOLS][INST]Bye[/INST]⟦ So</s>⟧",
        ],
    ),
    (
        "phi3",
        "the end-of-text token behind the turn is the template's",
        TWO_TURNS,
        [
            "<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello!<|end|>⟧\n"
            "<|user|>\nBye<|end|>\n<|assistant|>\n⟦So long.<|end|>⟧"
        ],
    ),
    (
        "deepseek_r1",
        "reasoning is dropped from every render, and the prompt opens it",
        [say("system", "Sys"), *THOUGHTS],
        [
            "<｜begin▁of▁sentence｜>Sys<｜User｜>1+1?<｜Assistant｜><think>\n"
            "⟦easy\n</think>\n\n2<｜end▁of▁sentence｜>⟧",
            "<｜begin▁of▁sentence｜>Sys<｜User｜>1+1?<｜Assistant｜>2<｜end▁of▁sentence｜>"
            "<｜User｜>2+2?<｜Assistant｜><think>\n⟦hm\n</think>\n\n4<｜end▁of▁sentence｜>⟧",
        ],
    ),
    (
        "deepseek_r1",
        "reasoning that the server left in the content, with and without its tag",
        [
            say(U, "1+1?"),
            say(A, "<think>\neasy\n</think>\n\n2"),
            say(U, "2+2?"),
            say(A, "hm\n</think>\n\n4"),
        ],
        [
            "<｜begin▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜><think>\n"
            "⟦easy\n</think>\n\n2<｜end▁of▁sentence｜>⟧",
            "<｜begin▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜>\n\n2<｜end▁of▁sentence｜>"
            "<｜User｜>2+2?<｜Assistant｜><think>\n⟦hm\n</think>\n\n4<｜end▁of▁sentence｜>⟧",
        ],
    ),
    (
        "hermes_tools",
        "calls have loss, results do not, results in a row are one turn",
        [say(U, "Oslo?"), call("Oslo", "I look."), result("9°"), result("wind"), say(A, "Nine.")],
        [
            "<|im_start|>system\nYou are Eyas.\n\n# Tools\n<tools>\n" + WEATHER_JSON + "\n</tools>"
            "<|im_end|>\n<|im_start|>user\nOslo?<|im_end|>\n<|im_start|>assistant\n"
            '⟦I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
            "</tool_call><|im_end|>⟧\n"
            "<|im_start|>user\n<tool_response>\n9°\n</tool_response>\n"
            "<tool_response>\nwind\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n⟦Nine.<|im_end|>⟧"
        ],
    ),
    (
        "llama31_tools",
        "the day is fixed, results come from ipython",
        TOOL_TURNS,
        [
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
            "Today Date: 26 Jul 2024\n\n<|eot_id|>"
            f"<|start_header_id|>user<|end_header_id|>\n\n[{WEATHER_JSON}]\n\nOslo?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
            '⟦{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>⟧'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"9°"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Nine.<|eot_id|>⟧"
        ],
    ),
    (
        "zephyr",
        "headers of plain text",
        TWO_TURNS,
        [
            "<|user|>\nHi</s>\n<|assistant|>\n⟦Hello!</s>⟧\n"
            "<|user|>\nBye</s>\n<|assistant|>\n⟦So long.</s>⟧"
        ],
    ),
    (
        "generation_block",
        "the template agrees about who spoke; its block is wider",
        TWO_TURNS,
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦So long.<|im_end|>⟧"
        ],
    ),
    (
        "merging",
        "two questions in a row are one turn",
        [say(U, "Hi"), say(U, "there"), say(A, "Hello!"), say(U, "Bye"), say(A, "So")],
        [
            "<|im_start|>user\nHi\nthere<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦So<|im_end|>⟧"
        ],
    ),
    (
        "harmony",
        "channels: earlier reasoning is dropped, earlier answers end otherwise",
        THOUGHTS,
        [
            "<|start|>system<|message|>Current date: 2024-07-26<|end|>"
            "<|start|>user<|message|>1+1?<|end|><|start|>assistant"
            "⟦<|channel|>analysis<|message|>easy<|end|><|start|>assistant<|channel|>final"
            "<|message|>2<|return|>⟧",
            "<|start|>system<|message|>Current date: 2024-07-26<|end|>"
            "<|start|>user<|message|>1+1?<|end|><|start|>assistant<|channel|>final<|message|>2"
            "<|end|><|start|>user<|message|>2+2?<|end|><|start|>assistant"
            "⟦<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final"
            "<|message|>4<|return|>⟧",
        ],
    ),
    (
        "harmony",
        "a call ends with a token of its own",
        [say(U, "Oslo?"), call("Oslo", reasoning_content="ask"), result("9°"), say(A, "Nine.")],
        [
            "<|start|>system<|message|>Current date: 2024-07-26<|end|>"
            "<|start|>user<|message|>Oslo?<|end|><|start|>assistant"
            "⟦<|channel|>analysis<|message|>ask<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>⟧'
            "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
            '"9°"<|end|><|start|>assistant⟦<|channel|>final<|message|>Nine.<|return|>⟧'
        ],
    ),
    (
        "no_prompt",
        "a template without a prompt for answers: the header is its own",
        TWO_TURNS,
        ["USER: Hi</s>\nASSISTANT:⟦ Hello!</s>⟧\nUSER: Bye</s>\nASSISTANT:⟦ So long.</s>⟧"],
    ),
    (
        "mistral_system",
        "the system prompt moves with the question, and goes once it is answered",
        [say("system", "Sys"), *TWO_TURNS],
        [
            "<s>[INST] Sys\n\nHi[/INST]⟦ Hello!</s>⟧",
            "<s>[INST] Hi[/INST] Hello!</s>[INST] Sys\n\nBye[/INST]⟦ So long.</s>⟧",
        ],
    ),
    (
        "next_header",
        "the next speaker's header is the end, a tool's after a call",
        [*TOOL_TURNS, say(U, "Bye"), say(A, "So", reasoning_content="hm")],
        [
            "[gMASK]<|user|>\nOslo?<|assistant|>⟦\n<think></think>\n\n"
            '<tool_call>weather{"city": "Oslo"}</tool_call><|observation|>⟧\n9°<|assistant|>'
            "⟦\n<think></think>\nNine.<|user|>⟧\nBye<|assistant|>"
            "⟦\n<think>hm</think>\nSo<|user|>⟧"
        ],
    ),
    (
        "closed_block",
        "empty thoughts in the prompt are not in the history",
        TWO_TURNS,
        [
            "<bos><|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
            "⟦Hello!<turn|>⟧",
            "<bos><|turn>user\nHi<turn|>\n<|turn>model\nHello!<turn|>\n"
            "<|turn>user\nBye<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
            "⟦So long.<turn|>⟧",
        ],
    ),
    (
        "open_last",
        "the end of the last turn is written only when somebody goes on",
        TWO_TURNS,
        [
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦So long.<|im_end|>⟧"
        ],
    ),
]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [(name, messages, expected) for name, _, messages, expected in GOLDEN],
    ids=[f"{name}: {what}" for name, what, _, _ in GOLDEN],
)
def test_loss_is_on_what_the_target_said(
    name: str, messages: list[Message], expected: list[str]
) -> None:
    tools = [WEATHER] if any(message.get("tool_calls") for message in messages) else []
    answers = {i: None for i, message in enumerate(messages) if message["role"] == A}
    turns = turn_finder(name).find(messages, tools, answers)
    encoded = encode_turns(target_tokenizer(name), turns)
    samples = join_turns([turn for turn in encoded if isinstance(turn, TokenTurn)])
    assert len(encoded) == len(answers)
    found = [(sample.token_ids, sample.loss_mask) for sample in samples]
    assert found == [parse(name, text) for text in expected]
