"""Penalties against transformers' processor and against the formula written out."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from fledge.contracts.sampling import SamplingParams
from fledge.ops.penalties import Said, make_penalties

CPU = torch.device("cpu")
VOCAB_SIZE = 12
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)


@given(tokens.filter(bool), tokens, tokens, st.sampled_from([0.5, 1.0001, 1.7]), st.integers(0, 99))
def test_repetition_equals_transformers(
    prompt: list[int], output: list[int], walked: list[int], penalty: float, seed: int
) -> None:
    said = Said(SamplingParams(repetition_penalty=penalty), prompt, output)
    penalties = make_penalties([said], VOCAB_SIZE, CPU)
    assert penalties is not None
    for token in walked:
        penalties.record(torch.tensor([token]))
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)).double()
    ids = torch.tensor([prompt + output + walked])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    assert torch.equal(penalties.apply(logits), expected)


@given(tokens, tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_count_the_answer_only(
    output: list[int], walked: list[int], presence: float, frequency: float
) -> None:
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=1.5
    )
    neighbour = Said(SamplingParams(), [1, 2], [3] * 9)
    penalties = make_penalties([neighbour, Said(params, [], output)], VOCAB_SIZE, CPU)
    assert penalties is not None
    for token in walked:
        penalties.record(torch.tensor([0, token]))
    logits = torch.zeros(2, VOCAB_SIZE)
    said = output + walked
    expected = [
        -presence * (token in said) - frequency * said.count(token) for token in range(VOCAB_SIZE)
    ]
    got = penalties.apply(logits)
    torch.testing.assert_close(got[1], torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(got[0], torch.zeros(VOCAB_SIZE, dtype=torch.float64))


def test_nothing_is_counted_when_nobody_asks() -> None:
    said = [Said(SamplingParams(repetition_penalty=1.0), [1], [2]), Said(SamplingParams(), [], [])]
    assert make_penalties(said, VOCAB_SIZE, CPU) is None
