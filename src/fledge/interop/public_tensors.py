"""A head's tensors under the names and in the types that public checkpoints use."""

import torch
from torch import Tensor

from fledge.models.head import Eagle3Head

OFFSETS, MEMBERS, EMBEDDING = "d2t", "t2d", "embed_tokens.weight"
_OUR_LAYER = "midlayer."


def public_tensors(head: Eagle3Head, *, layer: str = _OUR_LAYER) -> dict[str, Tensor]:
    """Every tensor of a head by its public name; `layer` is what its layer is called there."""
    tensors = {
        name.replace(_OUR_LAYER, layer, 1) if name.startswith(_OUR_LAYER) else name: tensor
        for name, tensor in head.state_dict().items()
    }
    tensors |= vocabulary_tensors(head)
    if head.own_embedding is not None:
        tensors[EMBEDDING] = head.own_embedding
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def vocabulary_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """`d2t` as offsets, `t2d` as flags: what every layout but GGUF holds."""
    targets_V = head.draft_to_target_V.cpu()
    members = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    members[targets_V] = True
    offsets_V = targets_V - torch.arange(head.config.draft_vocab_size)
    return {OFFSETS: offsets_V, MEMBERS: members}
