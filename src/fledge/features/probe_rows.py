"""The rows that layers are compared on: what a head would see at its first position, and what the
target said there.

Legend: R rows, L layers, D hidden size, T tokens of a pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fledge.contracts.progress import Progress
from fledge.features.capture_order import order_passes
from fledge.features.channel_spread import spread_out
from fledge.features.label_rows import label_rows, read_tokens
from fledge.features.sample_rows import SampleRows
from fledge.models.target import Target
from fledge.ops.documents import make_documents
from fledge.store.corpus import Corpus

MAX_ROWS = 5120
"""More would take longer and say hardly more."""

_ROWS_AT_ONCE = 512
_JUDGED_OF = 5
_JUDGED = (1, 3)
"""Of every five samples the second and the fourth are judged, the others fitted."""


@dataclass(frozen=True, slots=True)
class ProbeRows:
    """One row for each label of a small sample of a corpus."""

    layers: Mapping[int, Tensor]
    """By completed layers, [R, D]: the residual stream at the token before the row."""

    embedding_RD: Tensor
    """Of the row's own token."""

    final_RD: Tensor
    greedy_R: Tensor
    is_judged_R: Tensor
    """Whether the row is kept from the fit."""


def read_probe_rows(
    corpus: Corpus,
    rows: SampleRows,
    target: Target,
    layers: Sequence[int],
    *,
    pass_tokens: int,
    progress: Progress,
) -> ProbeRows:
    """Have the target read a part of the corpus, once for all layers."""
    share = rows.num_labels / max(1, rows.num_tokens)
    chosen = spread_out(rows, round(MAX_ROWS / max(share, 0.01)))
    sampled = SampleRows(np.zeros_like(rows.kept), np.zeros_like(rows.labels))
    sampled.kept[chosen], sampled.labels[chosen] = rows.kept[chosen], rows.labels[chosen]
    is_judged = {number: place % _JUDGED_OF in _JUDGED for place, number in enumerate(chosen)}
    parts = []
    num_tokens = int(sampled.kept.sum()) - len(chosen)
    with progress.task("comparing layers", num_tokens, "tokens") as task:
        for numbers in order_passes(sampled, pass_tokens):
            parts.append(_read(corpus, numbers, target, layers, is_judged))
            task.advance(sum(read_tokens(int(rows.kept[number])) for number in numbers))
    return ProbeRows(
        layers={
            layer: torch.cat([part.layers[layer] for part in parts])[:MAX_ROWS] for layer in layers
        },
        embedding_RD=_joined(part.embedding_RD for part in parts),
        final_RD=_joined(part.final_RD for part in parts),
        greedy_R=_joined(part.greedy_R for part in parts),
        is_judged_R=_joined(part.is_judged_R for part in parts),
    )


@torch.no_grad()
def _read(
    corpus: Corpus,
    numbers: Sequence[int],
    target: Target,
    layers: Sequence[int],
    is_judged: Mapping[int, bool],
) -> ProbeRows:
    ids, places, judged = [], [], []
    start = 0
    for number in numbers:
        sample = corpus[number]
        own_rows = label_rows(sample.loss_mask)
        num_read = int(own_rows[-1]) + 1
        ids.append(sample.token_ids[:num_read].astype(np.int64))
        places.append(own_rows + start)
        judged.append(np.full(len(own_rows), is_judged[number]))
        start += num_read
    token_ids_T = torch.from_numpy(np.concatenate(ids)).to(target.device)
    rows_R = torch.from_numpy(np.concatenate(places)).to(target.device)
    documents = make_documents([len(part) for part in ids], target.device)
    reading = target.read(token_ids_T, documents, layers)
    before_RF, final_RD = reading.features_TF[rows_R - 1], reading.final_TD[rows_R]
    parts = torch.split(final_RD, _ROWS_AT_ONCE)
    greedy_R = torch.cat([target.readout.logits(part).argmax(dim=-1) for part in parts])
    return ProbeRows(
        layers=dict(zip(layers, torch.split(before_RF, target.hidden_size, dim=1), strict=True)),
        embedding_RD=target.embedding(token_ids_T[rows_R]),
        final_RD=final_RD,
        greedy_R=greedy_R,
        is_judged_R=torch.from_numpy(np.concatenate(judged)).to(target.device),
    )


def _joined(parts: Iterator[Tensor]) -> Tensor:
    return torch.cat(list(parts))[:MAX_ROWS]
