"""What the target thinks where the loss looks, without ever holding all logits.

Legend: T tokens, R rows with a label, P rows at once, D hidden size, V vocabulary, C draft
vocabulary, K of it kept.
"""

import torch
from torch import Tensor

from fledge.models.target_reading import Readout
from fledge.ops.micro_batch import TargetRows
from fledge.ops.vocab_share import weigh_part

_LOGITS_AT_ONCE = 1 << 27


@torch.no_grad()
def describe_rows(
    final_TD: Tensor,
    label_rows_R: Tensor,
    readout: Readout,
    draft_ids_C: Tensor,
    *,
    top_k: int | None = None,
    temperature: float = 1.0,
) -> TargetRows:
    """The target at some rows: its choice, the draft vocabulary's share, and its distribution.

    The distribution is the final hidden state, or with `top_k` the most probable tokens of the
    draft vocabulary and their log-probabilities within it. The share, and these, are those at the
    temperature.
    """
    final_RD = final_TD[label_rows_R]
    vocab_size = readout.weight_VD.shape[0]
    is_draft_V = torch.zeros(vocab_size, dtype=torch.bool, device=final_TD.device)
    # Assigning a Python value through an index would wait for the device.
    is_draft_V.index_fill_(0, draft_ids_C, True)
    greedy, log_mass, top_ids, top_logprobs = [], [], [], []
    for part_PD in torch.split(final_RD, max(1, _LOGITS_AT_ONCE // vocab_size)):
        logits_PV = readout.logits(part_PD)
        share = weigh_part(logits_PV, is_draft_V, temperature=temperature)
        greedy.append(share.greedy_P)
        log_mass.append(share.log_share_P)
        if top_k is not None:
            draft_PC = logits_PV.index_select(1, draft_ids_C)
            best_PK, ids_PK = draft_PC.topk(min(top_k, draft_PC.shape[1]), dim=-1)
            top_ids.append(ids_PK)
            top_logprobs.append(best_PK.float() / temperature - share.log_part_P[:, None])
    return TargetRows(
        rows_R=label_rows_R,
        greedy_R=torch.cat(greedy),
        log_mass_R=torch.cat(log_mass),
        final_RD=final_RD if top_k is None else None,
        top_ids_RC=torch.cat(top_ids) if top_k is not None else None,
        top_logprobs_RC=torch.cat(top_logprobs) if top_k is not None else None,
    )
