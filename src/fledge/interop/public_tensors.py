"""A head's tensors under the names and in the types that public checkpoints use."""

from torch import Tensor

from fledge.models.head import Eagle3Head
from fledge.models.head_vocabulary import vocabulary_tensors

EMBEDDING = "embed_tokens.weight"
_OUR_LAYER = "midlayer."


def public_tensors(head: Eagle3Head, *, layer: str = _OUR_LAYER) -> dict[str, Tensor]:
    """Every tensor of a head by its public name; `layer` is what its layer is called there."""
    tensors = {
        name.replace(_OUR_LAYER, layer, 1) if name.startswith(_OUR_LAYER) else name: tensor
        for name, tensor in head.state_dict().items()
    }
    tensors |= vocabulary_tensors(head.draft_to_target_V, head.config.vocab_size)
    if head.own_embedding is not None:
        tensors[EMBEDDING] = head.own_embedding
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
