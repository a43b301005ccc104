"""README.md beside exported weights: what this is, and how to serve it."""

from fledge import __version__
from fledge.interop.target_facts import TargetFacts
from fledge.models.head import Eagle3Head

_ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "speculators": "vLLM and the speculators library",
    "eagle": "SafeAILab's EAGLE",
    "gguf": "llama.cpp",
    "openvino": "OpenVINO GenAI",
}


def readme_text(
    head: Eagle3Head,
    target: TargetFacts | None,
    to: str,
    *,
    commands: tuple[str, ...],
    notes: tuple[str, ...],
    precision: str,
) -> str:
    config = head.config
    made_for = (
        f"a target with hidden size {config.target_hidden_size} and {config.vocab_size} tokens"
        if target is None
        else f"{target.name} ({target.num_layers} layers, {config.vocab_size} tokens)"
    )
    layers = "2, n//2 and n-3" if config.taps is None else ", ".join(map(str, config.taps))
    facts = (
        ("made for", made_for),
        ("target layers read", f"{layers} (completed layers; 0 is the embedding)"),
        ("draft vocabulary", f"{config.draft_vocab_size} tokens"),
        ("precision", precision),
        ("written by", f"fledge {__version__}"),
    )
    lines = [f"# EAGLE-3 draft head for {_ENGINES[to]}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts]
    lines += ["", "Serve the target with it:", "", "```sh", *commands, "```", ""]
    lines += [f"- {note}" for note in notes]
    lines += [
        "- The head only proposes tokens; the target checks each of them. A head that does not fit "
        "makes answers slower, never different.",
        "",
    ]
    return "\n".join(lines)
