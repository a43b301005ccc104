"""What the target thinks where the loss looks, without ever holding all logits.

Legend: T tokens, R rows with a label, P rows at once, D hidden size, V vocabulary, C draft
vocabulary, K of it kept.
"""

import torch
from torch import Tensor

from fledge.models.target_reading import Readout
from fledge.ops.micro_batch import TargetRows

_LOGITS_AT_ONCE = 1 << 27


@torch.no_grad()
def describe_rows(
    final_TD: Tensor,
    label_rows_R: Tensor,
    readout: Readout,
    draft_ids_C: Tensor,
    *,
    top_k: int | None = None,
) -> TargetRows:
    """The target at some rows: its choice, the draft vocabulary's share, and its distribution.

    The distribution is the final hidden state, or with `top_k` the most probable tokens of the
    draft vocabulary and their log-probabilities within it.
    """
    final_RD = final_TD[label_rows_R]
    rows_at_once = max(1, _LOGITS_AT_ONCE // readout.weight_VD.shape[0])
    greedy, log_mass, top_ids, top_logprobs = [], [], [], []
    for part_PD in torch.split(final_RD, rows_at_once):
        logits_PV = readout.logits(part_PD)
        greedy.append(logits_PV.argmax(dim=-1))
        # Over the full vocabulary, so that their sum is the share of the draft vocabulary.
        draft_PC = torch.log_softmax(logits_PV, dim=-1, dtype=torch.float32)[:, draft_ids_C]
        log_mass.append(draft_PC.logsumexp(dim=-1))
        if top_k is not None:
            logprobs_PK, ids_PK = draft_PC.topk(min(top_k, draft_PC.shape[1]), dim=-1)
            top_ids.append(ids_PK)
            top_logprobs.append(logprobs_PK - log_mass[-1][:, None])
    return TargetRows(
        rows_R=label_rows_R,
        greedy_R=torch.cat(greedy),
        log_mass_R=torch.cat(log_mass),
        final_RD=final_RD if top_k is None else None,
        top_ids_RC=torch.cat(top_ids) if top_k is not None else None,
        top_logprobs_RC=torch.cat(top_logprobs) if top_k is not None else None,
    )
