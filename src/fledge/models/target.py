"""The target: transformers' model code, our attention, our cache, explicit positions, taps.

A pass takes a `PackedPass` and returns logits for the rows asked for, and the residual stream after
the tapped layers; `read` takes whole documents, makes no logits and keeps no cache. Layers are
counted as completed layers: 0 is the embedding, n the output of the last layer before the final
norm.

Legend: T tokens of a pass, R rows with logits, V vocabulary, D hidden size, F tapped features.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fledge.contracts.errors import CapacityError, ConfigError
from fledge.models.attention import ATTENTION_NAME, AttentionCall, DocumentsCall
from fledge.models.target_loading import load_model
from fledge.models.target_reading import Readout, TargetReading, readout_of
from fledge.models.tokenizer import TargetTokenizer
from fledge.ops.document_attention import DocumentAttention
from fledge.ops.documents import Documents
from fledge.ops.kv import KVMemory
from fledge.ops.paged import Pass

_NEUTRAL_GENERATION_SETTINGS = {
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}
"""Settings that would change greedy answers, with the values that do nothing."""


@dataclass(frozen=True, slots=True)
class TargetOutput:
    logits_RV: Tensor
    features_TF: Tensor | None
    """Tapped residual streams side by side, in the order of the taps; None without taps."""


class Target:
    """A decoder-only language model that the engine can drive."""

    def __init__(self, model: Any, tokenizer: TargetTokenizer | None, directory: Path | None):
        self._model = model
        self.tokenizer = tokenizer
        self.directory = directory
        config = model.config.get_text_config()
        self.config = config
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self.context_len = int(config.max_position_embeddings)
        self.eos_token_ids = _eos_token_ids(model)

    @classmethod
    def load(cls, directory: Path, *, dtype: torch.dtype, device: torch.device) -> "Target":
        """Load weights and tokenizer from a Hugging Face directory."""
        tokenizer = TargetTokenizer.load(directory)
        return cls(load_model(directory, dtype=dtype, device=device), tokenizer, directory)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @cached_property
    def embedding(self) -> nn.Embedding:
        embedding: nn.Embedding = self._model.get_input_embeddings()
        return embedding

    @property
    def lm_head_weight_VD(self) -> Tensor:
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    @property
    def readout(self) -> Readout:
        """From final hidden states to logits."""
        return readout_of(self._model)

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        decoder = self._model.get_decoder()
        layers: nn.ModuleList = decoder.layers if hasattr(decoder, "layers") else decoder.h
        return layers

    @property
    def repetition_penalty(self) -> float:
        """What the target's generation_config.json asks for; 1 means nothing."""
        return float(getattr(self._model.generation_config, "repetition_penalty", None) or 1.0)

    @property
    def unused_generation_settings(self) -> dict[str, object]:
        """What the target's generation_config.json asks for, transformers obeys and we do not."""
        config = self._model.generation_config
        return {
            name: value
            for name, neutral in _NEUTRAL_GENERATION_SETTINGS.items()
            if (value := getattr(config, name, None)) not in (None, neutral)
        }

    def check_taps(self, taps: Sequence[int]) -> None:
        if not taps or any(not 0 <= tap <= self.num_layers for tap in taps):
            raise ConfigError(
                f"taps {list(taps)} do not fit the target, which has {self.num_layers} layers: "
                f"a tap counts completed layers, from 0 to {self.num_layers}."
            )

    @torch.no_grad()
    def forward(
        self,
        packed: Pass,
        memory: KVMemory,
        *,
        logit_rows_R: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """One pass; logits for `logit_rows` of the packed tokens, all of them when None."""
        with self._captured(taps) as captured:
            try:
                output = self._model(
                    input_ids=packed.token_ids_T[None],
                    position_ids=packed.positions_T[None],
                    use_cache=False,
                    logits_to_keep=0 if logit_rows_R is None else logit_rows_R,
                    fledge_call=AttentionCall(packed, memory),
                )
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"{self.device} ran out of memory in a pass of {packed.num_tokens} tokens; "
                    "lower max_requests, use shorter prompts, or load in bfloat16."
                ) from error
        features = torch.cat([captured[tap] for tap in taps], dim=-1) if taps else None
        return TargetOutput(logits_RV=output.logits[0], features_TF=features)

    @torch.no_grad()
    def read(
        self, token_ids_T: Tensor, documents: Documents, taps: Sequence[int] = ()
    ) -> TargetReading:
        """Read whole documents: no logits, no cache."""
        with self._captured(taps) as captured:
            try:
                output = self._model.get_decoder()(
                    input_ids=token_ids_T[None],
                    position_ids=documents.positions_T[None],
                    use_cache=False,
                    fledge_call=DocumentsCall(DocumentAttention(documents)),
                )
                final_TD = output.last_hidden_state[0]
                columns = [captured[tap] for tap in taps]
                features_TF = torch.cat(columns, dim=-1) if columns else final_TD[:, :0]
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"{self.device} ran out of memory reading {documents.num_tokens} tokens at "
                    "once; lower capture.pass_tokens or train.micro_tokens, or load in bfloat16."
                ) from error
        return TargetReading(features_TF, final_TD)

    @torch.no_grad()
    def logits_by_transformers(self, token_ids_T: Tensor) -> Tensor:
        """Logits [T, V] of one sequence through the model's own attention: the oracle."""
        self._model.set_attn_implementation("eager")
        try:
            output = self._model(input_ids=token_ids_T[None], use_cache=False)
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)
        logits: Tensor = output.logits[0]
        return logits

    @contextmanager
    def _captured(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the residual stream after the given numbers of completed layers."""
        captured: dict[int, Tensor] = {}

        def keep_output(tap: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                captured[tap] = hidden[0]

            return hook

        def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            captured[0] = hidden[0]

        handles = [
            self.layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
            if tap == 0
            else self.layers[tap - 1].register_forward_hook(keep_output(tap))
            for tap in set(taps)
        ]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


def _eos_token_ids(model: Any) -> frozenset[int]:
    """End-of-text ids as transformers' generate would use them."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
