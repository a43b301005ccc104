"""The command that serves an exported head, with our settings in the engine's own counting.

fledge counts drafted nodes without the root. vLLM and llama.cpp count the drafts of a chain, also
without it; SGLang's number of draft tokens includes the root.
"""

import json
import shlex

from fledge.contracts.settings import TreeSettings
from fledge.contracts.tuned_settings import TunedSettings

TARGET_PLACE = "TARGET"
"""Stands in commands where no target was named."""

_DEFAULT_CHAIN = 3


def vllm_command(target: str | None, head: str, tuned: TunedSettings | None) -> str:
    """vLLM drafts chains only: the tuned chain, or the depth of the tuned tree."""
    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": chain_of(tuned)}
    words = ["vllm", "serve", target or TARGET_PLACE]
    return shlex.join([*words, "--speculative-config", json.dumps(speculative)])


def chain_of(tuned: TunedSettings | None) -> int:
    """Drafted tokens of a chain, root not counted."""
    return _DEFAULT_CHAIN if tuned is None else tuned.chain


def sglang_command(target: str | None, head: str, tuned: TunedSettings | None) -> str:
    """SGLang drafts trees; its steps are our depth, its draft tokens our nodes and the root."""
    tree = TreeSettings(depth=_DEFAULT_CHAIN, width=1, budget=_DEFAULT_CHAIN)
    if tuned is not None:
        tree = tuned.tree
    options = {
        "--model-path": target or TARGET_PLACE,
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": head,
        "--speculative-num-steps": tree.depth,
        "--speculative-eagle-topk": tree.width,
        "--speculative-num-draft-tokens": tree.num_nodes + 1,
    }
    words = ["python", "-m", "sglang.launch_server"]
    return shlex.join([*words, *(str(word) for pair in options.items() for word in pair)])
