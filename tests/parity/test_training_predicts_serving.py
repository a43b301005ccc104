"""What training measures is what the engine does: a trained head, draft by draft and in total.

Teacher-forced on greedy answers, index t of training-time test stands where the engine stands when
token t+1 is its newest. A request that reads a prompt and a part of its answer, and runs for one
cycle, therefore shows what one index of training counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.contracts.outputs import Completion
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings, TreeSettings
from fledge.contracts.train_settings import HeadSettings, LossSettings
from fledge.engine.engine import Engine
from fledge.features.label_rows import label_rows
from fledge.features.target_rows import describe_rows
from fledge.models.head import Eagle3Head
from fledge.models.target import Target
from fledge.ops.documents import make_documents
from fledge.ops.micro_batch import MicroBatch
from fledge.store.corpus import Corpus
from fledge.training.decoding import HeldOutDecoder, choose_prompts, sum_completions
from fledge.training.head_init import make_head, shape_head
from fledge.training.held_out import measure_held_out
from fledge.training.metrics import measure_sums
from fledge.training.ttt import TTTModule

DEPTH = 5
TAPS = (1, 2, 3)
NUM_HELD_OUT = 24
NUM_TRAINING_STEPS = 40


@dataclass(frozen=True)
class Trained:
    target: Target
    head: Eagle3Head
    module: TTTModule
    corpus: Corpus

    @property
    def held_out(self) -> range:
        return range(len(self.corpus) - NUM_HELD_OUT, len(self.corpus))

    def batch(self, numbers: Iterable[int]) -> MicroBatch:
        """Samples of the corpus with all their labels."""
        samples = [self.corpus[number] for number in numbers]
        starts = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
        rows = [
            start + label_rows(sample.loss_mask)
            for start, sample in zip(starts, samples, strict=False)
        ]
        texts = [sample.token_ids.tolist() for sample in samples]
        return self.read(texts, torch.from_numpy(np.concatenate(rows)))

    def read(self, texts: list[list[int]], rows_R: torch.Tensor) -> MicroBatch:
        """Token ids end to end, with labels at these rows only."""
        token_ids_T = torch.tensor([token for text in texts for token in text])
        documents = make_documents([len(text) for text in texts], token_ids_T.device)
        reading = self.target.read(token_ids_T, documents, TAPS)
        loss_mask_T = torch.zeros(len(token_ids_T), dtype=torch.bool)
        loss_mask_T[rows_R + 1] = True
        return MicroBatch(
            token_ids_T=token_ids_T,
            loss_mask_T=loss_mask_T,
            documents=documents,
            features_TF=reading.features_TF,
            targets=describe_rows(
                reading.final_TD, rows_R, self.target.readout, self.head.draft_to_target_V
            ),
            sample_numbers=tuple(range(len(texts))),
        )

    def engine(self, max_requests: int = 64) -> Engine:
        tree = TreeSettings(depth=DEPTH, width=1, budget=DEPTH)
        settings = EngineSettings(tree=tree, controller="fixed", max_requests=max_requests)
        return Engine(self.target, self.head, settings)


@pytest.fixture(scope="module")
def trained(language_target: Path, language_corpus: Path) -> Trained:
    """A head that has learnt for some seconds: right often, and wrong often."""
    target = Target.load(language_target, dtype=torch.float32, device=torch.device("cpu"))
    corpus = Corpus.open(language_corpus)
    draft_ids = corpus.vocab_map.target_ids
    config = shape_head(target.config, HeadSettings(), taps=TAPS, draft_vocab_size=len(draft_ids))
    head = make_head(config, draft_ids, seed=0, readout=target.readout)
    module = TTTModule(
        head,
        target.embedding.weight,
        target.readout,
        LossSettings(steps=DEPTH),
        compute_dtype=torch.float32,
    )
    trained = Trained(target, head, module, corpus)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, betas=(0.9, 0.95))
    order = np.random.default_rng(0)
    ones_K = torch.full((DEPTH,), 400.0)
    for _ in range(NUM_TRAINING_STEPS):
        chosen = order.choice(len(corpus) - NUM_HELD_OUT, size=8, replace=False)
        optimizer.zero_grad()
        module(trained.batch(chosen.tolist()), ones_K).loss.backward()
        optimizer.step()
    return trained


def test_a_head_trained_for_seconds_doubles_what_a_pass_yields(trained: Trained) -> None:
    """And the figure of training is the figure of serving, within noise."""
    samples = [trained.corpus[number] for number in trained.held_out]
    prompts = choose_prompts(samples, count=NUM_HELD_OUT, max_prompt_len=100, seed=0)
    decoder = HeldOutDecoder(
        trained.target,
        trained.head.config,
        trained.head.draft_to_target_V,
        prompts,
        depth=DEPTH,
        max_tokens=80,
    )
    decoded = decoder.measure(trained.head.state_dict())
    batch = trained.batch(trained.held_out)
    sums = measure_held_out(trained.module, [batch], num_steps=DEPTH)
    figures = measure_sums(sums, step_decay=0.8)
    assert decoded.accept_length is not None
    assert figures.ideal_speed_up is not None
    assert 2.0 <= decoded.accept_length < DEPTH + 0.8, "good, and not so good that nothing is shown"
    # Not equal: the engine begins a chain only where one has ended, behind a token that was hard.
    assert figures.ideal_speed_up == pytest.approx(decoded.accept_length, rel=0.15)


def test_every_index_is_what_one_cycle_does(trained: Trained) -> None:
    """Chains offered and accepted, counted by training and by the engine: the same numbers."""
    engine = trained.engine()
    for number in list(trained.held_out)[:3]:
        sample = trained.corpus[number]
        (prompt,) = choose_prompts([sample], count=1, max_prompt_len=100, seed=0)
        token_ids = [int(token) for token in sample.token_ids]
        assert_same_chains(trained, engine, token_ids, len(prompt))


def assert_same_chains(
    trained: Trained, engine: Engine, token_ids: list[int], prompt_len: int
) -> None:
    last_row = len(token_ids) - 2
    # Row j has the distribution of token j+1. Index t is asked for the rows from t+1 on; the first
    # cycle that the engine can run has the first token of the answer behind the prompt.
    rows_R = torch.arange(prompt_len, last_row + 1)
    batch = trained.read([token_ids], rows_R)
    sums = measure_held_out(trained.module, [batch], num_steps=DEPTH)
    starts = range(prompt_len - 1, last_row)
    prompts = [tuple(token_ids[: start + 1]) for start in starts]
    answers = engine.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
    offered, accepted = [0] * DEPTH, [0] * DEPTH
    for start, completion in zip(starts, answers, strict=True):
        assert completion.token_ids[0] == token_ids[start + 1], "the corpus is greedy"
        stats = completion.stats
        for depth in range(min(DEPTH, last_row - start, len(stats.offered_at_depth))):
            offered[depth] += stats.offered_at_depth[depth]
            accepted[depth] += stats.accepted_at_depth[depth]
    assert sums.offered_K.tolist() == offered
    assert sums.chain_K.tolist() == accepted
    assert 0 < accepted[-1] < offered[0], "neither always right nor always wrong"


def test_walking_over_the_indices_gives_the_cycles_of_a_whole_answer(trained: Trained) -> None:
    """Accept length is a walk over what every index would do."""
    engine = trained.engine()
    number = trained.held_out[0]
    sample = trained.corpus[number]
    (prompt,) = choose_prompts([sample], count=1, max_prompt_len=100, seed=0)
    token_ids = [int(token) for token in sample.token_ids]
    answer_len = len(token_ids) - len(prompt)
    prompts = [tuple(token_ids[: len(prompt) + said]) for said in range(answer_len - 1)]
    runs = engine.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
    said, num_cycles = 1, 0
    while said < answer_len:
        said += 1 + sum(runs[said - 1].stats.accepted_at_depth)
        num_cycles += 1
    (whole,) = engine.generate([prompt], SamplingParams(max_tokens=80))
    assert whole.stats.num_tokens == answer_len
    assert whole.stats.cycles == num_cycles
    assert accept_length([whole]) == (answer_len - 1) / num_cycles


def accept_length(completions: list[Completion]) -> float | None:
    return sum_completions(completions, DEPTH).accept_length
