"""What is kept of a sample, and of the target's thoughts about it."""

import numpy as np
import pytest
import torch

from fledge.features import target_rows
from fledge.features.label_rows import feature_rows, kept_tokens, label_rows, read_tokens
from fledge.features.target_rows import describe_rows
from fledge.models.target_reading import Readout


@pytest.mark.parametrize(
    ("mask", "kept", "labels"),
    [
        ([0, 0, 0, 1, 1, 0], 5, [2, 3]),
        ([1, 1, 1], 3, [1]),
        ([0, 0, 1, 0, 1, 0, 0], 5, [1, 3]),
        ([0, 1, 0], 0, []),
        ([1, 0], 0, []),
        ([0, 0, 0, 0], 0, []),
        ([], 0, []),
    ],
)
def test_what_is_kept_of_a_sample(mask: list[int], kept: int, labels: list[int]) -> None:
    loss_mask = np.array(mask, np.bool_)
    assert kept_tokens(loss_mask) == kept
    assert label_rows(loss_mask).tolist() == labels
    assert feature_rows(kept) == max(kept - 2, 0)
    assert read_tokens(kept) == max(kept - 1, 0)
    # The last label is reached at the first draft step, from the last feature that is kept.
    assert not labels or labels[-1] == feature_rows(kept) == read_tokens(kept) - 1


def check_rows(top_k: int | None, soft_cap: float | None, temperature: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(30, 16, generator=generator)
    readout = Readout(torch.randn(50, 16, generator=generator), None, 0.5, soft_cap)
    draft_ids = torch.tensor([3, 4, 10, 30, 49])
    rows = torch.tensor([1, 2, 7, 20, 21, 29])
    found = describe_rows(final, rows, readout, draft_ids, top_k=top_k, temperature=temperature)
    logits = readout.logits(final[rows]).double() / temperature
    full = torch.log_softmax(logits, dim=-1)
    assert torch.equal(found.rows_R, rows)
    assert torch.equal(found.greedy_R, logits.argmax(-1))
    mass = full.exp()[:, draft_ids].sum(-1).log()
    torch.testing.assert_close(found.log_mass_R.double(), mass, rtol=1e-5, atol=1e-5)
    assert found.log_mass_R.dtype == torch.float32
    if top_k is None:
        assert found.final_RD is not None
        assert torch.equal(found.final_RD, final[rows])
        assert found.top_ids_RC is found.top_logprobs_RC is None
        return
    assert found.final_RD is None
    assert found.top_ids_RC is not None
    assert found.top_logprobs_RC is not None
    within = torch.log_softmax(logits[:, draft_ids], dim=-1)
    best = within.topk(min(top_k, 5), dim=-1)
    assert torch.equal(found.top_ids_RC, best.indices)
    torch.testing.assert_close(found.top_logprobs_RC.double(), best.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("top_k", [None, 2, 64])
@pytest.mark.parametrize("at_once", [1, 150, 1 << 20])
def test_rows_whatever_fits_at_once(
    top_k: int | None, soft_cap: float | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_rows, "_LOGITS_AT_ONCE", at_once)
    check_rows(top_k, soft_cap)


@pytest.mark.parametrize("top_k", [None, 3])
def test_rows_at_a_temperature(top_k: int | None) -> None:
    check_rows(top_k, 3.0, temperature=0.5)
