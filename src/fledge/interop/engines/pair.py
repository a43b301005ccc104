"""A target and a head as an engine reads them; exports are kept, so the second start is quick."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fledge import __version__
from fledge.contracts.dialects import Dialect, HeadPrecision
from fledge.contracts.outside_engines import OutsideEngine
from fledge.contracts.progress import Progress, SilentProgress
from fledge.interop.export import export_head
from fledge.interop.gguf_export import HEAD_FILE, TARGET_FILE, require_convertible
from fledge.interop.gguf_target import write_target
from fledge.interop.target_facts import TargetFacts, read_target_facts
from fledge.models.head_config import HeadConfig
from fledge.models.head_files import load_head
from fledge.models.resolve import copy_gguf, is_made_of_gguf
from fledge.models.target_loading import load_config
from fledge.models.weights_identity import weights_identity
from fledge.store.cache import CacheLayout, default_cache_dir
from fledge.store.cache_lock import hold_lock
from fledge.store.cache_publish import publish_directory

_DIALECTS: dict[OutsideEngine, Dialect] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "gguf"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePair:
    """What an engine is pointed at."""

    target: Path
    """A directory in Hugging Face format, or a GGUF file."""

    head: Path | None
    head_config: HeadConfig | None
    directory: Path
    """The target in Hugging Face format, for its tokenizer."""

    context_len: int


def prepare_pair(
    engine: OutsideEngine, target: str, head: Path | None, *, progress: Progress | None = None
) -> EnginePair:
    """Find the target and export the head, unless that was done before."""
    shown = progress or SilentProgress()
    facts = read_target_facts(target, progress=shown)
    config = load_head(head).config if head is not None else None
    place: Path | None = None
    if head is not None or engine == "llamacpp":
        place = _exported(_DIALECTS[engine], facts, head, shown)
    if engine == "llamacpp":
        assert place is not None
        given = Path(target).expanduser()
        target_place = given if given.is_file() else place / TARGET_FILE
        head_place = place / HEAD_FILE if head is not None else None
    else:
        target_place, head_place = facts.directory, place
    context_len = load_config(facts.directory).get_text_config().max_position_embeddings
    return EnginePair(
        target=target_place.absolute(),
        head=head_place,
        head_config=config,
        directory=facts.directory,
        context_len=int(context_len),
    )


def _exported(dialect: Dialect, facts: TargetFacts, head: Path | None, progress: Progress) -> Path:
    """The directory of an export: made once for these weights by this version of fledge."""
    layout = CacheLayout(default_cache_dir())
    weights = [weights_identity(place) for place in (facts.directory, head) if place is not None]
    configs = [(place / "config.json").read_bytes() for place in (facts.directory, head) if place]
    precision = _precision(facts) if dialect == "gguf" else None
    made_of = (__version__, dialect, precision, weights, configs)
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()
    key = f"{dialect}-{digest[:16]}"
    place = layout.export(key)
    with hold_lock(layout.lock(key), what=f"an export for {dialect}", progress=progress):
        if place.is_dir():
            return place
        if head is not None:
            export_head(
                head, place, dialect, target=facts.name, precision=precision, progress=progress
            )
        else:
            with publish_directory(place) as staging:
                _write_target(facts, staging / TARGET_FILE, progress)
    return place


def _precision(facts: TargetFacts) -> HeadPrecision | None:
    """Beside a target that comes as a GGUF file, rounded already as a rule, the head is too."""
    is_gguf = Path(facts.name).expanduser().is_file() or is_made_of_gguf(facts.name)
    return "q8_0" if is_gguf else None


def _write_target(facts: TargetFacts, file: Path, progress: Progress) -> None:
    """A target for llama.cpp without a head: copied where it is a GGUF file, else written."""
    is_given = Path(facts.name).expanduser().is_file()
    if not is_given and not copy_gguf(facts.name, file, progress=progress):
        require_convertible(facts)
        write_target(facts, file)
