"""What training measures is what the engine does: a trained head, draft by draft and in total.

Teacher-forced on greedy answers, index t of training-time test stands where the engine stands when
token t+1 is its newest. A request that reads a prompt and a part of its answer, and runs for one
cycle, therefore shows what one index of training counted.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.head_settings import HeadSettings
from fledge.contracts.outputs import Completion
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings, TreeSettings
from fledge.contracts.train_settings import (
    HeldOutSettings,
    LossSettings,
    OptimizerSettings,
    TrainSettings,
)
from fledge.engine.engine import Engine
from fledge.features.target_rows import describe_rows
from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head
from fledge.models.target import Target
from fledge.ops.documents import make_documents
from fledge.ops.micro_batch import MicroBatch
from fledge.store.corpus import Corpus
from fledge.store.corpus_shard import Sample
from fledge.store.manifest import read_manifest
from fledge.training.assembly import make_order
from fledge.training.decoding import choose_prompts, sum_completions
from fledge.training.held_out import measure_held_out
from fledge.training.stage import train
from fledge.training.train_input import open_input
from fledge.training.ttt import TTTModule

DEPTH = 5
TAPS = (1, 2, 3)
SETTINGS = TrainSettings(
    max_steps=50,
    batch_tokens=512,
    micro_tokens=512,
    loss=LossSettings(steps=DEPTH),
    optimizer=OptimizerSettings(learning_rate=5e-3),
    held_out=HeldOutSettings(share=0.1, every=50, decode_prompts=100, decode_tokens=80),
)


@dataclass(frozen=True)
class Trained:
    run: Path
    target: Target
    head: Eagle3Head
    module: TTTModule
    samples: list[Sample]
    """Held out."""

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
        settings = EngineSettings(
            tree=tree, controller="fixed", copies=False, max_requests=max_requests
        )
        return Engine(self.target, self.head, settings)


@pytest.fixture(scope="module", params=({}, {"norm_before_fc": True}), ids=str)
def trained(
    request: pytest.FixtureRequest,
    language_target: Path,
    language_corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    """A head that has learnt for some seconds: right often, and wrong often."""
    settings = replace(SETTINGS, head=HeadSettings(**request.param))
    run = tmp_path_factory.mktemp("runs") / "some-seconds"
    given = open_input(
        features=None,
        corpora=[language_corpus],
        target=str(language_target),
        settings=settings,
        capture=CaptureSettings(layers=TAPS),
        is_capture_asked=True,
        device=torch.device("cpu"),
    )
    target = Target.load(language_target, dtype=torch.float32, device=torch.device("cpu"))
    train(given, settings, run, target=target)
    head = load_head(run)
    module = TTTModule(
        head,
        target.embedding.weight,
        target.readout,
        SETTINGS.loss,
        compute_dtype=torch.float32,
    )
    corpus = Corpus.open(language_corpus)
    division, _ = make_order(given, settings)
    samples = [corpus[int(given.samples.numbers[place])] for place in division.held_out]
    return Trained(run, target, head, module, samples)


def test_a_head_trained_for_seconds_doubles_what_a_pass_yields(
    trained: Trained, language_target: Path
) -> None:
    """What the run says of itself is what the saved head does in serving, to the last token."""
    said = read_manifest(trained.run).counts["best"]
    plain = Engine(trained.target)
    prompts = choose_prompts(trained.samples, count=100, max_prompt_len=100, seed=1)
    tree = TreeSettings(depth=DEPTH, width=1, budget=DEPTH)
    engine = Engine.load(
        str(language_target),
        head=trained.run,
        settings=EngineSettings(tree=tree, controller="fixed", copies=False),
        device="cpu",
    )
    answers = engine.generate(prompts, SamplingParams(max_tokens=80))
    assert said["accept_length"] == accept_length(answers)
    expected = plain.generate(prompts, SamplingParams(max_tokens=80))
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    assert len(prompts) >= 15
    assert 2.0 <= said["accept_length"] < DEPTH + 0.8, "good, and not so good that all is easy"
    # Not equal: the engine begins a chain only where one has ended, behind a token that was hard.
    assert said["ideal_speed_up"] == pytest.approx(said["accept_length"], rel=0.2)


def test_every_index_is_what_one_cycle_does(trained: Trained) -> None:
    """Chains offered and accepted, counted by training and by the engine: the same numbers."""
    engine = trained.engine()
    for sample in trained.samples[:3]:
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
    sample = trained.samples[0]
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
