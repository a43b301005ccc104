"""Heads and micro-batches whose training steps are measured."""

from dataclasses import dataclass

NUM_TAPS = 3


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int

    def flops_per_token(self, num_steps: int) -> int:
        """Of all products but those of attention; every token has a label at every step."""
        size, heads = self.hidden_size, self.num_heads * self.head_dim
        groups = 2 * self.num_kv_heads * self.head_dim
        fuse = NUM_TAPS * size * size
        layer = 2 * size * (heads + groups) + heads * size + 3 * size * self.intermediate_size
        vocabulary = size * self.draft_vocab_size
        # Features get no gradient, and the target's own logits are only read.
        return 2 * (2 * fuse + num_steps * 3 * (layer + vocabulary) + vocabulary)


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    num_tokens: int
    document_len: int
    is_plain: bool = False
    num_steps: int = 7
    prompt_share: float = 0.0
    """Of each document, at its start, without loss."""

    is_captured: bool | None = None
    """None: a pass and AdamW, operation by operation. Otherwise the trainer's own passes and Muon,
    captured or not."""


LLAMA_8B = Shape(4096, 14336, 32, 8, 128, 32000)
SMOLLM2 = Shape(576, 1536, 9, 3, 64, 8192)
SMOLLM2_WIDE = Shape(576, 2304, 9, 3, 64, 16384)
SMOLLM2_SHIPPED = Shape(576, 3072, 9, 3, 64, 16384)
TINY = Shape(32, 48, 4, 2, 8, 64)
CASES: dict[str, list[Case]] = {
    "8b": [
        Case("8b-2048-fast", LLAMA_8B, 2048, 2048),
        Case("8b-2048-twin", LLAMA_8B, 2048, 2048, is_plain=True),
        Case("8b-8192-fast", LLAMA_8B, 8192, 2048),
        Case("8b-8192-twin", LLAMA_8B, 8192, 2048, is_plain=True),
        Case("8b-8192-long-fast", LLAMA_8B, 8192, 8192),
        Case("8b-8192-long-twin", LLAMA_8B, 8192, 8192, is_plain=True),
        Case("8b-32768-fast", LLAMA_8B, 32768, 2048),
        Case("8b-32768-long-fast", LLAMA_8B, 32768, 32768),
    ],
    "smollm2": [
        Case("smollm2-65536-fast", SMOLLM2, 65536, 1024),
        Case("smollm2-16384-fast", SMOLLM2, 16384, 1024),
        Case("smollm2-wide-65536-fast", SMOLLM2_WIDE, 65536, 1024),
        Case("smollm2-prompted-65536-fast", SMOLLM2, 65536, 1024, prompt_share=0.3),
    ],
    "whole-steps": [
        Case(
            f"smollm2-32768-{num_steps}-steps-{'captured' if is_captured else 'launched'}",
            *(SMOLLM2_SHIPPED, 32768, 256),
            num_steps=num_steps,
            prompt_share=0.4,
            is_captured=is_captured,
        )
        for num_steps in (3, 7)
        for is_captured in (False, True)
    ],
    "tiny-whole-steps": [
        Case("tiny-launched", TINY, 300, 100, num_steps=3, is_captured=False),
        Case("tiny-captured", TINY, 300, 100, num_steps=3, is_captured=True),
    ],
    "tiny": [
        Case("tiny-fast", TINY, 300, 100, num_steps=3),
        Case("tiny-twin", TINY, 300, 100, is_plain=True, num_steps=3),
    ],
}
