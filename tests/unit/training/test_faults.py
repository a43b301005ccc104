"""What goes wrong, in words that say what to do."""

import math
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.errors import (
    ArtifactError,
    CapacityError,
    ConfigError,
    MismatchError,
    TrainingError,
)
from fledge.contracts.train_settings import TrainSettings
from fledge.testing import save_tiny_target
from fledge.training.faults import describe_samples, explained_memory, stop_not_finite
from tests.unit.training.train_support import CPU, SHORT, opened, run, with_held_out, with_loss


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_memory_that_runs_out_says_what_to_lower_and_to_what(error: Exception) -> None:
    settings = with_held_out(SHORT, decode_prompts=8)
    with pytest.raises(CapacityError) as caught, explained(settings, longest=40):
        raise error
    message = str(caught.value)
    assert message.startswith("cpu ran out of memory at step 3; lower train.micro_tokens from 96")
    assert "--set train.micro_tokens=48" in message
    assert "train.loss.steps from 3 to 1" in message
    assert "train.held_out.decode_prompts from 8 to 4" in message


def explained(settings: TrainSettings, *, longest: int) -> AbstractContextManager[None]:
    return explained_memory(settings, CPU, "at step 3", longest=longest)


def test_the_lower_size_still_divides_a_step() -> None:
    settings = replace(SHORT, micro_tokens=99, batch_tokens=297)
    with pytest.raises(CapacityError, match="from 99 to 33 "), explained(settings, longest=30):
        raise MemoryError


def test_a_micro_batch_is_not_made_smaller_than_its_samples() -> None:
    settings = with_loss(SHORT, steps=1)
    message = r"; tokenize with tokenize.max_tokens = 30 \(the longest sample has 60 tokens\)"
    with pytest.raises(CapacityError, match=message), explained(settings, longest=60):
        raise MemoryError


def test_what_is_kept_may_be_let_go() -> None:
    settings = replace(SHORT, keep_readings=True)
    message = r"or set train\.keep_readings to false"
    with pytest.raises(CapacityError, match=message), explained(settings, longest=20):
        raise MemoryError


def test_other_failures_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explained(SHORT, longest=40):
        raise RuntimeError("shapes do not match")


def test_a_gradient_that_is_no_number_is_named_too() -> None:
    message = r"loss of step 4 is 2.5, but its gradient's norm is inf. Kept. Lower train.optimizer"
    with pytest.raises(TrainingError, match=message):
        stop_not_finite(4, loss=2.5, norm=math.inf, bad_batches=[], kept="Kept.")


def test_samples_are_named_and_many_are_counted() -> None:
    assert describe_samples([7]) == "sample 7"
    assert describe_samples([3, 5]) == "samples 3, 5"
    assert describe_samples(list(range(20))).endswith("10, 11 and 8 more")


def test_features_of_other_layers_are_refused(tiny_target: Path, tiny_features: Path) -> None:
    asked = CaptureSettings(layers=(0, 1, 2))
    with pytest.raises(
        MismatchError, match=r"completed layers \[2, 2, 1\], and the recipe asks for \[0, 1, 2\]"
    ):
        opened(tiny_target, features=tiny_features, capture=asked)
    opened(tiny_target, features=tiny_features, capture=CaptureSettings())
    opened(tiny_target, features=tiny_features, capture=CaptureSettings(layers="auto"))


def test_features_of_another_target_are_refused(tmp_path: Path, tiny_features: Path) -> None:
    other = save_tiny_target(tmp_path / "other", seed=9)
    with pytest.raises(MismatchError, match=r"made for tiny with weights \w+, and .* has weights"):
        opened(other, features=tiny_features)


def test_features_of_another_tokenizer_are_refused(tmp_path: Path, tiny_features: Path) -> None:
    other = save_tiny_target(tmp_path / "other", has_chat_template=False)
    with pytest.raises(MismatchError, match=r"tiny with tokenizer \w{12}, and .* has tokenizer \w"):
        opened(other, features=tiny_features)


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path, tiny_corpus: Path) -> None:
    other = save_tiny_target(tmp_path / "tiny", has_chat_template=False)
    with pytest.raises(MismatchError, match=r"with tokenizer \w{12}, and tiny has tokenizer \w"):
        opened(other, corpus=tiny_corpus)


def test_a_corpus_that_was_changed_is_refused(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path
) -> None:
    changed = shutil.copytree(tiny_corpus, tmp_path / "corpus")
    path = changed / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"shard-00001\.safetensors was changed since it was"):
        run(tiny_target, tmp_path / "run", corpus=changed)


def test_layers_are_not_searched_while_training(tiny_target: Path, tiny_corpus: Path) -> None:
    with pytest.raises(ConfigError, match="capture.layers is auto, which is decided by `fledge"):
        opened(tiny_target, corpus=tiny_corpus, capture=CaptureSettings(layers="auto"))


def test_one_kind_of_input_is_wanted(
    tiny_target: Path, tiny_corpus: Path, tiny_features: Path
) -> None:
    with pytest.raises(ConfigError, match="one of the two"):
        opened(tiny_target)
    with pytest.raises(ConfigError, match="one of the two"):
        opened(tiny_target, corpus=tiny_corpus, features=tiny_features)
