"""Training-time test: the head drafts K steps from its own outputs, and is taught at each.

Step k at index t reads the embedding of token t+1+k and the head's own output of step k-1 at the
same index, or the fused feature t at step 0, at position t+1+k of its document: what serving gives
to the token that stands there. `fledge.ops.micro_batch` has the shift, `fledge.ops.draft_attention`
what is seen.

`is_plain` is the twin: every score, every logit. The other path gives the same losses and
gradients.

The weights that learn stay as they are, usually float32; each is cast once per pass to the
precision that products are computed in, inside `forward`, so that gradients arrive at the weights
in their own precision and DDP and FSDP2 can wrap the module. With FSDP2, leave
`cast_forward_inputs` off.

Legend: T tokens, F tapped features, K draft steps, D hidden size, V draft vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from fledge.contracts.errors import ConfigError
from fledge.contracts.train_settings import LossSettings
from fledge.models.head import Eagle3Head
from fledge.models.target_reading import Readout
from fledge.models.turned_rows import TurnedRows
from fledge.ops.chain_weights import ChainWeights
from fledge.ops.micro_batch import MicroBatch
from fledge.ops.soft_target_chunks import soft_target_loss
from fledge.ops.soft_targets import (
    DraftReadout,
    Labels,
    LossRows,
    chain_counts,
    feature_loss,
    find_labels,
    soft_target_loss_plain,
)
from fledge.ops.suffixes import Suffixes, reaching
from fledge.training.faults import refuse_tempered_tops
from fledge.training.step_sums import StepSums, lengthened
from fledge.training.ttt_steps import FastSteps, PlainSteps


class TTTResult(NamedTuple):
    loss: Tensor
    """Scalar, differentiable: sum over steps of decay^k * loss_k / denominator_k."""

    sums: StepSums


def count_labels(
    loss_mask_T: NDArray[np.bool_], lengths: Sequence[int], num_steps: int
) -> NDArray[np.int64]:
    """Positions with a label at each step, from the loss mask of documents end to end.

    What `mean = "labels"` divides by; whether the draft vocabulary has the target's best token does
    not matter, since nobody knows that before the target has run.
    """
    places_T = np.concatenate([np.arange(length) for length in lengths])
    # Row j has a label when token j+1 has loss, and step k reaches it from index j-1-k.
    rows_R = places_T[loss_mask_T[: len(places_T)]] - 1
    counts_K: NDArray[np.int64] = (rows_R > np.arange(num_steps)[:, None]).sum(axis=1)
    return counts_K


class TTTModule(nn.Module):
    """A head in training: what DDP and FSDP2 wrap."""

    def __init__(
        self,
        head: Eagle3Head,
        embedding_VD: Tensor,
        readout: Readout | None,
        loss: LossSettings,
        *,
        compute_dtype: torch.dtype,
        hidden_noise: float = 0.0,
        is_plain: bool = False,
        is_compiled: bool | None = None,
    ) -> None:
        """`readout` may be None where the targets are kept tops of distributions.

        `is_compiled` has torch fuse what lies between products; None does so on CUDA.
        """
        super().__init__()
        self.head = head
        self.loss = loss
        self.compute_dtype = compute_dtype
        self.hidden_noise = hidden_noise
        self.is_plain = is_plain
        device = head.draft_to_target_V.device
        if is_compiled is None:
            is_compiled = device.type == "cuda" and not is_plain
        # Neither parameters nor buffers: nobody may broadcast, shard or save the target's matrices.
        self._embedding_VD = embedding_VD.detach()
        self._readout = None
        if readout is not None:
            self._readout = _at_draft_tokens(
                readout, head, compute_dtype, temperature=loss.target_temperature
            )
        self._draft_of_target = torch.full((head.config.vocab_size,), -1, device=device)
        self._draft_of_target[head.draft_to_target_V] = torch.arange(
            head.config.draft_vocab_size, device=device
        )
        # In a tuple, so that the head's weights have one name in this module.
        self._steps = (PlainSteps(head) if is_plain else FastSteps(head, is_compiled=is_compiled),)

    def forward(
        self,
        batch: MicroBatch,
        denominators_K: Tensor,
        generator: torch.Generator | None = None,
        suffixes: Suffixes | None = None,
    ) -> TTTResult:
        """`denominators_K` are those of the whole optimizer step, over all processes.

        There may be fewer of them than the loss has steps: so many steps are taken. `suffixes` are
        the ends of documents that are worked on, if that was decided already.
        """
        num_steps = len(denominators_K)
        features_TF = batch.features_TF.to(self.compute_dtype)
        if self.hidden_noise and self.training:
            features_TF = add_noise(features_TF, self.hidden_noise, generator)
        cast = {
            f"head.{name}": parameter.to(self.compute_dtype)
            for name, parameter in self.head.named_parameters()
            if not name.startswith("lm_head")
        }
        if suffixes is None and not self.is_plain:
            suffixes = reaching(batch.documents, batch.first_labels, num_steps)
        inputs = (batch, suffixes, features_TF, self._embedding_VD, num_steps)
        normed: list[Tensor] = functional_call(self._steps[0], cast, inputs)
        labels = find_labels(
            batch.targets,
            batch.documents,
            suffixes,
            self._draft_of_target,
            num_steps=num_steps,
            greedy_in_vocab_only=self.loss.greedy_in_vocab_only,
        )
        steps_K = torch.arange(num_steps, device=denominators_K.device)
        weights_K = self.loss.step_decay**steps_K / denominators_K.clamp(min=1)
        rows = self._compare(normed, labels, weights_K)
        loss = rows.loss
        if self.loss.feature_weight:
            self._check_features(batch)
            loss = loss + self.loss.feature_weight * feature_loss(normed, labels, weights_K)
        return TTTResult(loss, lengthened(_sum_up(rows, labels), self.loss.steps))

    def _compare(self, normed: list[Tensor], labels: Labels, weights_K: Tensor) -> LossRows:
        targets, lm_head = labels.targets, self.head.lm_head
        if targets.top_ids_RC is None and (targets.final_RD is None or self._readout is None):
            raise ConfigError(
                "the micro-batch has no top tokens, and its final hidden rows or the target's "
                "output matrix are missing; give TTTModule the target's readout."
            )
        if targets.top_ids_RC is not None:
            refuse_tempered_tops(self.loss.target_temperature)
        if self.loss.draft_temperature != 1:
            # Logits are products with these, so they are divided alike.
            normed = [normed_TD / self.loss.draft_temperature for normed_TD in normed]
        if self.is_plain:
            lm_head_VD = lm_head.weight.to(self.compute_dtype)
        elif isinstance(lm_head, TurnedRows):
            # States are turned instead of rows, which then want no gradient.
            lm_head_VD, turn_DD = lm_head.target_rows_VD, lm_head.turn.to(self.compute_dtype)
            normed = [F.linear(normed_TD, turn_DD) for normed_TD in normed]
        else:
            lm_head_VD = lm_head.weight
        chains = ChainWeights(self.loss.start_share) if self.loss.chain_weights else None
        compare = soft_target_loss_plain if self.is_plain else soft_target_loss
        return compare(
            normed,
            lm_head_VD,
            labels,
            self._readout,
            weights_K,
            self.loss.kind,
            chains=chains,
        )

    def _check_features(self, batch: MicroBatch) -> None:
        final_RD, size = batch.targets.final_RD, self.head.config.hidden_size
        if final_RD is None:
            raise ConfigError(
                f"feature_weight is {self.loss.feature_weight}, but the features hold top tokens "
                "instead of final hidden states; capture them with final rows, or set it to 0."
            )
        if final_RD.shape[1] != size:
            raise ConfigError(
                f"feature_weight is {self.loss.feature_weight}, but the head's hidden size {size} "
                f"is not the target's {final_RD.shape[1]}; set it to 0."
            )


def add_noise(features_TF: Tensor, share: float, generator: torch.Generator | None) -> Tensor:
    """Each feature moved by up to `share` of its own size, uniformly."""
    uniform_TF = torch.rand(
        features_TF.shape, generator=generator, dtype=torch.float32, device=features_TF.device
    )
    return features_TF * (1 + share * (2 * uniform_TF - 1)).to(features_TF.dtype)


def _at_draft_tokens(
    readout: Readout, head: Eagle3Head, dtype: torch.dtype, *, temperature: float
) -> DraftReadout:
    """The target's output rows of the draft vocabulary."""
    ids_V = head.draft_to_target_V.to(readout.weight_VD.device)
    bias_V = None if readout.bias_V is None else readout.bias_V.detach()[ids_V].to(dtype)
    weight_VD = readout.weight_VD.detach()[ids_V].to(dtype)
    return DraftReadout(weight_VD, bias_V, readout.scale, readout.soft_cap, temperature)


def _sum_up(rows: LossRows, labels: Labels) -> StepSums:
    is_asked_RK = labels.is_asked_RK
    chain_K, offered_K = chain_counts(rows.correct_RK, labels)
    return StepSums(
        loss_K=rows.loss_RK.sum(dim=0),
        count_K=is_asked_RK.sum(dim=0),
        correct_K=rows.correct_RK.sum(dim=0),
        chain_K=chain_K,
        offered_K=offered_K,
        accepted_K=rows.accepted_RK.sum(dim=0),
        entropy_K=(rows.entropy_R[:, None] * is_asked_RK).sum(dim=0),
    )
