"""One entry for each format: what is refused, what is written, how it is read back and served."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.dialects import Dialect, HeadPrecision
from fledge.contracts.progress import Progress
from fledge.contracts.tuned_settings import TunedSettings
from fledge.interop.eagle_export import check_eagle, write_eagle
from fledge.interop.eagle_reader import read_as_eagle
from fledge.interop.engine_view import EngineView
from fledge.interop.gguf_export import check_gguf, write_gguf
from fledge.interop.gguf_reader import read_as_llamacpp
from fledge.interop.openvino_export import check_openvino, write_openvino
from fledge.interop.openvino_reader import read_as_openvino
from fledge.interop.serve_commands import (
    eagle_command,
    llamacpp_command,
    openvino_command,
    sglang_command,
    vllm_command,
)
from fledge.interop.sglang_export import check_sglang, write_sglang
from fledge.interop.sglang_reader import read_as_sglang
from fledge.interop.speculators_export import check_speculators, write_speculators
from fledge.interop.target_facts import TargetFacts
from fledge.interop.vllm_export import check_vllm, write_vllm
from fledge.interop.vllm_reader import read_as_vllm
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """What writers may need beside the head."""

    target: TargetFacts | None
    tuned: TunedSettings | None
    progress: Progress | None
    precision: HeadPrecision | None = None

    @property
    def needed_target(self) -> TargetFacts:
        return needed(self.target)


def needed(target: TargetFacts | None) -> TargetFacts:
    """The target of a format whose check refuses to go on without one."""
    assert target is not None
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How one engine's format is checked, written, read back and served."""

    check: Callable[[Eagle3Head, TargetFacts | None], None]
    write: Callable[[Eagle3Head, Path, ExportJob], None]
    read: Callable[[Path, TargetFacts | None, HeadConfig], EngineView]
    command: Callable[[str | None, str, TunedSettings | None, HeadConfig], str]


FORMATS: dict[Dialect, Format] = {
    "vllm": Format(
        check=check_vllm,
        write=lambda head, place, job: write_vllm(head, place, job.target),
        read=lambda place, target, config: read_as_vllm(place),
        command=vllm_command,
    ),
    "sglang": Format(
        check=check_sglang,
        write=lambda head, place, job: write_sglang(head, place, job.target),
        read=lambda place, target, config: read_as_sglang(place, target),
        command=sglang_command,
    ),
    "speculators": Format(
        check=check_speculators,
        write=lambda head, place, job: write_speculators(head, place, job.target, job.tuned),
        read=lambda place, target, config: read_as_vllm(place),
        command=vllm_command,
    ),
    "eagle": Format(
        check=check_eagle,
        write=lambda head, place, job: write_eagle(head, place, job.target),
        read=lambda place, target, config: read_as_eagle(place),
        command=eagle_command,
    ),
    "gguf": Format(
        check=check_gguf,
        write=lambda head, place, job: write_gguf(
            head, place, job.needed_target, precision=job.precision, progress=job.progress
        ),
        read=lambda place, target, config: read_as_llamacpp(place, config.rope_scaling),
        command=llamacpp_command,
    ),
    "openvino": Format(
        check=check_openvino,
        write=lambda head, place, job: write_openvino(head, place, job.needed_target),
        read=lambda place, target, config: read_as_openvino(place, needed(target)),
        command=openvino_command,
    ),
}
