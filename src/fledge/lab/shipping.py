"""Makes the directory of a head that comes with fledge: bfloat16, slim, tuned, with its card.

Everything is checked before anything is written: the head was trained for the target's weights, its
files are small enough and read back as they were written, and every document is about this head.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge.contracts import provenance
from fledge.contracts.errors import ArtifactError, CapacityError, MismatchError
from fledge.contracts.progress import Progress
from fledge.lab.candidates import Candidate, fingerprints, strange_weights
from fledge.lab.head_card import Document, Evidence, render_card
from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head, write_head_files
from fledge.models.head_weights import WEIGHTS
from fledge.models.idle_units import without_idle_units
from fledge.models.resolve import resolve_target
from fledge.models.shipped_heads import DEVICE_KINDS, ShippedHead, tuning_file
from fledge.models.weights_identity import weights_identity
from fledge.store.cache_publish import publish_directory
from fledge.store.capacity import format_bytes
from fledge.store.catalogue import CATALOGUE, Alias
from fledge.store.corpus import corpus_fingerprints
from fledge.store.hashing import hash_file
from fledge.store.manifest import HEAD, Manifest, Plan, write_json

MOST_BYTES = 20_000_000
CARD_NAME = "README.md"


def ship_head(
    directory: Path,
    evidence: Evidence,
    *,
    target: str,
    root: Path,
    licence: str,
    progress: Progress,
    catalogue: Mapping[str, Alias] = CATALOGUE,
) -> ShippedHead:
    """Write `root/NAME` for the head in a directory, in place of an earlier one."""
    alias = catalogue.get(target)
    name = Path(target).name if alias is None else alias.name
    _check_target(evidence.training, resolve_target(target, progress=progress).directory, target)
    _check_corpora(evidence)
    source = load_head(directory)
    strange = strange_weights(source)
    if strange is not None:
        raise ArtifactError(f"{strange} in {directory} holds values that are no numbers.")
    head = without_idle_units(copy.deepcopy(source).to(torch.bfloat16))
    with publish_directory(root / name) as staging:
        write_head_files(head, staging)
        _check_files(staging, head)
        known = {_fingerprint(one, progress) for one in (directory, staging)}
        evidence = replace(evidence, tunings=_own_tunings(evidence, known, name))
        _check_scorecards(evidence, known)
        for kind, document in evidence.tunings.items():
            own = {**document["made_for"], "head": _fingerprint(staging, progress)}
            write_json(staging / tuning_file(kind), {**document, "made_for": own})
        card = render_card(
            name,
            alias,
            head,
            evidence,
            fingerprints=frozenset(known),
            weights_bytes=(staging / WEIGHTS).stat().st_size,
            licence=licence,
        )
        (staging / CARD_NAME).write_text(card, encoding="utf-8")
        manifest = _make_manifest(staging, evidence, name, alias, licence, progress)
        manifest.write(staging)
    return ShippedHead(target=name, directory=root / name, manifest=manifest)


def _check_target(training: Manifest, directory: Path, target: str) -> None:
    trained, found = training.plan.identity.get("weights"), weights_identity(directory)
    if training.plan.kind != HEAD or trained != found:
        raise MismatchError(
            f"the head was trained for {training.plan.identity.get('target')} with weights "
            f"{trained}, and {target} has weights {found}; name its own target."
        )


def _check_corpora(evidence: Evidence) -> None:
    trained = corpus_fingerprints(evidence.training.plan.parents)
    given = [corpus.fingerprint for corpus in evidence.corpora]
    # Features are a parent of their own, and do not say here which corpus they come from.
    if trained and given and trained != given:
        theirs, ours = (" and ".join(one[:16] for one in found) for found in (trained, given))
        raise MismatchError(
            f"the head was trained on the corpus {theirs}, and --corpus names {ours}; name there "
            "what it was trained on, in the same order."
        )


def _check_files(staging: Path, head: Eagle3Head) -> None:
    size = (staging / WEIGHTS).stat().st_size
    if size >= MOST_BYTES:
        raise CapacityError(
            f"the head takes {format_bytes(size)} in bfloat16, and one that comes with fledge may "
            f"take less than {format_bytes(MOST_BYTES)}; train one with a narrower MLP, a "
            "smaller draft vocabulary or train.head.turned_rows."
        )
    written = load_head(staging)
    for name, tensor in head.state_dict().items():
        if not torch.equal(written.state_dict()[name], tensor):
            raise ArtifactError(f"{name} does not read back as it was written; try again.")


def _fingerprint(directory: Path, progress: Progress) -> str:
    return fingerprints([Candidate(name="head", directory=directory)], progress)["head"]


def _own_tunings(evidence: Evidence, known: set[str], name: str) -> dict[str, dict[str, Any]]:
    """The tunings without paths of the machine they were made on and without shapes that lost."""
    found = {}
    for kind, document in evidence.tunings.items():
        if kind not in DEVICE_KINDS:
            raise MismatchError(f"{kind} is no kind of device; it must be one of {DEVICE_KINDS}.")
        made_for = document.get("made_for") or {}
        weights = evidence.training.plan.identity["weights"]
        if made_for.get("head") not in known or made_for.get("weights") != weights:
            raise MismatchError(
                f"the tuning for {kind} was made for the head {document.get('head')}, and not for "
                "the one that is shipped; run `fledge tune` for it."
            )
        if document.get("state") != "finished" or document.get("best") is None:
            raise MismatchError(f"the tuning for {kind} is unfinished; run `fledge tune` again.")
        if (document["device"] == "cpu") != (kind == "cpu"):
            raise MismatchError(
                f"the tuning for {kind} was made on {document['device']}; run `fledge tune` on "
                f"such a device, or name another kind of {DEVICE_KINDS}."
            )
        rows = [row for row in document["rows"] if row["state"] == "final"]
        found[kind] = _without_places({**document, "head": name, "rows": rows})
    return found


def _check_scorecards(evidence: Evidence, known: set[str]) -> None:
    for card in evidence.scorecards:
        heads = {one["fingerprint"]: one["name"] for one in card["heads"] if one["rank"]}
        if not known & heads.keys():
            raise MismatchError(
                f"a scorecard of {card['provenance']['date']} measured {sorted(heads.values())}, "
                "and not the head that is shipped; run `fledge select` for it."
            )


def _without_places(value: Any) -> Any:
    """Absolute paths by their last name, everywhere in a document."""
    if isinstance(value, dict):
        return {key: _without_places(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_places(one) for one in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _make_manifest(
    staging: Path,
    evidence: Evidence,
    name: str,
    alias: Alias | None,
    licence: str,
    progress: Progress,
) -> Manifest:
    training = evidence.training
    identity = {**training.plan.identity, "target": name, "dtype": "bfloat16", "licence": licence}
    if alias is not None:
        identity["payload"] = alias.sha256
    return Manifest(
        plan=Plan(
            kind=HEAD,
            settings=training.plan.settings,
            parents={"run": training.fingerprint},
            identity=identity,
        ),
        counts=training.counts,
        files={
            path.name: {"bytes": path.stat().st_size, "sha256": hash_file(path, progress)}
            for path in sorted(staging.iterdir())
        },
        provenance=provenance.collect(device="none"),
    )


def is_about(document: Document, kind: str) -> bool:
    """Whether a document is of a kind: scorecard, tuning, bench or data."""
    keys = {
        "scorecard": {"heads", "plain", "verdict"},
        "tuning": {"rows", "best", "made_for"},
        "bench": {"comparisons", "arms"},
        "data": {"sources", "totals", "filters"},
    }
    return keys[kind] <= document.keys()
