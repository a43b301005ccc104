"""Micro-batches of random documents with random features, as training would get them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fledge.models.head import Eagle3Head
from fledge.models.target_reading import Readout
from fledge.ops.documents import make_documents
from fledge.ops.micro_batch import MicroBatch, TargetRows

CPU = torch.device("cpu")
LENGTHS = (5, 1, 2, 3, 26, 11)


def random_readout(head: Eagle3Head, dtype: torch.dtype, **flags: Any) -> Readout:
    generator = torch.Generator().manual_seed(5)
    shape = (head.config.vocab_size, head.config.target_hidden_size)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return Readout(weight.to(head.draft_to_target_V.device), **flags)


def random_batch(
    head: Eagle3Head,
    readout: Readout,
    dtype: torch.dtype,
    *,
    lengths: Sequence[int] = LENGTHS,
    padded_to: int | None = None,
    seed: int = 0,
    top_k: int | None = None,
) -> MicroBatch:
    """Prompts of a third, then labels on two of three tokens; a random head is near enough."""
    device = head.draft_to_target_V.device
    documents = make_documents(lengths, device, padded_to=padded_to)
    generator = torch.Generator().manual_seed(seed)
    num_tokens, config = documents.num_tokens, head.config
    token_ids_T = torch.randint(config.vocab_size, (num_tokens,), generator=generator)
    mask_T = torch.rand(num_tokens, generator=generator) < 0.66
    mask_T[sum(lengths) :] = False
    mask_T[: sum(lengths)] &= is_answer(lengths)
    width = config.num_taps * config.target_hidden_size
    features_TF = torch.randn((num_tokens, width), generator=generator, dtype=torch.float64)
    final_TD = torch.randn((num_tokens, config.target_hidden_size), generator=generator).double()
    rows_R = label_rows(mask_T, lengths).to(device)
    final_RD = (0.4 * final_TD).to(dtype).to(device)[rows_R]
    return MicroBatch(
        token_ids_T=token_ids_T.to(device),
        loss_mask_T=mask_T.to(device),
        documents=documents,
        features_TF=features_TF.to(dtype).to(device),
        targets=describe(final_RD, rows_R, readout, head, top_k),
        sample_numbers=tuple(range(len(lengths))),
        first_labels=first_labels(rows_R.tolist(), lengths),
    )


def is_answer(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([i >= length // 3 for length in lengths for i in range(length)])


def first_labels(rows: list[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """Within each document, its length for none."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return tuple(
        min((row - start for row in rows if start <= row < start + length), default=length)
        for start, length in zip(starts, lengths, strict=True)
    )


def label_rows(mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Row j of a document has a label when token j+1 has loss; the first row is never asked."""
    rows, start = [], 0
    for length in lengths:
        rows += [start + j for j in range(1, length - 1) if mask_T[start + j + 1]]
        start += length
    return torch.tensor(rows, dtype=torch.long)


def describe(
    final_RD: Tensor, rows_R: Tensor, readout: Readout, head: Eagle3Head, top_k: int | None
) -> TargetRows:
    logits_RV = readout.logits(final_RD.to(readout.weight_VD.dtype)).double()
    drafted_RV = logits_RV[:, head.draft_to_target_V]
    log_mass_R = drafted_RV.logsumexp(-1) - logits_RV.logsumexp(-1)
    rows = TargetRows(rows_R, logits_RV.argmax(-1), log_mass_R.float(), final_RD)
    if top_k is None:
        return rows
    top = drafted_RV.log_softmax(-1).topk(top_k)
    return replace(
        rows, final_RD=None, top_ids_RC=top.indices.int(), top_logprobs_RC=top.values.float()
    )


def one_document(batch: MicroBatch, number: int) -> MicroBatch:
    """A document of the batch, alone."""
    start, stop = batch.documents.starts[number : number + 2]
    targets = batch.targets
    inside_R = (targets.rows_R >= start) & (targets.rows_R < stop)
    return MicroBatch(
        token_ids_T=batch.token_ids_T[start:stop],
        loss_mask_T=batch.loss_mask_T[start:stop],
        documents=make_documents([stop - start], batch.documents.device),
        features_TF=batch.features_TF[start:stop],
        targets=TargetRows(
            targets.rows_R[inside_R] - start,
            targets.greedy_R[inside_R],
            targets.log_mass_R[inside_R],
            None if targets.final_RD is None else targets.final_RD[inside_R],
        ),
        sample_numbers=(number,),
    )
