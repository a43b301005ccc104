"""What every engine is asked, and what our own engine answered."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from fledge.contracts.outputs import Completion
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings, TreeSettings
from fledge.engine.engine import Engine
from fledge.interop.engines.installation import InstalledEngine
from fledge.interop.engines.job import EngineAnswers, EngineRun
from fledge.interop.engines.openvino_models import convert_models
from fledge.interop.export import export_head
from fledge.models.target_facts import read_facts

DEPTH = 4
TREE = TreeSettings(depth=DEPTH, width=1, budget=DEPTH)
EOS = 2


@dataclass(frozen=True)
class Case:
    """One head with its target; without a name of taps, those every engine takes by default."""

    name: str
    target: Path
    head: Path
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    has_norms: bool = False
    """Before its taps are fused, or on its residual."""

    def is_for(self, engine: InstalledEngine) -> bool:
        """OpenVINO knows no norms; an export of such a head for it is refused."""
        return engine.name != "openvino" or not self.has_norms

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, draft_depths=True)

    def ask_ours(self) -> list[Completion]:
        settings = EngineSettings(tree=TREE, controller="fixed", copies=False)
        engine = Engine.load(str(self.target), self.head, settings, device="cpu", dtype="float32")
        return engine.generate(self.prompts, self.params)

    def run(self, target: Path, head: Path | None) -> EngineRun:
        return EngineRun(
            target=target,
            head=head,
            tree=TREE,
            prompts=self.prompts,
            params=SamplingParams(max_tokens=self.max_tokens),
            eos_token_ids=(EOS,),
            dtype="float32",
            max_model_len=256,
        )


@dataclass(frozen=True)
class Outcome:
    """The same case in our engine and in another, which also answered without the head."""

    case: Case
    ours: list[Completion]
    theirs: EngineAnswers
    plain: EngineAnswers


def encode(target: Path, texts: list[str]) -> tuple[tuple[int, ...], ...]:
    tokenizer = read_facts(target).tokenizer
    return tuple(tuple(tokenizer.encode_prompt(text)) for text in texts)


def export_for(engine: InstalledEngine, case: Case, place: Path) -> tuple[Path, Path]:
    """Target and head as the engine is pointed at them; OpenVINO's are still to be converted."""
    dialect = {"llamacpp": "gguf"}.get(engine.name, engine.name)
    out = place / case.name
    report = export_head(case.head, out, dialect, target=str(case.target), verify=True)
    if engine.name == "llamacpp":
        return out / "target.gguf", out / "head.gguf"
    if engine.name == "openvino":
        (place / f"{case.name}.sh").write_text(report.serve_command.split(" && ")[-1])
        return place / f"{case.target.parent.name}-ir", out / "head-ir"
    return case.target, out


def convert_for_openvino(engine: InstalledEngine, cases: list[Case], place: Path) -> None:
    """The commands that an export names: optimum-intel's conversion, then the layers' names."""
    pairs = {case.target: place / f"{case.target.parent.name}-ir" for case in cases}
    pairs |= {place / case.name: place / case.name / "head-ir" for case in cases}
    convert_models(engine, pairs)
    for case in cases:
        subprocess.run(["bash", str(place / f"{case.name}.sh")], check=True)
