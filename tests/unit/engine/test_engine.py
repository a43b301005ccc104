"""The engine's promises to its callers: where answers end, what is shown, what is counted.

Catches: text of a stop that is shown, tokens counted past the end of the answer, an answer longer
than the context, a stream that says something else than generate, blocks that a stream left behind,
a prompt that is refused too late (in the middle of a batch), and cycles that are counted wrongly.

Most tests use a target that recites a script, so that they can say what must come out.
"""

from collections.abc import Sequence as Many
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge import Engine, EngineSettings, SamplingParams
from fledge.contracts.errors import RequestError
from fledge.contracts.outputs import Chunk
from fledge.models.target import Target, TargetOutput
from fledge.models.tokenizer import TargetTokenizer
from fledge.ops.kv import KVMemory
from fledge.ops.paged import Pass
from fledge.testing import ScriptedDrafter, target_of, tiny_head, tiny_model, tiny_tokenizer

EOS = 2
CONTEXT_LEN = 100
PROMPT = [20]
ANSWER = "One, naïve; two, café. 日本語 too! STOP here."
TOKENIZER = TargetTokenizer(tiny_tokenizer())
SCRIPT = [*TOKENIZER.encode(ANSWER), EOS]
HALF_SURE = 0.6


class Reciter:
    """A target that says a script, whatever it is asked; the prompt must have one token."""

    device = torch.device("cpu")
    vocab_size = TOKENIZER.num_tokens
    context_len = CONTEXT_LEN
    eos_token_ids = frozenset([EOS])
    repetition_penalty = 1.0

    def __init__(self, script: Many[int] = SCRIPT, tokenizer: Any = TOKENIZER) -> None:
        self._script = script
        self.tokenizer = tokenizer

    def chain_native(self) -> None:
        """It has no kernels."""

    def forward(
        self,
        packed: Pass,
        memory: KVMemory,
        *,
        logit_rows_R: Tensor | None = None,
        taps: Many[int] = (),
    ) -> TargetOutput:
        del taps
        nothing = torch.zeros(packed.num_tokens, 1)
        memory.for_window(None).write(0, packed.view(None).write_slots_T, nothing)
        said = [self._script[p % len(self._script)] for p in packed.positions_T.tolist()]
        logits_TV = torch.nn.functional.one_hot(torch.tensor(said), self.vocab_size).float()
        return TargetOutput(
            logits_TV if logit_rows_R is None else logits_TV[logit_rows_R], features_TF=None
        )


def drafter(accuracy: float, script: Many[int] = SCRIPT, depth: int = 5) -> ScriptedDrafter:
    return ScriptedDrafter(
        {tuple(PROMPT): list(script)},
        vocab_size=TOKENIZER.num_tokens,
        accuracy=accuracy,
        depth=depth,
        width=2,
        budget=depth,
    )


def reciter_engine(
    accuracy: float | None = None, script: Many[int] = SCRIPT, depth: int = 5
) -> Engine:
    guesses = None if accuracy is None else drafter(accuracy, script, depth)
    return Engine(Reciter(script), drafter=guesses)


@pytest.fixture(scope="module")
def target() -> Target:
    """A real tiny network with a tokenizer."""
    model = tiny_model("llama", vocab_size=TOKENIZER.num_tokens, max_position_embeddings=64)
    return target_of(model, TOKENIZER)


def assert_idle(engine: Engine) -> None:
    """Nothing waits, nothing runs, no block is owned."""
    assert not engine.has_work
    engine.check_integrity()
    assert engine.stats.cache_usage == 0


def num_tokens_until(text: str) -> int:
    """Tokens up to and with the one that completes this text for the first time."""
    return len(TOKENIZER.encode(ANSWER[: ANSWER.index(text) + len(text)]))


ENGINES = [None, HALF_SURE, 1.0]
STOPS = ["STOP", "é", "語", "One", ".", "naïve; two", ANSWER]


@pytest.mark.parametrize("accuracy", ENGINES)
@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_text_ends_the_answer_before_it(stop: str, accuracy: float | None) -> None:
    """Stops lie across token borders (a token is a byte), and inside what one cycle accepts."""
    engine = reciter_engine(accuracy)
    params = SamplingParams(max_tokens=99, stop=("never said", stop))
    completion = engine.generate([PROMPT], params)[0]
    assert completion.text == ANSWER[: ANSWER.index(stop)]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == tuple(SCRIPT[: num_tokens_until(stop)])
    assert completion.stats.num_tokens == num_tokens_until(stop)
    assert_idle(engine)


@pytest.mark.parametrize("accuracy", ENGINES)
@pytest.mark.parametrize("stop", [*STOPS, "STOP there", "too! S", "never said"])
def test_streams_show_nothing_of_a_stop_text(stop: str, accuracy: float | None) -> None:
    engine = reciter_engine(accuracy)
    params = SamplingParams(max_tokens=99, stop=(stop,))
    chunks = list(engine.stream(PROMPT, params))
    expected = ANSWER[: ANSWER.index(stop)] if stop in ANSWER else ANSWER
    shown = ""
    for chunk in chunks:
        shown += chunk.text
        assert expected.startswith(shown)
        assert "\ufffd" not in chunk.text
    assert shown == expected
    assert chunks[-1].completion is not None
    assert chunks[-1].completion.text == expected
    assert_idle(engine)


def test_of_two_stop_texts_the_one_that_begins_first_counts() -> None:
    params = SamplingParams(max_tokens=99, stop=("two", "naïve; t"))
    assert reciter_engine(1.0).generate([PROMPT], params)[0].text == "One, "


def test_a_beginning_of_a_stop_text_is_shown_when_the_answer_ends() -> None:
    params = SamplingParams(max_tokens=99, stop=("here. And more",))
    chunks = list(reciter_engine().stream(PROMPT, params))
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    assert chunks[-1].text.startswith("here")


@pytest.mark.parametrize("accuracy", ENGINES)
def test_stop_token_ids_end_the_answer_and_are_part_of_it(accuracy: float | None) -> None:
    comma = TOKENIZER.encode(",")[0]
    params = SamplingParams(max_tokens=99, stop_token_ids=(comma,))
    completion = reciter_engine(accuracy).generate([PROMPT], params)[0]
    assert completion.token_ids == tuple(TOKENIZER.encode("One,"))
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("accuracy", ENGINES)
def test_end_of_text_ends_the_answer_and_shows_nothing(accuracy: float | None) -> None:
    completion = reciter_engine(accuracy).generate([PROMPT], SamplingParams(max_tokens=99))[0]
    assert completion.token_ids == tuple(SCRIPT)
    assert completion.text == ANSWER
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("accuracy", ENGINES)
def test_ignore_eos_goes_on_but_own_stop_tokens_still_count(accuracy: float | None) -> None:
    looped = SCRIPT * 3
    engine = reciter_engine(accuracy, script=looped)
    going_on = SamplingParams(max_tokens=len(SCRIPT) + 7, ignore_eos=True)
    completion = engine.generate([PROMPT], going_on)[0]
    assert completion.token_ids == tuple(looped[: len(SCRIPT) + 7])
    assert completion.finish_reason == "length"
    stopping = SamplingParams(max_tokens=99, ignore_eos=True, stop_token_ids=(EOS,))
    assert engine.generate([PROMPT], stopping)[0].token_ids == tuple(SCRIPT)


@pytest.mark.parametrize("accuracy", ENGINES)
@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_max_tokens_is_exact(max_tokens: int, accuracy: float | None) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    completion = reciter_engine(accuracy).generate([PROMPT], params)[0]
    assert completion.token_ids == tuple(SCRIPT[:max_tokens])
    assert completion.finish_reason == "length"
    assert completion.text == TOKENIZER.decode(SCRIPT[:max_tokens])


@pytest.mark.parametrize("accuracy", ENGINES)
def test_one_token_needs_no_cycle(accuracy: float | None) -> None:
    completion = reciter_engine(accuracy).generate([PROMPT], SamplingParams(max_tokens=1))[0]
    assert completion.stats.cycles == 0
    assert completion.stats.accept_length is None


def test_end_of_text_wins_over_length_when_both_come_together() -> None:
    params = SamplingParams(max_tokens=len(SCRIPT))
    assert reciter_engine().generate([PROMPT], params)[0].finish_reason == "stop"


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("max_tokens", [2, 6, 7, 8, 20])
def test_accept_length_counts_what_the_cycles_emitted(depth: int, max_tokens: int) -> None:
    """design.md 1: prefill's token is not counted, the bonus token is, and the last cycle counts
    what was emitted. A drafter that is always right makes it a matter of division."""
    engine = reciter_engine(1.0, depth=depth)
    stats = engine.generate([PROMPT], SamplingParams(max_tokens=max_tokens))[0].stats
    assert stats.num_tokens == max_tokens
    assert stats.cycles == -(-(max_tokens - 1) // (depth + 1))
    assert stats.accept_length == (max_tokens - 1) / stats.cycles


def test_plain_and_hopeless_drafts_have_accept_length_one() -> None:
    params = SamplingParams(max_tokens=12)
    for accuracy in (None, 0.0):
        stats = reciter_engine(accuracy).generate([PROMPT], params)[0].stats
        assert stats.accept_length == 1.0


def test_a_stop_inside_a_cycle_counts_only_what_was_kept() -> None:
    """Five drafts and a bonus are accepted at once, the stop is complete after two of them."""
    engine = reciter_engine(1.0, depth=5)
    stats = engine.generate([PROMPT], SamplingParams(max_tokens=99, stop=("ne",)))[0].stats
    assert (stats.num_tokens, stats.cycles, stats.accept_length) == (3, 1, 2.0)


def test_times_add_up() -> None:
    stats = reciter_engine().generate([PROMPT], SamplingParams(max_tokens=5))[0].stats
    assert stats.prefill_s > 0
    assert stats.decode_s > 0
    assert stats.tokens_per_s == pytest.approx(5 / (stats.prefill_s + stats.decode_s))


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("num_prompt", [1, 40, 60, 62, 63])
def test_the_context_caps_the_answer(target: Target, num_prompt: int, has_head: bool) -> None:
    engine = Engine(target, tiny_head(target) if has_head else None)
    prompt = [10 + i for i in range(num_prompt)]
    completion = engine.generate([prompt], SamplingParams(max_tokens=500, ignore_eos=True))[0]
    assert len(prompt) + len(completion.token_ids) == target.context_len
    assert completion.finish_reason == "length"
    assert completion.prompt_token_ids == tuple(prompt)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("has_head", [False, True])
def test_stream_says_what_generate_says(target: Target, has_head: bool, temperature: float) -> None:
    engine = Engine(target, tiny_head(target) if has_head else None)
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=4, stop=("\ufffd\ufffd",))
    whole = engine.generate(["hello"], params)[0]
    chunks = list(engine.stream("hello", params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert [chunk.completion is None for chunk in chunks[:-1]] == [True] * (len(chunks) - 1)
    last = chunks[-1].completion
    assert last is not None
    assert (last.text, last.token_ids, last.finish_reason) == (
        whole.text,
        whole.token_ids,
        whole.finish_reason,
    )
    assert last.stats.cycles == whole.stats.cycles


def test_an_abandoned_stream_frees_its_blocks() -> None:
    engine = reciter_engine(1.0)
    stream = engine.stream(PROMPT, SamplingParams(max_tokens=40))
    first = next(stream)
    assert isinstance(first, Chunk)
    assert engine.has_work
    assert engine.stats.cache_usage > 0
    stream.close()
    assert_idle(engine)
    assert engine.generate([PROMPT], SamplingParams(max_tokens=3))[0].text == "One"


def test_a_stream_that_was_never_started_holds_nothing() -> None:
    engine = reciter_engine()
    engine.stream(PROMPT)
    assert_idle(engine)


def test_a_failing_draft_frees_everything() -> None:
    """An error (or Ctrl-C) in the middle of an answer leaves an engine that can be used again."""
    engine = reciter_engine(HALF_SURE)
    real = engine._drafter.draft

    def fail(sequences: Any, plan: Any) -> Any:
        raise KeyboardInterrupt

    engine._drafter.draft = fail
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT, PROMPT], SamplingParams(max_tokens=9))
    assert_idle(engine)
    engine._drafter.draft = real
    assert engine.generate([PROMPT], SamplingParams(max_tokens=3))[0].text == "One"


def test_a_failing_pass_frees_everything() -> None:
    engine = reciter_engine()

    def fail(plan: Any, trees: Any) -> Any:
        raise MemoryError

    engine._verifier.run = fail
    with pytest.raises(MemoryError):
        engine.generate([PROMPT] * 3, SamplingParams(max_tokens=9))
    assert_idle(engine)


def test_requests_wait_for_their_turn() -> None:
    """One at a time, and no prefill pass larger than asked, yet every answer is there in order."""
    settings = EngineSettings(max_requests=2, max_pass_tokens=2)
    engine = Engine(Reciter(), settings=settings)
    params = [SamplingParams(max_tokens=1 + i) for i in range(6)]
    completions = engine.generate([PROMPT] * 6, params)
    assert [completion.stats.num_tokens for completion in completions] == [1, 2, 3, 4, 5, 6]
    assert_idle(engine)


def test_no_prompts_no_answers() -> None:
    assert reciter_engine().generate([]) == []


def test_two_engines_over_one_target_do_not_disturb_each_other(target: Target) -> None:
    """Cycle by cycle in turn: caches, blocks and request ids belong to one engine each."""
    params = SamplingParams(max_tokens=20)
    alone = [Engine(target).generate([prompt], params)[0].token_ids for prompt in ("left", "right")]
    left = Engine(target).stream("left", params)
    right = Engine(target, tiny_head(target)).stream("right", params)
    said: list[tuple[int, ...]] = [(), ()]
    open_streams = {0: left, 1: right}
    while open_streams:
        for i, stream in list(open_streams.items()):
            chunk = next(stream, None)
            if chunk is None:
                del open_streams[i]
            else:
                said[i] += chunk.token_ids
    assert said == alone


def bare_target() -> Target:
    """A target without a tokenizer."""
    return target_of(tiny_model("llama"))


def plain_text_target() -> Target:
    """A target whose tokenizer has no chat template."""
    tokenizer = TargetTokenizer(tiny_tokenizer(has_chat_template=False))
    return target_of(tiny_model("llama", vocab_size=tokenizer.num_tokens), tokenizer)


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("  \n", "the prompt is empty"),
        ([], "the prompt is empty: it has no tokens"),
        (list(range(6, 70)), "the prompt has 64 tokens and the target's context holds 64"),
        ("x" * 200, "tokens and the target's context holds 64"),
        ([5, 262], "token id 262; the target's vocabulary has ids 0 to 261"),
    ],
)
def test_prompts_that_cannot_be_served(target: Target, prompt: Any, message: str) -> None:
    engine = Engine(target)
    with pytest.raises(RequestError, match=message):
        engine.generate([[5, 6], prompt])
    assert_idle(engine)
    with pytest.raises(RequestError, match=message):
        next(engine.stream(prompt))
    assert_idle(engine)


def test_negative_ids_are_refused(target: Target) -> None:
    with pytest.raises(RequestError, match="vocabulary has ids 0 to 261"):
        Engine(target).generate([[-1, 5]])


def test_prompts_that_need_a_tokenizer_or_a_template() -> None:
    bare = Engine(bare_target())
    for prompt in ("hi", MESSAGES):
        with pytest.raises(RequestError, match="built without a tokenizer; give token ids"):
            bare.generate([prompt])
    with pytest.raises(RequestError, match="stop texts need a tokenizer"):
        bare.generate([[5]], SamplingParams(stop=("x",)))
    assert bare.generate([[5]], SamplingParams(max_tokens=3))[0].text == ""
    plain = Engine(plain_text_target())
    with pytest.raises(RequestError, match="no chat template, so it cannot read a conversation"):
        plain.generate([MESSAGES])
    assert plain.generate(["hi"], SamplingParams(max_tokens=2))[0].prompt_token_ids == tuple(
        TOKENIZER.encode("hi")
    )


def test_texts_and_conversations_go_through_the_template(target: Target) -> None:
    engine = Engine(target)
    one, same = engine.generate(["hi", MESSAGES], SamplingParams(max_tokens=2))
    assert one.prompt_token_ids == same.prompt_token_ids
    assert one.prompt_token_ids == tuple(TOKENIZER.encode("<|user|>hi<eos><|assistant|>"))


def test_a_template_that_refuses_is_a_request_error() -> None:
    inner = tiny_tokenizer()
    inner.chat_template = "{{ raise_exception('roles must alternate') }}"
    target = target_of(tiny_model(vocab_size=len(inner)), TargetTokenizer(inner))
    with pytest.raises(RequestError, match="template refuses these messages: roles must alternate"):
        Engine(target).generate([[{"role": "user", "content": "hello"}]])


def test_as_many_parameters_as_prompts(target: Target) -> None:
    with pytest.raises(RequestError, match="2 prompts and 3 sets of sampling parameters"):
        Engine(target).generate([[5], [6]], [SamplingParams()] * 3)
