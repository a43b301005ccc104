"""Answers under a grammar: the same with drafts and without, always in the grammar, cleanly ended.

The target is random, so that it wants to leave the grammar at every token.
"""

import json
import re
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.errors import ConfigError, RequestError
from fledge.contracts.grammar import MAX_GRAMMAR_BYTES, Grammar
from fledge.contracts.outputs import Completion
from fledge.engine import grammar as grammar_module
from fledge.engine import grammar_masks
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.models.tokenizer import TargetTokenizer
from fledge.testing import (
    EOS_TOKEN_ID,
    ScriptedDrafter,
    target_of,
    tiny_head,
    tiny_model,
    tiny_tokenizer,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
TREE = EngineSettings(tree=TreeSettings(depth=4, width=4, budget=16), controller="fixed")


@cache
def target(num_extra: int = 4) -> Target:
    """A tiny target with more logits than its tokenizer has tokens, as many real ones have."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer) + num_extra)
    return target_of(model, TargetTokenizer(tokenizer))


@cache
def random_head() -> Eagle3Head:
    return tiny_head(target(), draft_vocab_size=260)


def schema(document: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(document))


def with_drafts(prompt: list[int], answer: Completion, **options: Any) -> Engine:
    """An engine whose drafts are often what plain decoding said."""
    drafter = ScriptedDrafter(
        {tuple(prompt): answer.token_ids},
        **{"vocab_size": target().vocab_size, "accuracy": 0.8, **options},
    )
    return Engine(target(), drafter=drafter)


def generate(engine: Engine, prompt: list[int], params: SamplingParams) -> Completion:
    (answer,) = engine.generate([prompt], params)
    engine.check_integrity()
    return answer


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 12, "top_p": 0.9},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"min_tokens": 12, "temperature": 0.7},
    {"logprobs": 2},
]
LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"type": "string", "maxLength": 3},
        {"enum": ["yes", "no", "né"]},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "pattern": "^[a-f]{2,4}$"},
    ]
)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    fields = draw(st.dictionaries(st.sampled_from("abcd"), LEAVES, min_size=1, max_size=3))
    num_required = draw(st.integers(0, len(fields)))
    return {
        "type": "object",
        "properties": fields,
        "required": sorted(fields)[:num_required],
        "additionalProperties": False,
    }


def dense() -> dict[int, float]:
    """A bias against white space, so that answers come to their end."""
    tokenizer = target().tokenizer
    assert tokenizer is not None
    return dict.fromkeys(tokenizer.encode_all([" \n\t\r"])[0], -100.0)


def check_drafts_change_nothing(documents: list[dict[str, Any]], seed: int) -> None:
    """All ways of sampling side by side, with drafts that are right, wrong or forbidden."""
    params = [
        SamplingParams(
            max_tokens=20,
            grammar=schema(document),
            seed=seed + i,
            logit_bias=dense() if i else {},
            **sampling,
        )
        for i, (document, sampling) in enumerate(zip(documents, SAMPLINGS, strict=True))
    ]
    prompts = [[6 + (seed * 31 + i) % 200, 70, 80 + i] for i in range(len(params))]
    plain = Engine(target()).generate(prompts, params)
    known = {tuple(one): answer.token_ids for one, answer in zip(prompts, plain, strict=True)}
    script = ScriptedDrafter(known, vocab_size=target().vocab_size, accuracy=0.8)
    engines = [Engine(target(), drafter=script), Engine(target(), random_head(), TREE)]
    for engine in engines:
        for drafted, one in zip(engine.generate(prompts, params), plain, strict=True):
            assert drafted.token_ids == one.token_ids
            assert drafted.finish_reason == one.finish_reason
            for told, expected in zip(drafted.logprobs or (), one.logprobs or (), strict=True):
                assert told.logprob == pytest.approx(expected.logprob, abs=1e-4)
        engine.check_integrity()
    for answer, document in zip(plain, documents, strict=True):
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), document)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(documents=st.lists(schemas(), min_size=6, max_size=6), seed=st.integers(0, 99))
def test_drafts_change_nothing(documents: list[dict[str, Any]], seed: int) -> None:
    check_drafts_change_nothing(documents, seed)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(documents=st.lists(schemas(), min_size=6, max_size=6), seed=st.integers(0, 99))
def test_drafts_change_nothing_at_length(documents: list[dict[str, Any]], seed: int) -> None:
    check_drafts_change_nothing(documents, seed)


def test_right_drafts_are_taken() -> None:
    grammar = Grammar(kind="regex", text="[a-z]{20}")
    params = SamplingParams(max_tokens=40, grammar=grammar, temperature=0.9, seed=5)
    prompt = [70, 71, 72]
    plain = generate(Engine(target()), prompt, params)
    assert (plain.finish_reason, len(plain.text)) == ("stop", 20)
    drafted = generate(with_drafts(prompt, plain, accuracy=1.0), prompt, params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.cycles < 0.5 * plain.stats.cycles


def test_company_with_and_without_grammars() -> None:
    """Each answer is what it would be alone, whoever shares its passes."""
    grammars = [schema(PERSON), None, Grammar(kind="regex", text="(ab|cd)+e"), None, schema({})]
    params = [
        SamplingParams(max_tokens=10, grammar=one, temperature=0.4 * (i % 3), seed=i, logprobs=1)
        for i, one in enumerate(grammars)
    ]
    prompts = [[40 + i, 50, 60 + i] for i in range(len(params))]
    alone = [
        generate(Engine(target()), prompt, one) for prompt, one in zip(prompts, params, strict=True)
    ]
    for engine in (
        Engine(target(), settings=EngineSettings(max_requests=3, max_pass_tokens=8)),
        Engine(target(), random_head(), TREE),
        Engine(target(), random_head(), EngineSettings()),
    ):
        together = engine.generate(prompts, params)
        assert [one.token_ids for one in together] == [one.token_ids for one in alone]


@pytest.mark.parametrize("accept", ["gumbel", "rejection"])
def test_either_rule_stays_in_the_grammar(accept: Any) -> None:
    engine = Engine(
        target(),
        random_head(),
        EngineSettings(tree=TREE.tree, controller="fixed", accept=accept),
    )
    regex = "(cat|dog){2}[0-9]{3}"
    grammar = Grammar(kind="regex", text=regex)
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=i, grammar=grammar) for i in range(4)
    ]
    for answer in engine.generate([[70, 71]] * 4, params):
        assert re.fullmatch(regex, answer.text)
        assert answer.finish_reason == "stop"
        assert EOS_TOKEN_ID not in answer.token_ids, "it ends when nothing may follow"


def test_open_end_is_the_targets_choice() -> None:
    """Where the grammar may go on, the end-of-text token says that it does not."""
    grammar = Grammar(kind="regex", text="a+")
    params = SamplingParams(
        max_tokens=12, grammar=grammar, logit_bias={EOS_TOKEN_ID: -50.0}, temperature=0.5
    )
    cut = generate(Engine(target()), [70], params)
    assert (cut.text, cut.finish_reason) == ("a" * 12, "length")
    eager = SamplingParams(max_tokens=12, grammar=grammar, logit_bias={EOS_TOKEN_ID: 50.0})
    ended = generate(Engine(target()), [70], eager)
    assert (ended.text, ended.finish_reason) == ("a", "stop")
    assert ended.token_ids[-1] == EOS_TOKEN_ID
    ignoring = SamplingParams(
        max_tokens=12, grammar=grammar, logit_bias={EOS_TOKEN_ID: 50.0}, ignore_eos=True
    )
    assert generate(Engine(target()), [70], ignoring).token_ids == ended.token_ids


def test_drafts_that_are_not_looked_at_are_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=20, grammar=schema(PERSON))
    prompt = [70, 71, 72]
    plain = generate(Engine(target()), prompt, params)
    for most in (0, 1, 5):
        monkeypatch.setattr(grammar_masks, "_MAX_DRAFTS", most)
        drafted = generate(with_drafts(prompt, plain, accuracy=1.0), prompt, params)
        assert drafted.token_ids == plain.token_ids
        assert (drafted.stats.cycles == plain.stats.cycles) == (most == 0)


def test_preempted_requests_go_on_where_they_were() -> None:
    params = SamplingParams(max_tokens=25, grammar=schema(PERSON), temperature=0.6, seed=2)
    expected = generate(Engine(target()), [70, 71], params)
    engine = Engine(target(), random_head(), TREE)
    seq = engine.add(engine.make_request([70, 71], params))
    for step in range(200):
        if seq.has_ended:
            break
        if step % 7 == 3:
            engine.preempt(seq)
        engine.step()
    assert seq.completion().token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (schema({"type": "nonsense"}), "nonsense"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar(kind="json_schema", text="{"), "cannot be read"),
        (Grammar(kind="regex", text="(a"), "unclosed group"),
        (Grammar(kind="lark", text="start: missing"), "missing"),
    ],
)
def test_wrong_grammars_are_refused(grammar: Grammar, message: str) -> None:
    with pytest.raises(RequestError, match=f"the grammar cannot be .*{message}|{message}"):
        generate(Engine(target()), [70], SamplingParams(grammar=grammar))


def test_grammars_that_would_hold_up_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_MASK_S", -1.0)
    with pytest.raises(RequestError, match="the grammar is too complex: .* make it simpler"):
        Engine(target()).grammars.compile(schema(PERSON))


def test_lenient_schemas_ignore_what_cannot_be_followed() -> None:
    text = json.dumps({"type": "array", "uniqueItems": True, "maxItems": 1})
    lenient = Grammar(kind="json_schema", text=text, is_lenient=True)
    answer = generate(Engine(target()), [70], SamplingParams(max_tokens=200, grammar=lenient))
    assert answer.text.startswith("[")


def test_a_grammar_that_fails_fails_alone() -> None:
    engine = Engine(target())
    bad, good = (
        engine.add(engine.make_request([70, 71], SamplingParams(max_tokens=30, grammar=one)))
        for one in (schema(PERSON), schema({"type": "boolean"}))
    )
    engine.step()
    assert bad.grammar is not None
    bad.grammar.matcher.consume_token(299)  # as if the library had given up
    while engine.has_work:
        engine.step()
    assert "the grammar cannot be followed" in str(bad.error)
    assert good.text in ("true", "false")


def test_draft_that_breaks_the_library_breaks_nothing_else() -> None:
    """The state before the drafts is found again."""
    params = SamplingParams(max_tokens=60, grammar=schema(PERSON))
    engine = Engine(target())
    seq = engine.add(engine.make_request([70, 71], params))
    for _ in range(5):
        engine.step()
    assert seq.grammar is not None
    mask = seq.grammar.matcher.compute_bitmask()
    seq.grammar.matcher.consume_token(299)
    assert seq.grammar.error is not None
    seq.grammar.recover()
    assert seq.grammar.error is None
    assert seq.grammar.matcher.compute_bitmask() == mask


def test_limits_and_missing_parts() -> None:
    with pytest.raises(ConfigError, match="may have 65536; make it smaller"):
        Grammar(kind="regex", text="a" * (MAX_GRAMMAR_BYTES + 1))
    bare = target_of(tiny_model("llama"))
    with pytest.raises(RequestError, match="built without"):
        Engine(bare).generate([[5, 6]], SamplingParams(grammar=schema({})))


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = Engine(target())
    assert not engine.grammars.can_compile
    with pytest.raises(ConfigError, match=r"pip install 'fledge\[serve\]'"):
        engine.generate([[70]], SamplingParams(grammar=schema({})))


def test_compiled_grammars_are_kept() -> None:
    compiler = Engine(target()).grammars
    first = compiler.compile(schema(PERSON))
    assert compiler.compile(schema(dict(PERSON))) is first
    for number in range(70):
        compiler.compile(Grammar(kind="regex", text=f"a{{{number + 1}}}"))
    assert compiler.compile(schema(PERSON)) is not first
