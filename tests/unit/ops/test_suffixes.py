"""Ends of documents: where they lie among the tokens, and how far back labels reach."""

import torch

from fledge.ops.documents import make_documents
from fledge.ops.suffixes import Suffixes, reaching, whole

CPU = torch.device("cpu")


def test_rows_lie_at_the_ends() -> None:
    suffixes = Suffixes(make_documents([4, 1, 3], CPU), (2, 1, 3))
    assert suffixes.rows_A.tolist() == [2, 3, 4, 5, 6, 7]
    assert suffixes.offsets_N.tolist() == [0, 2, 3, 6]
    assert suffixes.numbers_T[suffixes.rows_A].tolist() == list(range(6))
    assert suffixes.longest == 3
    assert whole(suffixes.documents).rows_A.tolist() == list(range(8))


def test_labels_are_reached_from_as_many_rows_before_them_as_there_are_steps() -> None:
    documents = make_documents([10, 10, 4], CPU, padded_to=30)
    suffixes = reaching(documents, (6, 2, 4), 3)
    assert suffixes is not None
    # From index 3 on; all of it; no label, and padding: one token each.
    assert suffixes.lengths == (7, 10, 1, 1)


def test_nothing_is_cut_where_all_is_needed_or_nothing_is_known() -> None:
    documents = make_documents([5, 6], CPU)
    assert reaching(documents, None, 7) is None
    assert reaching(documents, (1, 3), 7) is None
