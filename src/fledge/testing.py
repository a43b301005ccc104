"""Tiny targets, heads and drafters made in the process: for our tests, and for yours.

Random networks with ordinary initialisation give nearly equal logits everywhere, and two correct
computations may then disagree on the argmax. The targets here are drawn wide, so that they do not.
"""

import copy
import random
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from fledge.engine.draft_plan import DraftPlan
from fledge.engine.drafter import MemorylessDrafter
from fledge.engine.sequence import Sequence
from fledge.models.attention import ATTENTION_NAME
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.target import Target
from fledge.models.target_loading import check_supported
from fledge.ops.tree import TreeBatch

EOS_TOKEN_ID = 2
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 8}
_HYBRID = {
    **_WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
# Gemma scales its embeddings up; tied and random, they would make every token repeat itself.
_GEMMA = {"query_pre_attn_scalar": 8, "tie_word_embeddings": False}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral-sliding": {"model_type": "mistral", **_WINDOW},
    "gemma2-hybrid": {"model_type": "gemma2", **_GEMMA, **_HYBRID},
    "gemma3-hybrid": {"model_type": "gemma3_text", **_GEMMA, **_HYBRID},
    "olmo2": {"model_type": "olmo2"},
    "olmo3-hybrid": {"model_type": "olmo3", **_HYBRID},
    "gpt-oss-hybrid-moe": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **_HYBRID,
    },
    "qwen3-moe": {"model_type": "qwen3_moe", **_MOE},
    "deepseek-v3-moe": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}
"""Overrides of a common tiny config; windows are far shorter than the prompts of the tests."""


def tiny_model(
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Any:
    """A random transformers model of the given architecture, on its own attention."""
    options = {**_SIZES, **ARCHITECTURES[architecture], **overrides}
    model_type = options.pop("model_type")
    config = AutoConfig.for_model(model_type, **options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_wide(model, seed=seed)
    if getattr(config, "attn_logit_softcapping", None):
        # Fused attention in transformers 5.17 leaves the soft-cap out without a word.
        model.set_attn_implementation("eager")
    return model.to(dtype).eval()


@torch.no_grad()
def draw_wide(network: nn.Module, *, seed: int) -> None:
    """New random weights whose outputs are far apart."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        _draw_parameter(name, parameter, generator)


def _draw_parameter(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Matrices that keep the size of what they are given, norms that differ, small biases."""
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() < 2:
        parameter.copy_(noise * 0.1 + (1.0 if "norm" in name else 0.0))
    elif "embed" in name or "lm_head" in name:
        parameter.copy_(noise)
    else:
        parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)


def target_of(model: Any, tokenizer: Any = None) -> Target:
    """Put a transformers model behind the engine's attention, sharing its weights."""
    check_supported(model.config)
    twin = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), dtype=model.dtype, attn_implementation=ATTENTION_NAME
    )
    twin.load_state_dict(model.state_dict(), strict=True, assign=True)
    twin.tie_weights()
    twin.generation_config = model.generation_config
    return Target(twin.to(model.device).eval(), tokenizer, None)


def tiny_head(
    target: Target, *, seed: int = 0, draft_vocab_size: int = 64, **flags: Any
) -> Eagle3Head:
    """A random head that fits the target; its guesses are as good as chance."""
    sizes = {"intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    config = HeadConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        **{**sizes, **flags},
    )
    generator = torch.Generator().manual_seed(seed)
    vocabulary = torch.randperm(target.vocab_size, generator=generator)[:draft_vocab_size]
    head = Eagle3Head(config, vocabulary.sort().values)
    draw_wide(head, seed=seed)
    return head.eval()


class ScriptedDrafter(MemorylessDrafter):
    """Drafts from a known answer: right with a given probability at each depth, wrong elsewhere.

    The right token, when it is drafted, sits among wrong siblings at a random place. Wrong tokens
    are extended too, so that deep wrong branches are verified as well.
    """

    def __init__(
        self,
        answers: dict[tuple[int, ...], Many[int]],
        *,
        vocab_size: int,
        accuracy: float,
        depth: int = 4,
        width: int = 3,
        budget: int = 16,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """`answers` maps a prompt's token ids to what the target will say."""
        self._answers = answers
        self._vocab_size = vocab_size
        self._accuracy, self._depth, self._width, self._budget = accuracy, depth, width, budget
        self._random = random.Random(seed)
        self._device = device or torch.device("cpu")
        self.num_scratch = budget

    def draft(self, sequences: Many[Sequence], plan: DraftPlan) -> TreeBatch:
        del plan
        trees = [self._grow(seq) for seq in sequences]
        max_size = max(len(tokens) for tokens, _ in trees)

        def padded(rows: list[list[int]]) -> Tensor:
            filled = [row + [0] * (max_size - len(row)) for row in rows]
            return torch.tensor(filled, device=self._device)

        tokens_BN = padded([tokens for tokens, _ in trees])
        tokens_BN[:, 0] = torch.tensor([seq.newest_token_id for seq in sequences])
        return TreeBatch(
            tokens_BN=tokens_BN,
            parents_BN=padded([parents for _, parents in trees]),
            sizes_B=torch.tensor([len(tokens) for tokens, _ in trees], device=self._device),
            logprobs_BN=torch.zeros(tokens_BN.shape, device=self._device),
            num_drafts=sum(len(tokens) - 1 for tokens, _ in trees),
        )

    def _grow(self, seq: Sequence) -> tuple[list[int], list[int]]:
        """Tokens and parents: the right path as far as it goes, wrong nodes strewn around it."""
        answer = self._answers[seq.request.prompt_token_ids][len(seq.output_ids) :]
        path = self._right_path(answer)
        tokens, parents, depths = [seq.newest_token_id], [0], [0]
        taken: list[set[int]] = [set(answer[:1])]
        """Tokens a node may not get as a wrong child: those it has, and the right one."""
        num_children = [0]
        tip = 0
        while len(tokens) <= self._budget:
            num_left = self._budget + 1 - len(tokens)
            open_nodes = [
                node
                for node, depth in enumerate(depths)
                if depth < self._depth
                and num_children[node] + (node == tip and bool(path)) < self._width
            ]
            is_right = bool(path) and (
                not open_nodes or len(path) >= num_left or self._random.random() < 0.5
            )
            if not is_right and not open_nodes:
                break
            parent = tip if is_right else self._random.choice(open_nodes)
            token = path.pop(0) if is_right else self._wrong_token(taken[parent])
            taken[parent].add(token)
            num_children[parent] += 1
            depth = depths[parent] + 1
            if is_right:
                tip = len(tokens)
            taken.append(set(answer[depth : depth + 1]) if is_right else set())
            num_children.append(0)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return tokens, parents

    def _right_path(self, answer: Many[int]) -> list[int]:
        path: list[int] = []
        for token in answer[: min(self._depth, self._budget)]:
            if self._random.random() >= self._accuracy:
                break
            path.append(token)
        return path

    def _wrong_token(self, forbidden: set[int]) -> int:
        while (token := self._random.randrange(self._vocab_size)) in forbidden:
            pass
        return token


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(*, has_chat_template: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 300 tokens: any text goes in and comes out again."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=specials[3:],
    )
    if has_chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_target(
    directory: Path, architecture: str = "llama", *, has_chat_template: bool = True, **options: Any
) -> Path:
    """Write a tiny random target that transformers, and every verb of fledge, can load."""
    tokenizer = tiny_tokenizer(has_chat_template=has_chat_template)
    model = tiny_model(architecture, vocab_size=len(tokenizer), **options)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
