"""What the codec loses of a real target's hidden states, outlier channels and all."""

import pytest
import torch

from fledge.contracts.feature_formats import FORMATS
from fledge.features.channel_spread import channels_of
from fledge.models.resolve import resolve_target
from fledge.models.target import Target
from fledge.ops.documents import make_documents
from fledge.ops.feature_codec import make_codec

TEXT = (
    "A young eagle spends its first weeks in the nest, fed by both parents. It learns to hold on "
    "to the rim in the wind, beats its wings for hours, and one day the wind carries it off. "
    "The first flight is short, and it ends in a bush. Then come weeks of following, begging and "
    "failing. 12 * 7 = 84, and def wings(eagle): return eagle.wings[:2] is not how it is done. "
)
ERRORS = {"exact": 0.0, "q8": 0.0065, "q6": 0.026, "q5": 0.052, "q4": 0.103}


@pytest.mark.slow
def test_every_channel_loses_a_small_share_of_its_own_spread() -> None:
    cpu = torch.device("cpu")
    directory = resolve_target("smollm2-135m-instruct").directory
    target = Target.load(directory, dtype=torch.float32, device=cpu)
    assert target.tokenizer is not None
    token_ids = torch.tensor(target.tokenizer.encode(TEXT * 4))
    documents = make_documents([len(token_ids)], cpu)
    features = target.read(token_ids, documents, (2, 15, 27)).features_TF
    fitted, judged = features[4::2], features[5::2]
    channels = channels_of(fitted)
    spread = torch.from_numpy(channels.spread)
    assert float(spread.max() / spread.median()) > 5
    found = {}
    for name in FORMATS:
        codec = make_codec(
            name,
            hidden_size=target.hidden_size,
            num_taps=3,
            dtype=torch.float32,
            channels=channels,
        )
        error = codec.decode(codec.encode(judged), torch.float32) - judged
        found[name] = float((error / spread).square().mean(0).sqrt().median())
    assert list(found.values()) == sorted(found.values())
    for name, error in found.items():
        assert error <= 1.3 * ERRORS[name]
