"""One entry for each format: what is refused, what is written, how it is read back and served."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.dialects import Dialect
from fledge.contracts.tuned_settings import TunedSettings
from fledge.interop.eagle_export import check_eagle, write_eagle
from fledge.interop.eagle_reader import read_as_eagle
from fledge.interop.engine_view import EngineView
from fledge.interop.serve_commands import eagle_command, sglang_command, vllm_command
from fledge.interop.sglang_export import check_sglang, write_sglang
from fledge.interop.sglang_reader import read_as_sglang
from fledge.interop.speculators_export import check_speculators, write_speculators
from fledge.interop.target_facts import TargetFacts
from fledge.interop.vllm_export import check_vllm, write_vllm
from fledge.interop.vllm_reader import read_as_vllm
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig

Write = Callable[[Eagle3Head, Path, TargetFacts | None, TunedSettings | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How one engine's format is checked, written, read back and served."""

    check: Callable[[Eagle3Head, TargetFacts | None], None]
    write: Write
    read: Callable[[Path, TargetFacts | None], EngineView]
    command: Callable[[str | None, str, TunedSettings | None, HeadConfig], str]


FORMATS: dict[Dialect, Format] = {
    "vllm": Format(
        check=check_vllm,
        write=lambda head, place, target, tuned: write_vllm(head, place, target),
        read=lambda place, target: read_as_vllm(place),
        command=vllm_command,
    ),
    "sglang": Format(
        check=check_sglang,
        write=lambda head, place, target, tuned: write_sglang(head, place, target),
        read=read_as_sglang,
        command=sglang_command,
    ),
    "speculators": Format(
        check=check_speculators,
        write=write_speculators,
        read=lambda place, target: read_as_vllm(place),
        command=vllm_command,
    ),
    "eagle": Format(
        check=check_eagle,
        write=lambda head, place, target, tuned: write_eagle(head, place, target),
        read=lambda place, target: read_as_eagle(place),
        command=eagle_command,
    ),
}
