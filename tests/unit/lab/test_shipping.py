"""Putting a head into the package: small, checked, with a card of what the stages wrote."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fledge import Engine, SamplingParams
from fledge.contracts.errors import ArtifactError, CapacityError, FledgeError, MismatchError
from fledge.contracts.progress import SilentProgress
from fledge.contracts.tuned_settings import read_tuned
from fledge.lab import shipping
from fledge.lab.candidates import Candidate, fingerprints
from fledge.lab.head_card import Evidence
from fledge.lab.shipping import ship_head
from fledge.models.head_files import load_head, save_head
from fledge.models.shipped_heads import find_shipped_head, tuning_file
from fledge.store.manifest import CORPUS, Manifest, Plan
from fledge.testing import save_tiny_target
from tests.shipped_pairs import save_random_head, ship, training_manifest, tuning

PROVENANCE = {"command": "fledge select", "device": "NVIDIA H200", "date": "2026-11-15 12:00 UTC"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return save_random_head(target, tmp_path_factory.mktemp("heads") / "run")


def fingerprint(directory: Path) -> str:
    return fingerprints([Candidate(name="head", directory=directory)], SilentProgress())["head"]


def weights_of(target: Path) -> str:
    return str(training_manifest(target).plan.identity["weights"])


def scorecard(head: str) -> dict[str, Any]:
    interval = {"value": 3.25, "low": 3.0, "high": 3.5}
    faster = {"value": 1.75, "low": 1.5, "high": 2.0}
    figures = {"accept_length_before_loops": 3.125, "tokens_per_s": 1234.5}
    tasks = {"gsm8k": {"accept_length": interval, "speed_up": faster, "figures": figures}}
    measured = {
        "rank": 1,
        "name": "run",
        "fingerprint": head,
        "accept_length": interval,
        "speed_up": faster,
        "tasks": tasks,
        "differences": {"num_compared": 40, "num_different": 1},
    }
    return {
        "verdict": "",
        "dtype": "bfloat16",
        "device": "NVIDIA H200",
        "settings": {
            "temperature": 0.0,
            "tree": {"depth": 7, "width": 1, "budget": 7},
            "controller": "fixed",
            "max_tokens": 256,
            "concurrency": 1,
        },
        "plain": {"tasks": {"gsm8k": {"tokens_per_s": 700.25}}},
        "heads": [{"rank": None, "name": "lost", "fingerprint": "x"}, measured],
        "provenance": PROVENANCE,
    }


def bench() -> dict[str, Any]:
    speedup = {"value": 1.0625, "low": 1.0, "high": 1.125}
    row = {"kind": "closed", "level": 32, "speedup": speedup, "tpot_speedup": None}
    return {
        "arms": [],
        "comparisons": [{"baseline": "plain", "arm": "head", "rows": [row]}],
        "provenance": PROVENANCE,
    }


def data_card() -> dict[str, Any]:
    sources = [
        {"name": "questions", "is_self": False, "licence": "MIT", "rows": {"out": 1200}},
        {"name": "self", "is_self": True, "licence": "Apache-2.0", "rows": {"out": 3400}},
    ]
    return {
        "rows": 4600,
        "sources": sources,
        "totals": {"rows": {"overlaps": 17}, "identifiers": {"email": 5, "name": 6}},
        "filters": {"decontaminate": {"against": ["bench.jsonl"]}, "privacy": {"enabled": True}},
    }


def corpus() -> Manifest:
    counts = {
        "samples": 4600,
        "tokens": 900_000,
        "loss_tokens": 700_000,
        "vocabulary": {"coverage": 0.98765},
    }
    return Manifest(
        plan=Plan(kind=CORPUS, settings={}), counts=counts, files={}, provenance=PROVENANCE
    )


def test_the_directory_is_a_head_of_half_the_bytes(
    tmp_path: Path, head: Path, target: Path
) -> None:
    shipped = ship(head, target, tmp_path / "heads")
    before, after = load_head(head), load_head(shipped.directory)
    assert after.fc.weight.dtype == torch.bfloat16
    assert torch.equal(before.fc.weight.bfloat16(), after.fc.weight)
    assert torch.equal(before.draft_to_target_V, after.draft_to_target_V)
    assert set(shipped.manifest.files) == {"README.md", "config.json", "model.safetensors"}
    assert shipped.manifest.plan.parents["run"] == training_manifest(target).fingerprint
    found = find_shipped_head(str(target), root=tmp_path / "heads")
    assert found is not None
    assert found.manifest.fingerprint == shipped.manifest.fingerprint
    again = ship(head, target, tmp_path / "heads")
    assert again.manifest.fingerprint == shipped.manifest.fingerprint


def test_rows_that_are_the_targets_are_not_shipped(tmp_path: Path, target: Path) -> None:
    head = save_random_head(target, tmp_path / "run", turned_rows=True)
    shipped = ship(head, target, tmp_path / "heads")
    stored = load_file(shipped.directory / "model.safetensors")
    assert "lm_head.weight" not in stored
    before, after = load_head(head), load_head(shipped.directory)
    assert after.config == before.config
    assert torch.equal(before.state_dict()["lm_head.turn"].bfloat16(), stored["lm_head.turn"])
    assert torch.equal(before.draft_to_target_V, after.draft_to_target_V)
    numbers = sum(tensor.numel() for tensor in stored.values() if tensor.is_floating_point())
    card = (shipped.directory / "README.md").read_text()
    assert f"| size | {numbers:,} parameters, 0.0 MB in bfloat16 |" in card
    assert "| output rows | the target's, turned by a learned matrix |" in card

    found = find_shipped_head(str(target), root=tmp_path / "heads")
    assert found is not None
    params = SamplingParams(max_tokens=8)
    texts = []
    for directory in (found.directory, None):
        engine = Engine.load(str(target), head=directory, device="cpu", dtype="float32")
        texts.append([one.token_ids for one in engine.generate([(5, 9, 13)], params)])
        assert (directory is not None) == (sum(engine.stats.offered_at_depth) > 0)
    assert texts[0] == texts[1]


def test_the_card_says_which_tokens_a_cpu_drafts(tmp_path: Path, target: Path) -> None:
    found = load_head(save_random_head(target, tmp_path / "all"))
    size = found.config.draft_vocab_size
    found.common_V = torch.arange(size) < 7
    save_head(found, tmp_path / "run")
    shipped = ship(tmp_path / "run", target, tmp_path / "heads")
    read = load_head(shipped.directory)
    assert read.common_V is not None
    assert torch.equal(read.common_V, found.common_V)
    said = f"{size:,} of {found.config.vocab_size:,} tokens; on a CPU the 7 of them that are common"
    assert f"| draft vocabulary | {said} |" in (shipped.directory / "README.md").read_text()


def test_units_that_do_nothing_stay_behind_and_the_card_says_so(
    tmp_path: Path, target: Path
) -> None:
    wide = load_head(save_random_head(target, tmp_path / "all", intermediate_size=130))
    with torch.no_grad():
        wide.midlayer.mlp.down_proj.weight[:, 10:20] = 0.0
    save_head(wide, tmp_path / "run")
    training = training_manifest(target)
    settings = {**training.plan.settings, "head": {"mlp_width": 130}}
    training = replace(training, plan=replace(training.plan, settings=settings))
    shipped = ship(tmp_path / "run", target, tmp_path / "heads", training=training)
    assert load_head(shipped.directory).config.intermediate_size == 128
    card = (shipped.directory / "README.md").read_text()
    said = "128; 2 of 130 that were trained did nothing and are left out"
    assert f"| MLP width | {said} |" in card


def test_the_card_says_where_attention_is_not_the_targets(tmp_path: Path, target: Path) -> None:
    wide = save_random_head(target, tmp_path / "run", num_heads=8, num_kv_heads=4)
    training = training_manifest(target)
    cards = []
    for number, asked in enumerate(({}, {"attention_heads": 8})):
        settings = {**training.plan.settings, "head": asked}
        known = replace(training, plan=replace(training.plan, settings=settings))
        shipped = ship(wide, target, tmp_path / f"heads{number}", training=known)
        cards.append((shipped.directory / "README.md").read_text())
    assert "| attention |" not in cards[0]
    assert "| attention | 8 query heads, 4 key-value heads |" in cards[1]


def test_a_tuning_goes_along_without_places_and_losers(
    tmp_path: Path, head: Path, target: Path
) -> None:
    weights = weights_of(target)
    first = ship(head, target, tmp_path / "heads")
    for known in (fingerprint(head), fingerprint(first.directory)):
        document = tuning(known, weights, settings={"suites": ["/data/bench/gsm8k.jsonl"]})
        shipped = ship(head, target, tmp_path / "heads", tunings={"cpu": document})
        file = shipped.directory / tuning_file("cpu")
        assert "/data" not in file.read_text()
        assert "/somewhere" not in file.read_text()
        tuned = read_tuned(file)
        assert (tuned.tree.depth, tuned.controller) == (3, "fixed")
        assert tuned.made_for is not None
        assert tuned.made_for.fingerprint == fingerprint(shipped.directory)
        assert shipped.tuned_kinds == ("cpu",)


def test_the_card_says_what_was_measured(tmp_path: Path, head: Path, target: Path) -> None:
    known = fingerprint(head)
    shipped = ship(
        head,
        target,
        tmp_path / "heads",
        checkpoint="step-00000014",
        corpora=[corpus()],
        data=[data_card()],
        scorecards=[scorecard(known)],
        tunings={"cpu": tuning(known, weights_of(target))},
        benches=[bench()],
    )
    card = (shipped.directory / "README.md").read_text()
    for line in (
        "| gsm8k | 3.25 [3.00, 3.50] | 3.12 | 1.75 [1.50, 2.00] | 1,234.5 | 700.2 |",
        "bfloat16 on NVIDIA H200, greedy, chain of 7, fixed controller",
        "39 of 40 answers equal plain decoding's.",
        "| cpu | float32 on cpu | depth 3, width 2, budget 5, fixed | 1 | 1.50 [1.25, 1.75] |",
        "| 32 | 1.06 [1.00, 1.12] | not measured |",
        "| self | the target itself | Apache-2.0 | 3,400 |",
        "11 identifiers replaced or dropped. 17 rows left out",
        "4,600 samples, 900,000 tokens, 700,000 of them answers",
        "98.8% of what it said",
        "| checkpoint | step-00000014 |",
        "| tokens seen | 14,336 in 2 epochs |",
        "| loss | soft_cross_entropy, 7 draft steps, each 0.8 of the one before |",
        "| optimizer | AdamW, learning rate 0.001 |",
        "| licence of the head | MIT |",
        f"| size | {sum(one.numel() for one in load_head(head).parameters()):,} parameters, ",
    ):
        assert line in card
    assert "output rows" not in card


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, "EAGLE-3, one layer"),
        ({"norm_before_fc": True}, "EAGLE-3 (norm_before_fc)"),
        (
            {"fc_norm": True, "norm_before_residual": True},
            "EAGLE-3.1 (fc_norm, norm_before_residual)",
        ),
    ],
)
def test_the_card_says_which_norms_a_head_has(
    tmp_path: Path, target: Path, flags: dict[str, Any], kind: str
) -> None:
    head = save_random_head(target, tmp_path / "run", **flags)
    card = (ship(head, target, tmp_path / "heads").directory / "README.md").read_text()
    assert f"| kind | {kind} |" in card


def test_the_card_says_how_it_was_trained(tmp_path: Path, head: Path, target: Path) -> None:
    plan = training_manifest(target).plan
    settings = {
        **plan.settings,
        "max_steps": 28,
        "sources": ["own*2", "math"],
        "loss": {
            **plan.settings["loss"],
            "chain_weights": True,
            "target_temperature": 0.7,
            "early_steps": 3,
            "early_share": 0.6,
        },
        "optimizer": {"kind": "muon", "learning_rate": 2e-3, "muon_rate": 0.05, "muon_decay": 0.1},
    }
    training = replace(training_manifest(target), plan=replace(plan, settings=settings))
    card = card_of(head, training, target, tmp_path)
    for line in (
        "| tokens seen | 14,336 |",
        "| sources, times an epoch | own*2, math |",
        "7 draft steps, 3 in the first 60%, the target's probabilities at temperature 0.7, "
        "each 0.8 of the one before, each by how likely the guesses before it are accepted |",
        "| optimizer | Muon for matrices, rate 0.05, weight decay 0.1; AdamW for the rest, ",
    ):
        assert line in card


def test_all_corpora_are_on_the_card(tmp_path: Path, head: Path, target: Path) -> None:
    first = corpus()
    second = replace(first, counts={**first.counts, "samples": 400, "tokens": 100_000})
    training = training_manifest(target)
    parents = {"corpus": first.fingerprint, "corpus 2": second.fingerprint}
    training = replace(training, plan=replace(training.plan, parents=parents))
    options: dict[str, Any] = {"target": str(target), "root": tmp_path, "licence": "MIT"}
    given = Evidence(training=training, corpora=[first, second])
    shipped = ship_head(head, given, **options, progress=SilentProgress())
    card = (shipped.directory / "README.md").read_text()
    assert "5,000 samples, 1,000,000 tokens, 1,400,000 of them answers, in 2 corpora." in card
    assert "covers 98.8% of what it said in the first." in card
    assert card.count("| tokenize |") == 2
    turned = replace(given, corpora=[second, first])
    with pytest.raises(MismatchError, match=r"and \w{16}, and --corpus names \w{16} and \w"):
        ship_head(head, turned, **options, progress=SilentProgress())


def test_a_vocabulary_that_the_run_chose_is_not_the_corpus(
    tmp_path: Path, head: Path, target: Path
) -> None:
    plan = training_manifest(target).plan
    for size, is_said in ((0, True), (64, False)):
        settings = {**plan.settings, "head": {"draft_vocab_size": size}}
        training = replace(training_manifest(target), plan=replace(plan, settings=settings))
        card = card_of(head, training, target, tmp_path)
        assert "700,000 of them answers." in card
        assert ("draft vocabulary covers 98.8% of what it said." in card) == is_said


def card_of(head: Path, training: Manifest, target: Path, root: Path) -> str:
    """What the card says of a head that was trained so on the corpus."""
    shipped = ship_head(
        head,
        Evidence(training=trained_on(training, corpus().fingerprint), corpora=[corpus()]),
        target=str(target),
        root=root,
        licence="MIT",
        progress=SilentProgress(),
    )
    return (shipped.directory / "README.md").read_text()


def trained_on(training: Manifest, corpus: str) -> Manifest:
    return replace(training, plan=replace(training.plan, parents={"corpus": corpus}))


Damage = Callable[[Evidence], Evidence]
FOREIGN = tuning("another head", "other weights")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda given: replace(
                given, training=training_manifest(Path("other"), weights="of another")
            ),
            MismatchError,
            "trained for other with weights of another, and .* has weights",
        ),
        (
            lambda given: replace(given, tunings={"cpu": FOREIGN}),
            MismatchError,
            "tuning for cpu was made for the head /somewhere/.*run `fledge tune` for it",
        ),
        (
            lambda given: replace(given, tunings={"tpu": FOREIGN}),
            MismatchError,
            "tpu is no kind of device",
        ),
        (
            lambda given: replace(
                given, training=trained_on(given.training, "an older corpus"), corpora=[corpus()]
            ),
            MismatchError,
            "trained on the corpus an older corpus, and --corpus names [0-9a-f]{16}; name there",
        ),
        (
            lambda given: replace(given, scorecards=[scorecard("another head")]),
            MismatchError,
            r"measured \['run'\], and not the head that is shipped",
        ),
    ],
)
def test_what_is_about_another_head_is_refused(
    change: Damage, error: type[FledgeError], message: str, tmp_path: Path, head: Path, target: Path
) -> None:
    given = change(Evidence(training=training_manifest(target)))
    with pytest.raises(error, match=message):
        ship_head(
            head,
            given,
            target=str(target),
            root=tmp_path,
            licence="MIT",
            progress=SilentProgress(),
        )
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_tuning_is_refused(tmp_path: Path, head: Path, target: Path) -> None:
    document = tuning(fingerprint(head), weights_of(target), state="unfinished")
    with pytest.raises(MismatchError, match="the tuning for cpu is unfinished"):
        ship(head, target, tmp_path, tunings={"cpu": document})


def test_a_tuning_on_another_kind_of_device_is_refused(
    tmp_path: Path, head: Path, target: Path
) -> None:
    document = tuning(fingerprint(head), weights_of(target))
    with pytest.raises(MismatchError, match="the tuning for cuda was made on cpu; run"):
        ship(head, target, tmp_path, tunings={"cuda": document})


def test_a_large_head_is_refused(
    tmp_path: Path, head: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "MOST_BYTES", 1000)
    with pytest.raises(CapacityError, match=r"takes .* in bfloat16, .* less than 1\.0 kB"):
        ship(head, target, tmp_path)


def test_a_broken_head_is_refused(tmp_path: Path, head: Path, target: Path) -> None:
    broken = load_head(head)
    with torch.no_grad():
        broken.fc.weight[0, 0] = torch.nan
    save_head(broken, tmp_path / "broken")
    with pytest.raises(ArtifactError, match=r"fc\.weight in .* no numbers"):
        ship(tmp_path / "broken", target, tmp_path / "heads")
