"""GGUF file to Hugging Face directory.

The weights are stored in float32 exactly as dequantised: the directory is the quantised model, and
a run casts it to its own dtype when it loads it. Nothing is filled in quietly: a tensor that the
architecture needs and the file lacks is an error.
"""

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

from fledge.contracts.errors import ArtifactError, FledgeError
from fledge.contracts.progress import Progress
from fledge.models.gguf_dequantise import fast_dequantising
from fledge.models.gguf_header import GgufHeader, read_gguf_header
from fledge.models.gguf_slim import is_slimmable, write_slim_copy
from fledge.models.gguf_tokenizer import build_tokenizer
from fledge.models.hf_directory import save_model
from fledge.models.quiet import quiet_transformers
from fledge.store.capacity import FULL_ERRNOS, require_memory

_NUM_STEPS = 4
_ROPE_FACTORS = "rope_freqs.weight"


def convert_gguf(
    source: Path, directory: Path, *, progress: Progress, extra_eos_ids: tuple[int, ...] = ()
) -> None:
    """Write the model and tokenizer of a GGUF file into an existing, empty directory."""
    header = read_gguf_header(source)
    require_memory(header.float32_bytes, f"dequantising {source.name}")
    if _ROPE_FACTORS in header.tensor_names:
        progress.note(
            f"{source.name} holds rope scaling factors that cannot be carried over; beyond the "
            "context length of its first training the model will differ from the original"
        )
    try:
        with quiet_transformers(), fast_dequantising():
            _convert(source, directory, header, extra_eos_ids, progress)
    except FledgeError:
        raise
    except Exception as error:
        # transformers reports unreadable files with many types; a full disk is not the file's fault
        if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
            raise
        raise _refusal(source, header, error) from error


def _convert(
    source: Path,
    directory: Path,
    header: GgufHeader,
    extra_eos_ids: tuple[int, ...],
    progress: Progress,
) -> None:
    slim = directory / "slim.gguf"
    opened = slim if is_slimmable(header) else source
    place = {"pretrained_model_name_or_path": opened.parent, "gguf_file": opened.name}
    with progress.task("dequantising to float32", _NUM_STEPS, unit="steps") as task:
        if opened is slim:
            write_slim_copy(source, header, slim)
        config = AutoConfig.from_pretrained(**place)
        task.advance(1)
        model, report = AutoModelForCausalLM.from_pretrained(
            **place,
            config=config,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        slim.unlink(missing_ok=True)
        _require_all_tensors(source, header, report["missing_keys"])
        task.advance(1)
        build_tokenizer(source).save_pretrained(directory)
        task.advance(1)
        # The class may have been given a quantization_config by now; the dense copy has none.
        clean = type(model.config)(**_plain_settings(model.config))
        eos_ids = tuple(dict.fromkeys((*header.token_ids("eos", "eot", "eom"), *extra_eos_ids)))
        save_model(type(model), clean, model.state_dict(), eos_ids, directory)
        task.advance(1)


def _plain_settings(config: transformers.PreTrainedConfig) -> dict[str, object]:
    dropped = {"quantization_config", "_name_or_path", "_model_name_or_path", "model_type"}
    return {name: value for name, value in config.to_dict().items() if name not in dropped}


def _require_all_tensors(source: Path, header: GgufHeader, missing: set[str]) -> None:
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise ArtifactError(
            f"{source} lacks {len(missing)} tensors that a {header.architecture!r} model needs "
            f"({names}, ...). Fetch another file, or give the model's Hugging Face directory."
        )


def _refusal(source: Path, header: GgufHeader, error: Exception) -> ArtifactError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return ArtifactError(
        f"transformers {transformers.__version__} cannot convert {source}, architecture "
        f"{header.architecture!r}: {type(error).__name__}: {reason}. Give the model's Hugging Face "
        "directory or id instead, or install a transformers version that knows this architecture."
    )
