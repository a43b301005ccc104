"""Parts that several tests of losslessness share."""

import pytest
import torch

from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head
from fledge.models.target import Target
from tests.engines.forced_pair import save_forced_head, save_forced_target


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Eagle3Head]:
    """A pair whose drafts are all right."""
    folder = tmp_path_factory.mktemp("forced")
    target = save_forced_target(folder / "target")
    loaded = Target.load(target, dtype=torch.float32, device=torch.device("cpu"))
    return loaded, load_head(save_forced_head(folder / "head"))
