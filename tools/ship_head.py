"""Put a trained head into the package, as the default head of its target.

    python tools/ship_head.py runs/smollm2/train --target smollm2-135m-instruct \
        --corpus runs/smollm2/tokenize --data runs/smollm2/prepare \
        --select runs/smollm2/select --tuned cuda=runs/smollm2/tune cpu=tuned-cpu

HEAD is a directory of `fledge train`, or one of its checkpoints. Figures of the card come from the
documents that are named here; a document about another head is refused. Run again with more
documents, it writes the directory anew. A head that went on from another one (`fledge train
--from`) needs --earlier: the run of that head, or several, the first one first.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fledge.cli.progress import terminal_progress
from fledge.contracts.errors import ArtifactError, FledgeError, MismatchError
from fledge.contracts.recipe import DEFAULT_TARGET
from fledge.lab.head_card import Evidence
from fledge.lab.shipping import is_about, ship_head
from fledge.models.head_files import load_head
from fledge.models.shipped_heads import SHIPPED_HEADS
from fledge.store.capacity import format_bytes
from fledge.store.manifest import HEAD, MANIFEST_NAME, Manifest, read_manifest
from fledge.training.starting_head import StartingHead

_FILES = {
    "scorecard": "scorecard.json",
    "tuning": "tune.json",
    "bench": "bench.json",
    "data": "card.json",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "default": []}
    parser.add_argument("head", type=Path, help="directory of `fledge train`, or a checkpoint")
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--licence", default="Apache-2.0", help="licence of the head")
    parser.add_argument("--corpus", type=Path, help="what `fledge tokenize` made", **several)
    parser.add_argument("--earlier", type=Path, help="runs it went on from", **several)
    parser.add_argument("--data", type=Path, **several)
    parser.add_argument("--select", type=Path, **several)
    parser.add_argument("--tuned", metavar="cpu=DIR|cuda=DIR", **several)
    parser.add_argument("--bench", type=Path, **several)
    parser.add_argument("--root", type=Path, default=SHIPPED_HEADS)
    given = parser.parse_args()
    try:
        training = _training(given.head)
        evidence = Evidence(
            training=training,
            earlier=_earlier(training, given.earlier),
            checkpoint=given.head.name if given.head.parent.name == "checkpoints" else None,
            corpora=[read_manifest(path) for path in given.corpus],
            data=[_read(path, "data") for path in given.data],
            scorecards=[_read(path, "scorecard") for path in given.select],
            tunings=dict(_tuning(one) for one in given.tuned),
            benches=[_read(path, "bench") for path in given.bench],
        )
        shipped = ship_head(
            given.head,
            evidence,
            target=given.target,
            root=given.root,
            licence=given.licence,
            progress=terminal_progress(),
        )
    except FledgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{shipped.directory}: {format_bytes(shipped.stored_bytes)}")
    return 0


def _training(head: Path) -> Manifest:
    """The manifest of the run: beside the head, or above the checkpoints."""
    for place in (head, head.parent.parent):
        if (place / MANIFEST_NAME).is_file():
            return read_manifest(place)
    raise ArtifactError(f"{head} is neither a finished run of `fledge train` nor a checkpoint.")


def _earlier(training: Manifest, runs: list[Path]) -> list[Manifest]:
    """The runs before it, each checked to have made the head that the next one went on from."""
    manifests = [_training(run) for run in runs]
    made: list[str | None] = [None]
    made += [StartingHead(run, load_head(run).float()).fingerprint for run in runs]
    for before, run in zip(made, [*manifests, training], strict=True):
        if run.plan.parents.get(HEAD) != before:
            began = "another head" if HEAD in run.plan.parents else "no other head"
            raise MismatchError(
                f"the run of {run.provenance['date']} went on from {began}, and --earlier says "
                "otherwise; name there the runs of the heads before it, the first one first."
            )
    return manifests


def _tuning(typed: str) -> tuple[str, dict[str, Any]]:
    kind, equals, path = typed.partition("=")
    if not equals:
        raise ArtifactError(f"--tuned {typed} is not of the form cpu=DIR or cuda=DIR.")
    return kind, _read(Path(path), "tuning")


def _read(path: Path, kind: str) -> dict[str, Any]:
    """A document: a stage's directory, or the file itself."""
    file = path / _FILES[kind] if path.is_dir() else path
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file} cannot be read: {error}") from error
    if not isinstance(document, dict) or not is_about(document, kind):
        raise ArtifactError(f"{file} is no {kind}.")
    return document


if __name__ == "__main__":
    sys.exit(main())
