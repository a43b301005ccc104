"""What visits measured, as the journal keeps it: a visit counts when all its answers are there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.lab.measure import Answer, Measured
from fledge.lab.visits import PLAIN

_SAID = ("token_ids", "text")
_SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitRecord:
    """One group, answered by plain decoding and by some heads."""

    number: int
    task: str
    group: int
    repeat: int
    arms: Mapping[str, Measured]

    @property
    def plain(self) -> Measured:
        return self.arms[PLAIN]

    @property
    def heads(self) -> list[str]:
        return [name for name in self.arms if name != PLAIN]

    def to_json(self) -> dict[str, Any]:
        """Answers that equal the plain ones, as nearly all do, are not written twice."""
        arms = {name: measured.to_json() for name, measured in self.arms.items()}
        for name in self.heads:
            pairs = zip(arms[name]["answers"], arms[PLAIN]["answers"], strict=True)
            for table, plain in pairs:
                if all(table[key] == plain[key] for key in _SAID):
                    for key in _SAID:
                        del table[key]
                    table[_SAME] = True
        place = {"task": self.task, "group": self.group, "repeat": self.repeat}
        return {**place, "arms": arms}

    @classmethod
    def from_json(cls, number: int, table: Mapping[str, Any]) -> "VisitRecord":
        plain = Measured.from_json(table["arms"][PLAIN])
        arms = {
            name: plain if name == PLAIN else _restored(one, plain)
            for name, one in table["arms"].items()
        }
        place = {key: table[key] for key in ("task", "group", "repeat")}
        return cls(number=number, arms=arms, **place)


def _restored(table: Mapping[str, Any], plain: Measured) -> Measured:
    answers = []
    for one, other in zip(table["answers"], plain.answers, strict=True):
        said = {"token_ids": other.token_ids, "text": other.text} if one.get(_SAME) else {}
        answers.append(Answer.from_json({**{key: one[key] for key in one if key != _SAME}, **said}))
    return Measured(answers=tuple(answers), seconds=table["seconds"])


def answers_of(records: Iterable[VisitRecord], arm: str) -> list[Answer]:
    """All answers of an arm, in the order they were made."""
    return [one for record in records if arm in record.arms for one in record.arms[arm].answers]


def paired_answers(
    records: Sequence[VisitRecord], head: str
) -> list[tuple[VisitRecord, Answer, Answer]]:
    """Each answer with the head, and the plain one of the same visit."""
    return [
        (record, own, plain)
        for record in records
        if head in record.arms
        for own, plain in zip(record.arms[head].answers, record.plain.answers, strict=True)
    ]
