"""What goes wrong in training, in words that say what to do."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fledge.contracts.errors import CapacityError, ConfigError, MismatchError, TrainingError
from fledge.contracts.train_settings import TrainSettings
from fledge.ops.micro_batch import MicroBatch

_CPU_FAILURES = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_NAMED_SAMPLES = 12
_LEAST_MICRO_TOKENS = 16


@contextmanager
def explained_memory(
    settings: TrainSettings, device: torch.device, what: str, *, longest: int
) -> Iterator[None]:
    """Turn an allocation that failed into a sentence that names what to lower, and to what.

    `longest` is the length of the longest sample, which a micro-batch has to hold.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CapacityError(_memory_text(settings, device, what, longest)) from error
    except RuntimeError as error:
        if not any(text in str(error) for text in _CPU_FAILURES):
            raise
        raise CapacityError(_memory_text(settings, device, what, longest)) from error


def _memory_text(settings: TrainSettings, device: torch.device, what: str, longest: int) -> str:
    micro, steps = settings.micro_tokens, settings.loss.steps
    prompts = settings.held_out.decode_prompts
    sizes = range(micro // 2, max(_LEAST_MICRO_TOKENS, longest) - 1, -1)
    lower = next((size for size in sizes if settings.batch_tokens % size == 0), None)
    remedies = []
    if lower is not None:
        remedies.append(
            f"lower train.micro_tokens from {micro} to {lower} (--set train.micro_tokens={lower}; "
            "the steps keep their size)"
        )
    else:
        remedies.append(
            f"tokenize with tokenize.max_tokens = {longest // 2} (the longest sample has {longest} "
            f"tokens) and lower train.micro_tokens from {micro}"
        )
    if settings.keep_readings:
        remedies.append(
            "set train.keep_readings to false, or train.kept_format to one of fewer bits"
        )
    if steps > 1:
        remedies.append(f"train.loss.steps from {steps} to {steps // 2}")
    if prompts > 1:
        remedies.append(f"train.held_out.decode_prompts from {prompts} to {prompts // 2}")
    return (
        f"{device} ran out of memory {what}; {', or '.join(remedies)}. A run that has no "
        "checkpoint yet may change its settings in place; otherwise choose another output "
        "directory."
    )


def describe_samples(numbers: Sequence[int]) -> str:
    """`samples 3, 5 and 9`; only the first of many."""
    shown = [f"{number}" for number in numbers[:_NAMED_SAMPLES]]
    rest = len(numbers) - len(shown)
    listed = ", ".join(shown) + (f" and {rest} more" if rest else "")
    return f"sample {listed}" if len(numbers) == 1 else f"samples {listed}"


def stop_not_finite(
    step: int, *, loss: float, norm: float, bad_batches: Sequence[Sequence[int]], kept: str
) -> None:
    """Refuse to go on behind a loss or a gradient that is no number.

    `bad_batches` are corpus numbers of the samples in each micro-batch whose loss is none.
    """
    what = f"the loss of step {step} is {loss}"
    if math.isfinite(loss):
        what = f"the loss of step {step} is {loss:.4g}, but its gradient's norm is {norm}"
    where = ""
    if bad_batches:
        where = f", in a micro-batch of {describe_samples(bad_batches[0])} of the corpus"
    raise TrainingError(
        f"{what}{where}. {kept} Lower train.optimizer.learning_rate or set train.optimizer.clip, "
        "and look at these samples if it happens again at the same place."
    )


def samples_not_finite(batch: MicroBatch) -> list[int]:
    """Corpus numbers of the samples whose features hold infinity or NaN."""
    finite_T = batch.features_TF.isfinite().all(dim=1).cpu()
    starts = batch.documents.starts
    return [
        number
        for place, number in enumerate(batch.sample_numbers)
        if not bool(finite_T[starts[place] : starts[place + 1]].all())
    ]


def refuse_other_layers(where: object, found: Sequence[int], asked: Sequence[int]) -> None:
    """Features hold the layers they hold; a recipe may ask for others."""
    if tuple(found) != tuple(asked):
        raise MismatchError(
            f"{where} holds features of the completed layers {list(found)}, and the recipe asks "
            f"for {list(asked)} (capture.layers); capture them, or train with the recipe that "
            "these were captured with."
        )


def refuse_tempered_tops(temperature: float) -> None:
    """What was left out of a distribution at temperature 1 is missing at any other."""
    if temperature != 1:
        raise ConfigError(
            f"train.loss.target_temperature is {temperature:g}, but the features hold the most "
            "probable tokens at temperature 1 only, and what the others would have at "
            f'{temperature:g} is not known; capture them with capture.target = "hidden", train '
            "with --corpus, or set it to 1."
        )


def refuse_other_vocabulary(asked: int, found: int) -> None:
    """Features are measured against the draft vocabulary that they were captured with."""
    if asked:
        raise ConfigError(
            f"train.head.draft_vocab_size is {asked}, and features are those of a draft vocabulary "
            f"of {found} tokens; leave it at 0, or train with --corpus."
        )


def refuse_other_target(
    where: object, found: Mapping[str, Any], *, target: str, asked: Mapping[str, Any]
) -> None:
    """Token ids and features mean something to one target only."""
    theirs, ours = found.get("tokenizer", {}), asked["tokenizer"]
    if theirs.get("sha256") != ours["sha256"]:
        raise MismatchError(
            f"{where} was made for {found.get('target')} with tokenizer "
            f"{str(theirs.get('sha256'))[:12]}, and {target} has tokenizer {ours['sha256'][:12]}; "
            "give the target that it was made for."
        )
    if found.get("weights") != asked["weights"]:
        raise MismatchError(
            f"{where} was made for {found.get('target')} with weights "
            f"{str(found.get('weights'))[:12]}, and {target} has weights {asked['weights'][:12]}; "
            "give the target that it was made for."
        )
