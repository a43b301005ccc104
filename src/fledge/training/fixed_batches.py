"""Micro-batches brought to few sizes and copied to the same memory: what captured work needs.

A captured pass has the sizes and addresses that it was captured with. So numbers of rows with a
label, of tokens that are worked on and of documents are rounded up, each with what changes nothing:

    rows         asked of no index, since they stand at the first token of a document
    tokens       suffixes of documents that begin earlier than they have to
    documents    empty ones

Legend: T tokens, A of them in suffixes, N documents, F tapped features, R rows with a label, D
target hidden size, K draft steps.
"""

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.ops.documents import Documents
from fledge.ops.micro_batch import MicroBatch, TargetRows
from fledge.ops.suffixes import Suffixes, lengthened_to, reaching, whole

_SIZES = 32
"""Rows and tokens come in multiples of a micro-batch's tokens divided by this: of either, up to 3%
of a micro-batch may be in vain."""

_DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class SizedBatch:
    """A micro-batch of one of few sizes, and the suffixes that are worked on."""

    batch: MicroBatch
    suffixes: Suffixes
    denominators_K: Tensor

    @property
    def size(self) -> Hashable:
        """Equal for micro-batches whose tensors have the same shapes."""
        batch = self.batch
        num_documents = len(batch.documents.lengths)
        num_rows, num_steps = len(batch.targets.rows_R), len(self.denominators_K)
        return num_steps, len(batch.token_ids_T), num_documents, num_rows, self.suffixes.num_tokens

    def tensors(self) -> list[Tensor]:
        """All that a pass reads, in a fixed order."""
        batch, documents, suffixes = self.batch, self.batch.documents, self.suffixes
        found = (
            *(batch.token_ids_T, batch.loss_mask_T, batch.features_TF),
            *(documents.offsets_N, documents.positions_T),
            *(suffixes.offsets_N, suffixes.rows_A, suffixes.numbers_T),
            *(getattr(batch.targets, one.name) for one in fields(TargetRows)),
            self.denominators_K,
        )
        return [one for one in found if one is not None]


def sized(batch: MicroBatch, denominators_K: Tensor, *, longest: int) -> SizedBatch:
    """The same micro-batch with its numbers rounded up; no document is longer than `longest`."""
    num_tokens = batch.documents.num_tokens
    unit = max(1, num_tokens // _SIZES)
    lengths = batch.documents.lengths
    empty = (0,) * (-len(lengths) % _DOCUMENTS_AT_ONCE)
    documents = Documents((*lengths, *empty), batch.documents.device, bound=longest)
    suffixes = reaching(documents, batch.first_labels, len(denominators_K)) or whole(documents)
    wanted = min(num_tokens, _rounded_up(suffixes.num_tokens, unit))
    num_rows = len(batch.targets.rows_R)
    targets = _with_rows(batch.targets, _rounded_up(num_rows, unit) - num_rows)
    return SizedBatch(
        replace(batch, documents=documents, targets=targets),
        lengthened_to(suffixes, wanted),
        denominators_K,
    )


def _with_rows(targets: TargetRows, missing: int) -> TargetRows:
    """Rows of zeros behind the others: row 0 is asked of no index, and its tokens are real ones."""

    def longer(tensor: Tensor) -> Tensor:
        return F.pad(tensor, (*(0, 0) * (tensor.dim() - 1), 0, missing))

    named = {one.name: getattr(targets, one.name) for one in fields(TargetRows)}
    return replace(targets, **{name: longer(one) for name, one in named.items() if one is not None})


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


class FixedMemory:
    """One micro-batch of each size, into which all others of that size are copied.

    What grows with the target's hidden size is shared by sizes.
    """

    def __init__(self) -> None:
        self._own: dict[Hashable, SizedBatch] = {}
        self._shared: dict[str, Tensor] = {}

    @torch.no_grad()
    def fill(self, given: SizedBatch) -> SizedBatch:
        """The micro-batch in its place, which later ones of its size will take."""
        own = self._own.get(given.size)
        if own is None:
            own = self._own[given.size] = self._placed(given)
        torch._foreach_copy_(own.tensors(), given.tensors())
        return own

    def _placed(self, given: SizedBatch) -> SizedBatch:
        batch, num_tokens = given.batch, len(given.batch.token_ids_T)
        named = {one.name: getattr(batch.targets, one.name) for one in fields(TargetRows)}
        wide = {
            name: self._part(name, one, num_tokens)
            for name, one in named.items()
            if one is not None and one.dim() > 1
        }
        features_TF = self._part("features", batch.features_TF, num_tokens)
        targets = replace(batch.targets, **wide)
        return replace(
            given,
            batch=replace(batch, features_TF=features_TF, targets=targets),
            # Micro-batches of one step come with the same ones.
            denominators_K=given.denominators_K.clone(),
        )

    def _part(self, name: str, like: Tensor, num_rows: int) -> Tensor:
        """Of what sizes share: as many rows as there are tokens, which no size needs more of."""
        shared = self._shared.get(name)
        if shared is None or len(shared) < len(like):
            shared = like.new_empty((max(num_rows, len(like)), *like.shape[1:]))
            self._shared[name] = shared
        return shared[: len(like)]
