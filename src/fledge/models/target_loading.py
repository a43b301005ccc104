"""Reads a Hugging Face directory into a model that runs on our attention, or says why it cannot."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from fledge.contracts.errors import ArtifactError, CapacityError, MismatchError
from fledge.models.attention import ATTENTION_NAME

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


def load_model(directory: Path, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model of a directory, in evaluation mode, on our attention."""
    config = _load_config(directory)
    check_supported(config)
    with _quiet_transformers():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
            )
        except SafetensorError as error:
            raise ArtifactError(
                f"the weights in {directory} are damaged or truncated ({error}); fetch them again."
            ) from error
        except (OSError, ValueError, KeyError) as error:
            raise ArtifactError(
                f"cannot load a causal language model from {directory}: {_first_line(error)}"
            ) from error
    _check_complete(directory, info)
    try:
        return model.to(device).eval()
    except torch.OutOfMemoryError as error:
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        raise CapacityError(
            f"the target needs {num_bytes / 2**30:.1f} GiB on {device}, which does not have them "
            "free; use a smaller target, --dtype bfloat16, or --device cpu."
        ) from error


def check_supported(config: Any) -> None:
    """Refuse architectures whose layers do not all go through attention as we know it."""
    text_config = config.get_text_config()
    name = f"model type {text_config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise MismatchError(f"{name} is an encoder-decoder; fledge drives decoder-only models.")
    unknown = sorted(set(getattr(text_config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if unknown:
        raise MismatchError(
            f"{name} has layers of type {', '.join(unknown)}; fledge supports "
            f"{', '.join(sorted(_KNOWN_LAYER_TYPES))}. Linear-attention and recurrent layers keep "
            "a running state that cannot be rolled back after a rejected draft."
        )
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise MismatchError(
            f"{name} shares keys and values between {text_config.num_kv_shared_layers} layers, "
            "which fledge does not support."
        )
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


def _uses_attention_interface(model_class: Any) -> bool:
    return bool(getattr(model_class, "_supports_attention_backend", False))


def _load_config(directory: Path) -> Any:
    if not (directory / "config.json").is_file():
        raise ArtifactError(f"{directory} has no config.json; it is not a target directory.")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(
            f"cannot read {directory / 'config.json'}: {_first_line(error)}"
        ) from error


def _check_complete(directory: Path, info: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers; that is never what a user wants."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ArtifactError(
            f"{directory} lacks {len(missing)} tensors of the model, among them {missing[0]!r}; "
            "the download is incomplete or belongs to another architecture."
        )
    mismatched = info.get("mismatched_keys") or []
    if mismatched:
        raise ArtifactError(
            f"{directory} holds tensors of other shapes than its config.json says: {mismatched[0]}"
        )


class _quiet_transformers:
    """Silence transformers' bars and advice while it loads; our own messages say what matters."""

    def __enter__(self) -> None:
        self._verbosity = transformers_logging.get_verbosity()
        self._had_bar = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *exc_info: object) -> None:
        transformers_logging.set_verbosity(self._verbosity)
        if self._had_bar:
            transformers_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
