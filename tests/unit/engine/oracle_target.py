"""A target without a network: its next token is a function of the tokens a row really sees.

It stores token ids and positions where a network stores keys and values, reads them back through
the pass's own slots and masks, and insists that every row sees the tokens right before it, one for
each position, as far as the window reaches. So whatever goes wrong with blocks, tables, windows,
drafts or chunks is an error here, or another answer.
"""

from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from fledge import Engine, EngineSettings
from fledge.models.target import TargetOutput
from fledge.ops.kv import KVMemory
from fledge.ops.paged import Pass
from fledge.testing import ScriptedDrafter

VOCAB_SIZE = 61
POISON = VOCAB_SIZE - 1
"""Its entry is no number, nor are logits of rows that read it, even where they are masked."""


def next_token(seen: Many[int]) -> int:
    return hash((len(seen), *seen)) % POISON


def answer(prompt: Many[int], num_tokens: int, window: int | None = None) -> list[int]:
    """What the target says; `window` is the longest of its windows."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens if window is None else tokens[-window:]))
    return tokens[len(prompt) :]


class OracleTarget:
    """Says `answer`, and remembers how large its passes were."""

    device = torch.device("cpu")
    vocab_size = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset()
    repetition_penalty = 1.0
    tokenizer = None

    def __init__(self, windows: Many[int | None] = (None,), context_len: int = 512) -> None:
        self._windows = windows
        self.context_len = context_len
        self.num_rows: list[int] = []
        """Rows of each pass."""

    def chain_native(self) -> None:
        """It has no kernels."""

    def forward(
        self,
        packed: Pass,
        memory: KVMemory,
        *,
        logit_rows_R: Tensor | None = None,
        taps: Many[int] = (),
    ) -> TargetOutput:
        del taps
        self.num_rows.append(packed.num_tokens)
        seen_by_window = [self._seen(packed, memory, window) for window in self._windows]
        logits_TV = torch.zeros(packed.num_tokens, VOCAB_SIZE)
        for row in range(packed.num_tokens):
            seen = max((rows[row] for rows in seen_by_window), key=len)
            assert all(rows[row] == seen[-len(rows[row]) :] for rows in seen_by_window)
            logits_TV[row, next_token(seen)] = 1.0
        for segment in packed.view(self._windows[0]).segments():
            (tokens, _) = memory.for_window(self._windows[0]).read(0, segment.key_slots_K)
            if (tokens == POISON).any():
                logits_TV[segment.rows] = float("nan")
        return TargetOutput(
            logits_TV if logit_rows_R is None else logits_TV[logit_rows_R], features_TF=None
        )

    def _seen(self, packed: Pass, memory: KVMemory, window: int | None) -> list[list[int]]:
        """Tokens each row sees, by position."""
        view, pool = packed.view(window), memory.for_window(window)
        new = (packed.token_ids_T[:, None], packed.positions_T[:, None])
        pool.write(0, view.write_slots_T, *new)
        seen = []
        for segment in view.segments():
            tokens, positions = (one[:, 0].tolist() for one in pool.read(0, segment.key_slots_K))
            mask_QK = segment.mask(window)
            for q, position in enumerate(segment.query_positions_Q.tolist()):
                keys = range(len(tokens))
                if mask_QK is not None:
                    keys = mask_QK[q].nonzero()[:, 0].tolist()
                by_position = {positions[key]: tokens[key] for key in keys}
                first = 0 if window is None else max(0, position - window + 1)
                is_past_end = position >= self.context_len - 1
                assert len(by_position) == len(keys) or is_past_end
                assert sorted(by_position) == list(range(first, position + 1)) or is_past_end
                seen.append([by_position[place] for place in sorted(by_position)])
        return seen


def oracle_engine(
    windows: Many[int | None] = (None,), *, drafter: Any = None, **settings: Any
) -> tuple[Engine, OracleTarget]:
    target = OracleTarget(windows, settings.pop("context_len", 512))
    options = {"max_requests": 4, "max_pass_tokens": 64, "block_size": 4, "cache_tokens": 4000}
    as_target: Any = target
    made = Engine(as_target, settings=EngineSettings(**{**options, **settings}), drafter=drafter)
    return made, target


def oracle_drafter(
    prompts: Many[Many[int]], *, accuracy: float = 0.7, window: int | None = None, **options: Any
) -> ScriptedDrafter:
    """Drafts that are right with the given probability, for answers of any length."""
    answers = {tuple(prompt): answer(prompt, 200, window) for prompt in prompts}
    return ScriptedDrafter(answers, vocab_size=POISON, accuracy=accuracy, **options)
