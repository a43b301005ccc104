"""Writes tiny heads with the speculators library, and the logits of its own forward pass.

    ENV/bin/python tools/make_speculators_fixtures.py OUT

ENV is an environment of its own with speculators 0.9.0 (torchvision removed again: it comes built
for CUDA). tests/fixtures/speculators holds what this wrote; a slow test makes it anew.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

HIDDEN, VOCAB, DRAFT_VOCAB, NUM_TOKENS, NUM_STEPS = 8, 40, 24, 7, 3
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
HEADS: dict[str, dict[str, Any]] = {
    "llama": {"layer": LlamaConfig(**LAYER, rms_norm_eps=1e-5), "norm_before_residual": False},
    "llama-normed": {
        "layer": LlamaConfig(
            **LAYER,
            attention_bias=True,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        ),
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6, 7],
    },
    "qwen3": {
        "layer": Qwen3Config(
            **LAYER,
            sliding_window=4,
            use_sliding_window=True,
            layer_types=["sliding_attention"],
        ),
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
    },
}


def make_head(name: str, options: dict[str, Any]) -> Eagle3DraftModel:
    options = dict(options)
    layer = options.pop("layer")
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )
    head = Eagle3DraftModel(config)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for parameter in head.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * drawn if parameter.ndim == 1 else 0.5 * drawn)
    chosen = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    members = torch.zeros(VOCAB, dtype=torch.bool)
    members[chosen] = True
    head.load_vocab_mappings(members, chosen - torch.arange(DRAFT_VOCAB))
    return head.eval()


@torch.no_grad()
def run(head: Eagle3DraftModel) -> dict[str, torch.Tensor]:
    """Inputs of the library's forward pass, and the logits of each of its steps."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, NUM_TOKENS, head.fc.in_features, generator=generator)
    token_ids = torch.randint(0, VOCAB, (1, NUM_TOKENS), generator=generator)
    logits: list[torch.Tensor] = []
    hook = head.lm_head.register_forward_hook(lambda module, args, out: logits.append(out[0]))
    document = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
    head(features, token_ids, document_ids=document, ttt_steps=NUM_STEPS)
    hook.remove()
    return {"features": features[0], "token_ids": token_ids[0], "logits": torch.stack(logits)}


def main() -> None:
    out = Path(sys.argv[1])
    for name, options in HEADS.items():
        head = make_head(name, options)
        head.save_pretrained(out / name)
        # The library puts its own source beside the config; nobody needs it to read the head.
        (out / name / "config.py").unlink(missing_ok=True)
        expected = {key: value.contiguous() for key, value in run(head).items()}
        save_file(expected, out / name / "expected.safetensors")


if __name__ == "__main__":
    main()
