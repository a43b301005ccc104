"""One micro-batch: documents end to end, with what the target thought of them.

    token      x0    x1    x2    x3    x4        loss on x3 and x4
    feature    f0    f1    f2                    of the tokens that labels are reached from
    target row             p2    p3              p2 is the distribution of x3: row 2 has a label

At draft step k the head stands at index t: it has seen feature t (through its own output when
k > 0), reads the embedding of token t+1+k, and is asked for the target's distribution at row t+1+k,
which is that of token t+2+k. The loss counts where token t+2+k has loss: the mask follows it.

Legend: T tokens, F tapped features, R rows with a label, D target hidden size, C tokens kept.
"""

from dataclasses import dataclass

from torch import Tensor

from fledge.ops.documents import Documents


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The target's distribution where the loss looks: final hidden rows, or the top of it."""

    rows_R: Tensor
    """Row of the micro-batch, ascending; the label is the token after it in the same document."""

    greedy_R: Tensor
    """The target's most probable token, as an id of the target."""

    log_mass_R: Tensor
    """Log of the probability that the draft vocabulary has of the whole vocabulary, float32."""

    final_RD: Tensor | None = None
    """Final hidden state behind the last norm: what the target's output matrix reads."""

    top_ids_RC: Tensor | None = None
    """Ids of the draft vocabulary, most probable first."""

    top_logprobs_RC: Tensor | None = None
    """Their log-probabilities within the draft vocabulary, float32."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one process works on at once."""

    token_ids_T: Tensor
    loss_mask_T: Tensor
    """True where the target said the token; False in padding."""

    documents: Documents
    features_TF: Tensor
    """Zero where nothing needs them: padding, and behind the last label."""

    targets: TargetRows
    sample_numbers: tuple[int, ...]
    """Of the corpus, for messages."""

    first_labels: tuple[int, ...] | None = None
    """First row with a label within each document, known to the host; None where it is not.

    Nothing before the index that reaches it needs more than keys. Documents behind the last that
    is named are padding.
    """
