"""Reads a Hugging Face directory into a model that runs on our attention, or says why it cannot."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from fledge.contracts.errors import ArtifactError, CapacityError, MismatchError
from fledge.models.attention import ATTENTION_NAME
from fledge.models.quiet import first_line, quiet_transformers

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
# They say they use the attention interface, but a sweep over all families found that through it
# they compute something else than by themselves.
_BESIDE_THE_INTERFACE = frozenset({"diffllama", "doge", "hrm_text", "nemotron", "recurrent_gemma"})
# transformers picks their factors by the largest position in the whole pass.
_ROPE_OF_THE_WHOLE_PASS = frozenset({"dynamic", "longrope"})
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MTP_PROJECTION = ".eh_proj."


def load_model(directory: Path, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model of a directory, in evaluation mode, on our attention."""
    with quiet_transformers():
        config = load_config(directory)
        check_supported(config)
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                # Refused below, where the tensor and both shapes can be named.
                ignore_mismatched_sizes=True,
            )
        except SafetensorError as error:
            raise ArtifactError(
                f"the weights in {directory} are damaged or truncated ({error}); fetch them again."
            ) from error
        except Exception as error:  # model code raises what it likes over values it cannot use
            raise ArtifactError(
                f"cannot load a causal language model from {directory}: {first_line(error)}"
            ) from error
    _check_complete(directory, info)
    _check_depth(directory, config.get_text_config().num_hidden_layers, model, info)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    if free is not None and free < num_bytes:
        raise _too_large(num_bytes, device, free)
    try:
        return model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise _too_large(num_bytes, device, free) from error


def _too_large(num_bytes: int, device: torch.device, free: int | None) -> CapacityError:
    has = "which does not have them free" if free is None else f"which has {free / 2**30:.1f} free"
    return CapacityError(
        f"the target needs {num_bytes / 2**30:.1f} GiB on {device}, {has}; use a smaller target, "
        "--dtype bfloat16, or --device cpu."
    )


def check_supported(config: Any) -> None:
    """Refuse architectures whose layers do not all go through attention as we know it."""
    text_config = config.get_text_config()
    name = f"model type {text_config.model_type!r}"
    _check_family(config, name)
    _check_layers(text_config, name)
    _check_rope(text_config, name)
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise MismatchError(
            f"{name} has no causal language model in transformers; fledge needs one."
        ) from None
    if not _uses_attention_interface(model_class):
        raise MismatchError(
            f"{name} does not route its attention through transformers' attention interface "
            "(state-space, recurrent or older model code); fledge cannot drive it."
        )
    _check_sizes(text_config, name)


def _check_family(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise MismatchError(f"{name} is an encoder-decoder; fledge drives decoder-only models.")
    if _is_encoder(type(config)):
        raise MismatchError(
            f"{name} is an encoder with a causal mode; fledge drives decoder-only models."
        )
    if config.get_text_config().model_type in _BESIDE_THE_INTERFACE:
        raise MismatchError(
            f"{name} computes its attention outside transformers' attention interface, so that "
            "its answers would differ from its own; fledge cannot drive it."
        )


def _is_encoder(config_class: type) -> bool:
    """BERT's relatives: they alone declare both switches that make a decoder of an encoder.

    Even with the switches on, several count positions in a way of their own.
    """
    return hasattr(config_class, "is_decoder") and hasattr(config_class, "add_cross_attention")


def _check_layers(text_config: Any, name: str) -> None:
    unknown = sorted(set(getattr(text_config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if unknown:
        raise MismatchError(
            f"{name} has layers of type {', '.join(unknown)}; fledge supports "
            f"{', '.join(sorted(_KNOWN_LAYER_TYPES))}. Linear-attention and recurrent layers keep "
            "a running state that cannot be rolled back after a rejected draft."
        )
    if getattr(text_config, "use_bidirectional_attention", False):
        raise MismatchError(
            f"{name} is set to use_bidirectional_attention; fledge drives models whose tokens see "
            "only what came before them."
        )
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise MismatchError(
            f"{name} shares keys and values between {text_config.num_kv_shared_layers} layers, "
            "which fledge does not support."
        )


def _check_rope(text_config: Any, name: str) -> None:
    for rope_type in _rope_types(text_config):
        if rope_type in _ROPE_OF_THE_WHOLE_PASS:
            raise MismatchError(
                f"{name} uses rope type {rope_type!r}, which rotates every sequence of a batch by "
                "the length of the longest: a request's answer would depend on its neighbours. "
                "Use a target with another rope type (default, linear, llama3 or yarn)."
            )


def _rope_types(text_config: Any) -> Iterable[str]:
    """One type, or one for each type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return [one.get("rope_type", "default") for one in by_layer_type or [parameters]]


def _uses_attention_interface(model_class: Any) -> bool:
    return bool(getattr(model_class, "_supports_attention_backend", False))


def _check_sizes(text_config: Any, name: str) -> None:
    for key in _SIZES:
        value = getattr(text_config, key, None)
        if value is None:
            raise MismatchError(f"{name} has no {key} in its config; fledge needs one.")
        if value < 1:
            raise ArtifactError(
                f"the config.json of this {name} says {key} {value}; it must be 1 or more."
            )


def load_config(directory: Path) -> Any:
    """The config of a target's directory, as transformers reads it."""
    if not (directory / "config.json").is_file():
        raise ArtifactError(f"{directory} has no config.json; it is not a target directory.")
    try:
        # Said outright: otherwise transformers asks at the terminal whether to run code it found.
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # every config class checks its values in its own way
        raise ArtifactError(
            f"cannot read {directory / 'config.json'}: {first_line(error)}"
        ) from error


def _check_complete(directory: Path, info: dict[str, Any]) -> None:
    """transformers fills what does not fit with random numbers; no user ever wants that."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ArtifactError(
            f"{directory} lacks {len(missing)} tensors of the model, among them {missing[0]!r}; "
            "the download is incomplete or belongs to another architecture."
        )
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        key, stored, wanted = mismatched[0]
        raise ArtifactError(
            f"{len(mismatched)} tensors in {directory} have other shapes than its config.json "
            f"implies, among them {key!r}: {list(stored)} instead of {list(wanted)}; the config "
            "or the weights are of another model."
        )


def _check_depth(directory: Path, num_layers: int, model: Any, info: dict[str, Any]) -> None:
    """A config that cuts layers off loads without complaint and answers nonsense."""
    num_stored = 1 + max(_decoder_layers(info["unexpected_keys"], model), default=-1)
    if num_stored > num_layers:
        raise ArtifactError(
            f"{directory} holds weights of {num_stored} layers, but num_hidden_layers in its "
            f"config.json is {num_layers}; the config or the weights are of another model."
        )


def _decoder_layers(keys: Iterable[str], model: Any) -> set[int]:
    """Numbers of whole decoder layers among tensors that the model has no place for.

    Other towers are not meant, nor the multi-token prediction modules that DeepSeek's relatives
    store as layers beyond the last.
    """
    names = set(model.state_dict())
    # Some checkpoints were saved without the head, and so without the prefix of what is below it.
    names |= {name.removeprefix(f"{model.base_model_prefix}.") for name in names}
    extra, predictors = set(), set()
    for key in keys:
        number = _LAYER_NUMBER.search(key)
        if number and _MTP_PROJECTION in key:
            predictors.add(int(number[0]))
        elif number and _LAYER_NUMBER.sub("0", key, count=1) in names:
            extra.add(int(number[0]))
    return extra - predictors
