"""Batches of features on a CUDA device: pinned, copied as they are stored, decoded there."""

from pathlib import Path

import pytest
import torch

from fledge.features.reader import FeatureReader
from tests.unit.features.invented_features import invent_layout, invent_samples, write_features

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("form", ["exact", "q8", "q5"])
@pytest.mark.parametrize("target", ["hidden", "topk"])
def test_batches_are_those_of_the_cpu(form: str, target: str, tmp_path: Path) -> None:
    layout = invent_layout(form, target, torch.bfloat16, hidden_size=64)
    store = write_features(tmp_path, layout, invent_samples(layout, 40, longest=200))
    near, far = (
        list(FeatureReader(store, batch_tokens=400, prefetch=3, device=device))
        for device in ("cpu", "cuda")
    )
    assert len(near) == len(far) > 4
    for one, other in zip(near, far, strict=True):
        assert one.sample_numbers == other.sample_numbers
        assert other.features_TF.is_cuda
        assert torch.equal(one.token_ids_T, other.token_ids_T.cpu())
        assert torch.equal(one.loss_mask_T, other.loss_mask_T.cpu())
        torch.testing.assert_close(one.features_TF, other.features_TF.cpu(), rtol=1e-4, atol=1e-4)
        for name in ("rows_R", "greedy_R", "log_mass_R", "top_ids_RC", "top_logprobs_RC"):
            mine, theirs = getattr(one.targets, name), getattr(other.targets, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs.cpu()), name
        if one.targets.final_RD is not None:
            final_RD = other.targets.final_RD
            torch.testing.assert_close(one.targets.final_RD, final_RD.cpu(), rtol=1e-4, atol=1e-4)
