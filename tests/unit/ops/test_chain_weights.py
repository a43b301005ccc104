"""What a guess counts: how likely serving sees it, by definition and by walking."""

import random

import torch

from fledge.ops.chain_weights import ChainWeights, start_weights

STEPS = 4
LENGTHS = (23, 1, 9, 40)
CHAINS = 3


def first_rows() -> torch.Tensor:
    starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    return torch.tensor(
        [start for start, length in zip(starts, LENGTHS, strict=True) for _ in range(length)]
    )


def reached_from(accepted_TK: torch.Tensor) -> torch.Tensor:
    ones_T1 = torch.ones(len(accepted_TK), 1, dtype=accepted_TK.dtype)
    return torch.cat([ones_T1, accepted_TK], dim=1).cumprod(dim=1)


def walked(accepted_TK: torch.Tensor) -> list[float]:
    """Chains from every index, and from as many before each document; where the last ones begin."""
    begun: list[float] = []
    for start, length in zip(torch.tensor([0, *LENGTHS]).cumsum(0).tolist(), LENGTHS, strict=False):
        found = [0.0] * length
        # Whoever comes from before the document comes by whole chains.
        for first in range(-CHAINS * (STEPS + 1), length):
            spread = {first: 1.0}
            for _ in range(CHAINS):
                spread = _next_chains(spread, accepted_TK[start : start + length])
            for index, share in spread.items():
                if 0 <= index < length:
                    found[index] += share
        begun += found
    return begun


def _next_chains(spread: dict[int, float], accepted: torch.Tensor) -> dict[int, float]:
    begun: dict[int, float] = {}
    for index, share in spread.items():
        left = share
        for step in range(STEPS):
            is_own = 0 <= index < len(accepted)
            kept = float(accepted[index, step]) if is_own else 1.0
            begun[index + step + 1] = begun.get(index + step + 1, 0.0) + left * (1 - kept)
            left *= kept
        begun[index + STEPS + 1] = begun.get(index + STEPS + 1, 0.0) + left
    return begun


def test_chains_begin_where_those_before_them_ended() -> None:
    torch.manual_seed(3)
    accepted_TK = torch.rand(sum(LENGTHS), STEPS, dtype=torch.float64)
    found = start_weights(reached_from(accepted_TK), first_rows())
    torch.testing.assert_close(found.tolist(), walked(accepted_TK), rtol=1e-12, atol=1e-12)


def test_one_document_does_not_move_the_chains_of_another() -> None:
    torch.manual_seed(4)
    accepted_TK = torch.rand(sum(LENGTHS), STEPS, dtype=torch.float64)
    alone = start_weights(
        reached_from(accepted_TK[-LENGTHS[-1] :]), torch.zeros(LENGTHS[-1], dtype=torch.long)
    )
    together = start_weights(reached_from(accepted_TK), first_rows())
    torch.testing.assert_close(together[-LENGTHS[-1] :], alone)


def test_sure_guesses_begin_chains_everywhere_and_wrong_ones_gather_them() -> None:
    sure_TK = torch.ones(60, STEPS)
    torch.testing.assert_close(
        start_weights(reached_from(sure_TK), torch.zeros(60, dtype=torch.long)), torch.ones(60)
    )
    # All guesses are right but those of token 30, which index i reaches at step 28 - i.
    accepted_TK = sure_TK.clone()
    for step in range(STEPS):
        accepted_TK[28 - step, step] = 0.0
    starts_T = start_weights(reached_from(accepted_TK), torch.zeros(60, dtype=torch.long))
    assert starts_T[29] == STEPS + 1
    assert starts_T[25:29].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert starts_T[30:34].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_weights_are_about_one_but_at_the_beginning() -> None:
    torch.manual_seed(6)
    accepted_TK = (torch.rand(400, STEPS) + 3.9).clamp(max=4.5) / 5
    starts_T = start_weights(reached_from(accepted_TK), torch.zeros(400, dtype=torch.long))
    length = float(reached_from(accepted_TK).sum(dim=1).mean())
    assert 1 < float(starts_T[:STEPS].mean()) < (STEPS + 1) / length + 0.1
    assert abs(float(starts_T[40:].mean()) - 1) < 0.02


def test_a_row_counts_by_the_guesses_before_it_and_by_its_index() -> None:
    random.seed(5)
    accepted_TK = torch.rand(11, STEPS, dtype=torch.float64)
    accepted_TK[-1] = 1
    first_rows_T = torch.zeros(10, dtype=torch.long)
    index_RK = torch.tensor([[random.randrange(11) for _ in range(STEPS)] for _ in range(6)])
    reached = reached_from(accepted_TK)
    plain = ChainWeights().of(accepted_TK, first_rows_T, index_RK)
    torch.testing.assert_close(plain, reached[:, :-1].gather(0, index_RK))
    weighed = ChainWeights(start_share=0.4).of(accepted_TK, first_rows_T, index_RK)
    starts_T = torch.cat([start_weights(reached[:-1], first_rows_T), torch.ones(1).double()])
    torch.testing.assert_close(weighed, plain * (0.6 + 0.4 * starts_T[index_RK]))
