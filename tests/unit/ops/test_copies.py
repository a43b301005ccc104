"""Which chains are copied: as texts on the host have it, and by kernels in Triton's interpreter.

Catches: a match of another request or behind a text's end, a token of a block that is gone, a copy
that the head should have overruled, maps of another depth or mode.
"""

from dataclasses import astuple, replace

import pytest
import torch

from fledge.engine.token_history import TokenHistory
from fledge.ops.copies import (
    LEAST_MATCH,
    MOST_MATCH,
    CopiedChains,
    Copies,
    are_right,
    copy_chains,
    find_copies,
    limit_of,
    prefer_copies,
    probabilities_of,
)
from fledge.ops.kernel_choice import choose_kernels
from tests.copy_cases import some_chains, some_maps, some_text

CPU = torch.device("cpu")
COUNT = 7


def _found(text: list[int]) -> tuple[int, list[int] | None]:
    copy = TokenHistory().find(text, COUNT)
    return (0, None) if copy is None else (copy.match_len, copy.token_ids)


def test_the_device_finds_what_the_host_finds() -> None:
    text, said = some_text(CPU)
    copies = find_copies(text, COUNT)
    wanted = [_found(one) for one in said]
    assert copies.match_B.tolist() == [match for match, _ in wanted]
    assert sorted(copies.match_B.tolist()) == [0, 0, 0, 6, 7, 11, 16, 16]
    for row, (_, tokens) in zip(copies.tokens_BC.tolist(), wanted, strict=True):
        assert tokens is None or row == tokens


def test_what_a_window_has_left_behind_is_not_found() -> None:
    text, said = some_text(CPU, window=40)
    match = find_copies(text, COUNT).match_B.tolist()
    assert [bool(one) for one in match[:4]] == [bool(_found(one)[0]) for one in said[:4]]
    assert match[5:] == [0, 0, 0]


def _judged(match: int, first: int, probability: float) -> CopiedChains:
    copies = Copies(torch.tensor([match]), torch.tensor([[9, 8, 7, 6]]))
    chains = some_chains([first], probability, 4, CPU)
    return prefer_copies(chains, copies, torch.tensor([False]), some_maps(CPU))


def test_a_head_that_agrees_or_is_unsure_gives_way() -> None:
    for match in (LEAST_MATCH, MOST_MATCH):
        limit = limit_of(match)
        assert _judged(match, 9, 0.99).is_copied_B
        assert _judged(match, 5, limit - 0.01).is_copied_B
        assert not _judged(match, 5, limit + 0.01).is_copied_B
    assert limit_of(LEAST_MATCH) < limit_of(MOST_MATCH)
    nothing = _judged(0, 9, 0.1)
    assert not nothing.is_copied_B
    own = some_chains([9], 0.1, 4, CPU)
    assert all(map(torch.equal, astuple(nothing.candidates), astuple(own)))
    taken = _judged(LEAST_MATCH, 5, 0.1).candidates
    assert taken.tokens_BC.tolist() == [[9, 8, 7, 6]]
    assert taken.scores_BC[0].tolist() == sorted(taken.scores_BC[0].tolist(), reverse=True)
    likely = probabilities_of(LEAST_MATCH, 4, is_agreed=False)
    torch.testing.assert_close(taken.logprobs_BC.exp(), torch.tensor([likely]))


def test_longer_matches_are_believed_more() -> None:
    likely = [probabilities_of(match, 2, is_agreed=True) for match in range(6, MOST_MATCH + 1)]
    assert likely == sorted(likely)
    alone = probabilities_of(MOST_MATCH, 3, is_agreed=False)
    assert alone[0] < 0.5 < alone[1] == alone[2]


@pytest.mark.parametrize(("count", "window"), [(7, None), (1, 40)])
def test_kernels_copy_what_plain_operations_do(count: int, window: int | None) -> None:
    pytest.importorskip("triton")
    text, _ = some_text(CPU, window)
    firsts = find_copies(text, count).tokens_BC[:, 0]
    firsts[5] = 499
    sampled_B = torch.arange(len(firsts)) % 2 == 1
    for probability in (0.3, 0.7):
        chains = some_chains(firsts.tolist(), probability, count, CPU)
        found = []
        for choice in ("triton", "plain"):
            with choose_kernels(choice):
                found.append(copy_chains(chains, text, sampled_B, some_maps(CPU)))
        ours, plain = found
        assert torch.equal(ours.is_copied_B, plain.is_copied_B)
        assert torch.equal(ours.candidates.tokens_BC, plain.candidates.tokens_BC)
        torch.testing.assert_close(ours.candidates.scores_BC, plain.candidates.scores_BC)
        torch.testing.assert_close(ours.candidates.logprobs_BC, plain.candidates.logprobs_BC)


def test_a_kernel_is_judged_by_a_few_requests() -> None:
    """By all, plain operations would take gigabytes behind tables for long contexts."""
    text, _ = some_text(CPU)
    firsts = find_copies(text, COUNT).tokens_BC[:, 0].tolist()
    chains, sampled_B = some_chains(firsts, 0.3, COUNT, CPU), torch.zeros(len(firsts)).bool()
    found = copy_chains(chains, text, sampled_B, some_maps(CPU))
    assert found.is_copied_B[2]
    assert are_right(found, chains, text, sampled_B, some_maps(CPU))
    for row, is_right in ((2, False), (-1, True)):
        tokens_BC = found.candidates.tokens_BC.clone()
        tokens_BC[row, 1] += 1
        wrong = found._replace(candidates=replace(found.candidates, tokens_BC=tokens_BC))
        assert are_right(wrong, chains, text, sampled_B, some_maps(CPU)) is is_right
