"""The target: our own layers or transformers' model code, our attention, our cache, taps.

Families that fledge has layers for run on them (`FastDecoder`, which states what a pass may rely
on); the others, and all with `FLEDGE_TARGET_PATH=plain`, run transformers' modules.

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

from fledge.contracts.errors import CapacityError, ConfigError, MismatchError
from fledge.models.attention import ATTENTION_NAME, AttentionCall, DocumentsCall
from fledge.models.fast_decoder import FastDecoder
from fledge.models.fast_layers import NoFastLayersError
from fledge.models.native_decoder import NativeDecoder
from fledge.models.target_loading import load_model
from fledge.models.target_path import target_path
from fledge.models.target_reading import Readout, TargetReading, readout_of
from fledge.models.tokenizer import TargetTokenizer
from fledge.models.wide_attention import wide_eager_attention
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
        self._fast: FastDecoder | None = None
        self._why_plain: str | None = None

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

    @property
    def why_plain(self) -> str | None:
        """Why passes run transformers' layers; None where they run on ours."""
        if target_path() == "plain":
            return "FLEDGE_TARGET_PATH is 'plain'"
        return self._why_plain if self._fast_decoder() is None else None

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
        fast = self._fast_decoder()
        try:
            if fast is not None:
                logits_RV, columns = fast.forward(packed, memory, logit_rows_R, taps)
            else:
                logits_RV, columns = self._forward_plain(packed, memory, logit_rows_R, taps)
            features = torch.cat(columns, dim=-1) if taps else None
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.device} ran out of memory in a pass of {packed.num_tokens} tokens; "
                "lower max_requests, use shorter prompts, or load in bfloat16."
            ) from error
        return TargetOutput(logits_RV=logits_RV, features_TF=features)

    def _forward_plain(
        self, packed: Pass, memory: KVMemory, logit_rows_R: Tensor | None, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        with self._captured(taps) as captured:
            output = self._model(
                input_ids=packed.token_ids_T[None],
                position_ids=packed.positions_T[None],
                use_cache=False,
                logits_to_keep=0 if logit_rows_R is None else logit_rows_R,
                fledge_call=AttentionCall(packed, memory),
            )
        return output.logits[0], [captured[tap] for tap in taps]

    def chain_native(self) -> NativeDecoder | None:
        """Native layers for passes over chains, if there are."""
        fast = self._fast_decoder() if self.device.type == "cpu" else None
        return None if fast is None else fast.chain_native

    @torch.no_grad()
    def read(
        self, token_ids_T: Tensor, documents: Documents, taps: Sequence[int] = ()
    ) -> TargetReading:
        """Read whole documents: no logits, no cache."""
        fast = self._fast_decoder()
        try:
            if fast is not None:
                return fast.read(token_ids_T, documents, taps)
            return self._read_plain(token_ids_T, documents, taps)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.device} ran out of memory reading {documents.num_tokens} tokens at "
                "once; lower capture.pass_tokens or train.micro_tokens, or load in bfloat16."
            ) from error

    def _read_plain(
        self, token_ids_T: Tensor, documents: Documents, taps: Sequence[int]
    ) -> TargetReading:
        with self._captured(taps) as captured:
            output = self._model.get_decoder()(**_document_options(token_ids_T, documents))
        final_TD = output.last_hidden_state[0]
        columns = [captured[tap] for tap in taps]
        features_TF = torch.cat(columns, dim=-1) if columns else final_TD[:, :0]
        return TargetReading(features_TF, final_TD)

    def _fast_decoder(self) -> FastDecoder | None:
        """Our own layers, made when a pass first asks for them; None where passes run without."""
        path = target_path()
        if path == "plain":
            return None
        if self._fast is None and self._why_plain is None:
            try:
                self._fast = self._make_fast()
            except NoFastLayersError as error:
                self._why_plain = str(error)
        if self._fast is None and path == "fast":
            raise MismatchError(
                f"FLEDGE_TARGET_PATH is 'fast', but {self._why_plain}; leave it unset to run "
                "transformers' layers."
            )
        return self._fast

    def _make_fast(self) -> FastDecoder:
        fast = FastDecoder(self._model)
        if self.directory is not None:  # files hold what no test has seen
            with torch.no_grad():
                fast.check_same(self._read_plain, self.vocab_size)
        return fast

    @torch.no_grad()
    def states_and_logits(self, token_ids_T: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
        """Final hidden states, and transformers' logits of them: its modules, our attention."""
        final_TD = self._read_plain(token_ids_T, documents, ()).final_TD
        output = self._model(**_document_options(token_ids_T, documents))
        return final_TD, output.logits[0]

    @torch.no_grad()
    def logits_by_transformers(self, token_ids_T: Tensor) -> Tensor:
        """Logits [T, V] of one sequence through the model's own attention: the oracle."""
        self._model.set_attn_implementation("eager")
        try:
            with wide_eager_attention(self._model):
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


def _document_options(token_ids_T: Tensor, documents: Documents) -> dict[str, Any]:
    return {
        "input_ids": token_ids_T[None],
        "position_ids": documents.positions_T[None],
        "use_cache": False,
        "fledge_call": DocumentsCall(DocumentAttention(documents)),
    }


def _eos_token_ids(model: Any) -> frozenset[int]:
    """End-of-text ids as transformers' generate would use them."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
