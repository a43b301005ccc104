"""A tiny target that writes letters and spaces, and sometimes ends: something to sample from."""

import torch

from fledge.engine.engine import Engine
from fledge.models.tokenizer import TargetTokenizer
from fledge.testing import target_of, tiny_model, tiny_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def writing_engine(
    *, has_chat_template: bool = True, template: str | None = None, context_len: int = 512
) -> Engine:
    """An engine over a random network that is bent to write lower-case words."""
    inner = tiny_tokenizer(has_chat_template=has_chat_template)
    if template is not None:
        inner.chat_template = template
    model = tiny_model("llama", vocab_size=len(inner), max_position_embeddings=context_len)
    with torch.no_grad():
        # One direction of the residual stream is the same for every token; the output layer
        # reads from it how welcome a token is.
        model.get_input_embeddings().weight[:, 0] = 10.0
        output = model.get_output_embeddings().weight
        output *= 0.2
        output[:, 0] = -30.0
        for letter in LETTERS:
            output[inner.convert_tokens_to_ids(letter), 0] = 0.0
        output[inner.convert_tokens_to_ids("Ġ"), 0] = 0.5
        output[inner.eos_token_id, 0] = 0.05
    return Engine(target_of(model, TargetTokenizer(inner)))
