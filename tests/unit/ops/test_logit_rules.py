"""Rules on logits against transformers' processors and against the formulas written out.

Catches: another order of the rules, a rule of one request applied to its neighbour, tokens counted
that were only walked past, counts that are wrong after rows were used again or the counts grew, an
end-of-text token that becomes possible one token early or late.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from fledge.contracts.sampling import SamplingParams
from fledge.ops.logit_rules import LogitRules, RequestRules, TokenCounts, make_rules

CPU = torch.device("cpu")
VOCAB_SIZE = 12
EOS = frozenset({2, 7})
token_ids = st.integers(0, VOCAB_SIZE - 1)
tokens = st.lists(token_ids, max_size=12)
biases = st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 0.25, 3.0]), max_size=4)


def counts() -> TokenCounts:
    return TokenCounts(VOCAB_SIZE, CPU)


def rules_of(
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    kept: TokenCounts,
    eos: frozenset[int] = EOS,
) -> RequestRules:
    return RequestRules(params, prompt, output, eos, kept)


def say(rules: LogitRules, *said: int) -> None:
    """Each request emits one token."""
    rules.record(torch.tensor(said), torch.ones(len(said), dtype=torch.bool))


def positions(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@settings(max_examples=150)
@given(
    prompt=tokens.filter(bool),
    output=tokens,
    walked=tokens,
    bias=biases,
    penalty=st.sampled_from([None, 0.5, 1.0001, 1.7]),
    min_tokens=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_rules_equal_transformers_in_its_order(
    prompt: list[int],
    output: list[int],
    walked: list[int],
    bias: dict[int, float],
    penalty: float | None,
    min_tokens: int,
    seed: int,
) -> None:
    """The order of generate: sequence bias, repetition penalty, fewest new tokens."""
    params = SamplingParams(logit_bias=bias, repetition_penalty=penalty, min_tokens=min_tokens)
    rules = make_rules([rules_of(params, prompt, output, counts())])
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)).double()
    processors = LogitsProcessorList()
    if bias:
        processors.append(SequenceBiasLogitsProcessor({(t,): v for t, v in bias.items()}))
    if penalty is not None:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    if min_tokens:
        ends = torch.tensor(sorted(EOS))
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, ends))
    if rules is None:
        assert not processors
        return
    before = logits.clone()
    for token in walked:
        say(rules, token)
    got = rules.apply(logits, positions(len(output) + len(walked)))
    expected = processors(torch.tensor([prompt + output + walked]), logits.clone())
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before), "the target's own logits are still wanted for logprobs"


@given(tokens, tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_count_the_answer_only(
    output: list[int], walked: list[int], presence: float, frequency: float
) -> None:
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=1.5
    )
    kept = counts()
    neighbour = rules_of(SamplingParams(), [1, 2], [3] * 9, kept)
    rules = make_rules([neighbour, rules_of(params, [4, 5], output, kept)])
    assert rules is not None
    for token in walked:
        say(rules, 0, token)
    said = output + walked
    expected = [
        -presence * (token in said) - frequency * said.count(token) for token in range(VOCAB_SIZE)
    ]
    got = rules.apply(torch.zeros(2, VOCAB_SIZE), positions(9, len(said)))
    torch.testing.assert_close(got[1], torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(got[0], torch.zeros(VOCAB_SIZE, dtype=torch.float64))


def test_each_request_has_its_own_rules() -> None:
    kept = counts()
    mixed = [
        SamplingParams(),
        SamplingParams(logit_bias={4: 2.0}),
        SamplingParams(min_tokens=3),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(logit_bias={4: -2.0, 2: 9.0}, min_tokens=2, frequency_penalty=0.5),
    ]
    logits = torch.randn(len(mixed), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    together = make_rules([rules_of(one, [1], [4, 4], kept) for one in mixed])
    assert together is not None
    got = together.apply(logits, positions(*[2] * len(mixed)))
    for row, one in enumerate(mixed):
        alone = make_rules([rules_of(one, [1], [4, 4], kept)])
        row_logits = logits[row : row + 1]
        expected = row_logits.double() if alone is None else alone.apply(row_logits, positions(2))
        assert torch.equal(got[row], expected[0])
    assert torch.isinf(got).sum() == len(EOS), "only the third request is still too short"
    assert got[4, 4] == logits[4, 4].double() - 2.0 - 1.0


def test_tokens_of_requests_that_have_stopped_are_not_counted() -> None:
    kept = counts()
    params = SamplingParams(frequency_penalty=1.0)
    rules = make_rules([rules_of(params, [1], [], kept) for _ in range(2)])
    assert rules is not None
    rules.record(torch.tensor([5, 5]), torch.tensor([True, False]))
    got = rules.apply(torch.zeros(2, VOCAB_SIZE), positions(1, 1))
    assert got[:, 5].tolist() == [-1.0, 0.0]


def test_counts_go_on_from_cycle_to_cycle() -> None:
    """The host's list grows as well, but a row that is open does not need it."""
    kept, output = counts(), [3]
    request = rules_of(SamplingParams(frequency_penalty=1.0), [1], output, kept)
    for said in (3, 8, 3):
        rules = make_rules([request])
        assert rules is not None
        say(rules, said)
    output += [3, 8, 3]
    rules = make_rules([request])
    assert rules is not None
    got = rules.apply(torch.zeros(1, VOCAB_SIZE), positions(4))
    assert got[0, [3, 8, 1]].tolist() == [-3.0, -1.0, 0.0]


def test_a_released_row_is_counted_anew() -> None:
    kept, output = counts(), [3]
    first = rules_of(SamplingParams(frequency_penalty=1.0), [1], output, kept)
    assert make_rules([first]) is not None
    output.append(6)
    first.release()
    first.release()
    other = rules_of(SamplingParams(repetition_penalty=2.0), [9, 10], [11], kept)
    rules = make_rules([other, first])
    assert rules is not None
    got = rules.apply(torch.ones(2, VOCAB_SIZE), positions(1, 2))
    assert [t for t in range(VOCAB_SIZE) if got[0, t] == 0.5] == [9, 10, 11]
    assert [t for t in range(VOCAB_SIZE) if got[1, t] == 0.0] == [3, 6]


def test_rows_are_used_again_and_grow_without_loss() -> None:
    kept = counts()
    params = SamplingParams(frequency_penalty=1.0)
    early = [rules_of(params, [1], [token], kept) for token in range(3)]
    assert make_rules(early) is not None
    many = [*early, *(rules_of(params, [1], [token], kept) for token in range(3, 9))]
    rules = make_rules(many)
    assert rules is not None
    got = rules.apply(torch.zeros(9, VOCAB_SIZE), positions(*[1] * 9))
    assert torch.equal(got[:, :9], -torch.eye(9).double())
    assert kept.num_open == 9
    num_rows = kept.num_rows
    for one in many:
        one.release()
    assert kept.num_open == 0
    assert make_rules([rules_of(params, [1], [], kept) for _ in range(9)]) is not None
    assert kept.num_rows == num_rows


def test_only_penalties_take_a_row() -> None:
    kept = counts()
    params = [SamplingParams(logit_bias={1: 1.0}), SamplingParams(min_tokens=4), SamplingParams()]
    assert make_rules([rules_of(one, [1], [2], kept) for one in params]) is not None
    assert kept.num_rows == 0


def test_there_are_no_rules_when_nobody_asks() -> None:
    kept = counts()
    nothing = [SamplingParams(repetition_penalty=1.0), SamplingParams(), SamplingParams()]
    assert make_rules([rules_of(one, [1], [2], kept) for one in nothing]) is None
    assert make_rules([]) is None


@pytest.mark.parametrize("eos", [frozenset(), frozenset({VOCAB_SIZE + 3})])
def test_a_target_without_a_usable_end_token_has_nothing_to_hold_back(eos: frozenset[int]) -> None:
    rules = make_rules([rules_of(SamplingParams(min_tokens=5), [1], [], counts(), eos)])
    assert rules is not None
    logits = torch.randn(1, VOCAB_SIZE)
    assert torch.equal(rules.apply(logits, positions(0)), logits.double())
