"""The command that serves an exported head, with our settings in the engine's own counting.

fledge counts drafted nodes without the root. vLLM and llama.cpp count the drafts of a chain, also
without it; SGLang's and EAGLE's number of draft tokens includes the root, and EAGLE's depth is one
less than ours.
"""

import json
import shlex
from collections.abc import Mapping

from fledge.contracts.settings import TreeSettings
from fledge.contracts.tuned_settings import TunedSettings
from fledge.models.head_config import HeadConfig

TARGET_PLACE = "TARGET"
"""Stands in commands where no target was named."""

_DEFAULT_CHAIN = 3


def chain_of(tuned: TunedSettings | None) -> int:
    """Drafted tokens of a chain, root not counted."""
    return _DEFAULT_CHAIN if tuned is None else tuned.chain


def tree_of(tuned: TunedSettings | None) -> TreeSettings:
    if tuned is not None:
        return tuned.tree
    return TreeSettings(depth=_DEFAULT_CHAIN, width=1, budget=_DEFAULT_CHAIN)


def vllm_command(
    target: str | None, head: str, tuned: TunedSettings | None, config: HeadConfig
) -> str:
    """vLLM drafts chains only: the tuned chain, or the depth of the tuned tree."""
    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": chain_of(tuned)}
    words = ["vllm", "serve", target or TARGET_PLACE]
    return shlex.join([*words, "--speculative-config", json.dumps(speculative)])


def sglang_command(
    target: str | None, head: str, tuned: TunedSettings | None, config: HeadConfig
) -> str:
    """SGLang drafts trees; its steps are our depth, its draft tokens our nodes and the root."""
    tree = tree_of(tuned)
    options = {
        "--model-path": target or TARGET_PLACE,
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": head,
        "--speculative-num-steps": tree.depth,
        "--speculative-eagle-topk": tree.width,
        "--speculative-num-draft-tokens": sglang_draft_tokens(tree),
    }
    if config.sliding_window is not None:
        # SGLang does not count the token itself, we do.
        options["--speculative-draft-window-size"] = config.sliding_window - 1
    return _join(["python", "-m", "sglang.launch_server"], options)


def sglang_draft_tokens(tree: TreeSettings) -> int:
    """Nodes of a tree with its root; a chain has one for each step."""
    return (tree.depth if tree.width == 1 else tree.num_nodes) + 1


def eagle_command(
    target: str | None, head: str, tuned: TunedSettings | None, config: HeadConfig
) -> str:
    options = {
        "--base-model-path": target or TARGET_PLACE,
        "--ea-model-path": head,
        "--total-token": tree_of(tuned).num_nodes + 1,
    }
    return _join(["python", "-m", "eagle.application.webui"], options)


def llamacpp_command(
    target: str | None, head: str, tuned: TunedSettings | None, config: HeadConfig
) -> str:
    """llama.cpp drafts chains; `target` is a GGUF file, else it lies beside the head's file."""
    is_file = target is not None and target.lower().endswith(".gguf")
    options = {
        "--model": target if is_file else f"{head}/target.gguf",
        "--spec-type": "draft-eagle3",
        "--model-draft": f"{head}/head.gguf",
        "--spec-draft-n-max": chain_of(tuned),
    }
    return _join(["llama-server"], options)


def openvino_command(
    target: str | None, head: str, tuned: TunedSettings | None, config: HeadConfig
) -> str:
    """Turns target and head into OpenVINO's format, beside the head; Python serves them.

    The last step names the layers in the converted head: optimum-intel forgets them, and OpenVINO's
    own default is one layer later than the field's.
    """
    convert = ["optimum-cli", "export", "openvino", "--task", "text-generation-with-past"]
    pairs = ((target or TARGET_PLACE, "target-ir"), (head, "head-ir"))
    steps = [
        shlex.join([*convert, "--trust-remote-code", "--model", model, f"{head}/{name}"])
        for model, name in pairs
    ]
    layers = " ".join(str(tap - 1) for tap in config.taps or ())
    named = f's|<eagle3_mode [^>]*>|&<hidden_layers_list value="{layers}" />|'
    steps.append(shlex.join(["sed", "-i", named, f"{head}/head-ir/openvino_model.xml"]))
    return " && ".join(steps)


def _join(words: list[str], options: Mapping[str, object]) -> str:
    return shlex.join([*words, *(str(word) for pair in options.items() for word in pair)])


def setting_notes(to: str, tuned: TunedSettings | None) -> tuple[str, ...]:
    """How our settings were translated, and what could not be."""
    if tuned is None:
        return (f"no tuned settings were given: a chain of {_DEFAULT_CHAIN} drafted tokens.",)
    tree, chain = tuned.tree, tuned.chain
    shape = f"depth {tree.depth}, width {tree.width}, {tree.num_nodes} drafted nodes"
    if to in ("vllm", "speculators", "gguf"):
        return (f"this engine drafts chains only: {chain} drafted tokens, from our {shape}.",)
    if to == "sglang":
        tokens = sglang_draft_tokens(tree)
        return (f"our {shape}; SGLang counts the root too: {tokens} draft tokens.",)
    if to == "eagle":
        return (
            f"our {shape}; EAGLE counts the root in total_token, and depth from 0: pass depth="
            f"{tree.depth - 1}, top_k={tree.width} to EaModel.from_pretrained.",
        )
    return (f"our {shape}; here a chain: num_assistant_tokens={chain}.",)
