"""What the head is trained on is what serving asks of it: the same logits at every depth.

The engine drafts chains while it answers; the same tokens then go through training-time test as one
document, and every logit that the drafter looked at is compared.
"""

from collections.abc import Sequence as Many
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.engine.draft_plan import DraftPlan
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.sequence import Sequence
from fledge.ops.documents import make_documents
from fledge.ops.micro_batch import MicroBatch, TargetRows
from fledge.ops.tree import TreeBatch
from fledge.testing import tiny_head
from fledge.training.ttt_steps import FastSteps, PlainSteps
from tests.lossless.support import pair, prompts
from tests.parity.reference_head import true_features

DEPTH = 7


class ComparedDrafter(HeadDrafter):
    """Compares the logits of every chain it drafts with those of training-time test."""

    def __init__(self, head: Any, target: Any, settings: EngineSettings, model: Any) -> None:
        super().__init__(head, target, settings)
        self._model, self._target = model, target
        self.compared: list[int] = []

    def draft(self, sequences: Many[Sequence], plan: DraftPlan) -> TreeBatch:
        seen: list[Tensor] = []
        logits = self.head.logits

        def spy(normed_TD: Tensor) -> Tensor:
            seen.append(logits(normed_TD))
            return seen[-1]

        self.head.logits = spy  # type: ignore[method-assign]
        try:
            trees = super().draft(sequences, plan)
        finally:
            del self.head.logits
        (seq,) = sequences
        committed = [*seq.request.prompt_token_ids, *seq.output_ids]
        self._compare(committed, trees.tokens_BN[0, 1:].tolist(), torch.cat(seen))
        self.compared.append(len(seen))
        return trees

    def _compare(self, committed: list[int], drafted: list[int], seen_KV: Tensor) -> None:
        num_steps = seen_KV.shape[0]
        tokens = [*committed, *drafted[: num_steps - 1]]
        true_TF = true_features(self._model, committed[:-1], self.taps)
        # Serving has no features of what was only drafted; training must not look at them either.
        unknown_TF = torch.full((len(tokens) - len(true_TF), true_TF.shape[1]), 1e4)
        nothing = torch.empty(0, dtype=torch.long)
        batch = MicroBatch(
            token_ids_T=torch.tensor(tokens),
            loss_mask_T=torch.ones(len(tokens), dtype=torch.bool),
            documents=make_documents([len(tokens)], torch.device("cpu")),
            features_TF=torch.cat([true_TF, unknown_TF]),
            targets=TargetRows(nothing, nothing, nothing),
            sample_numbers=(0,),
        )
        index = len(committed) - 2
        for steps in (PlainSteps(self.head), FastSteps(self.head, is_compiled=False)):
            normed = steps(batch, None, batch.features_TF, self._embedding, num_steps)
            found_KV = self.head.lm_head(torch.stack([one[index] for one in normed]))
            torch.testing.assert_close(found_KV, seen_KV, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("llama", {}),
        ("gemma3-hybrid", {"fc_norm": True, "norm_output": True}),
        ("llama", {"norm_before_residual": True, "norm_before_fc": True, "attention_bias": True}),
        ("llama", {"sliding_window": 3}),
        ("llama", {"num_heads": 8, "num_kv_heads": 4}),
        ("qwen3-moe", {"sliding_window": 12, "rope_theta": 500.0}),
    ],
    ids=str,
)
def test_training_asks_what_serving_asks(architecture: str, flags: dict[str, Any]) -> None:
    model, target = pair(architecture)
    head = tiny_head(target, **flags)
    settings = EngineSettings(tree=TreeSettings(depth=DEPTH, width=1, budget=DEPTH), max_requests=1)
    drafter = ComparedDrafter(head, target, settings, model)
    engine = Engine(target, settings=settings, drafter=drafter)
    with torch.no_grad():
        engine.generate(prompts(2), SamplingParams(max_tokens=5))
    assert drafter.compared.count(DEPTH) >= 4
