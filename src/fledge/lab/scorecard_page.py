"""The scorecard as a page for people."""

from collections.abc import Mapping
from typing import Any

from fledge.lab.scorecard import shown

PAGE_NAME = "scorecard.md"


def write_page(card: Mapping[str, Any]) -> str:
    """Markdown."""
    parts = [
        f"# Heads for {card['target']}",
        card["verdict"],
        _conditions(card),
        _ranking(card),
        _tasks(card),
        _sameness(card),
        _scores(card),
        _failures(card),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _conditions(card: Mapping[str, Any]) -> str:
    settings, cost = card["settings"], card["cost"]
    tree = settings["tree"]
    suites = ", ".join(
        f"{one['name']} ({one['num_prompts']} prompts, {one['source']})" for one in card["suites"]
    )
    lines = [
        f"Suites: {suites}.",
        f"Answers of at most {settings['max_tokens']} tokens at temperature "
        f"{settings['temperature']:g}, {settings['concurrency']} in flight, trees of depth "
        f"{tree['depth']}, width {tree['width']} and budget {tree['budget']}, "
        f"{settings['controller']} controller, {card['dtype']} on {card['device']}.",
        f"{card['visits']['done']} of {card['visits']['planned']} visits; intervals are of 95%.",
    ]
    if cost["saved_share"] > 0:
        lines.append(
            f"Giving up slower heads early takes {cost['runs_planned']:,} answers instead of "
            f"{cost['runs_without_halving']:,} ({cost['saved_share']:.0%} saved)."
        )
    if not card["has_chat_template"]:
        lines.append("The target has no chat template: it continued the plain texts.")
    if card["num_left_out"]:
        lines.append(f"Left out as too long for the context: {card['num_left_out']} questions.")
    if card["state"] != "finished":
        lines.insert(0, "**Unfinished**: the run was interrupted; these are its figures so far.")
    return "\n".join(f"- {line}" for line in lines)


def _ranking(card: Mapping[str, Any]) -> str:
    rows = [
        [
            str(one["rank"]),
            one["name"],
            shown(one["speed_up"]),
            shown(one["speed_up_before_loops"]) if one["speed_up_before_loops"] else "",
            shown(one["accept_length"]),
            shown(one["behind_best"]) if one["behind_best"] else "",
            "tied with the best" if one["is_tied_with_best"] else "",
            f"{one['state']}, {one['num_visits']} visits",
        ]
        for one in card["heads"]
        if one["rank"]
    ]
    names = ["rank", "head", "speed-up", "without loops", "accept length", "behind the best"]
    return _table([*names, "", "state"], rows) if rows else ""


def _tasks(card: Mapping[str, Any]) -> str:
    rows = []
    for one in card["heads"]:
        for task, found in (one.get("tasks") or {}).items():
            figures, plain = found["figures"], card["plain"]["tasks"][task]
            rows.append(
                [
                    one["name"],
                    task,
                    shown(found["speed_up"]),
                    shown(found["accept_length"]),
                    " ".join(
                        "-" if a is None else f"{a:.2f}" for a in figures["acceptance_at_depth"]
                    ),
                    _rate(figures["tokens_per_s"]),
                    _rate(plain["tokens_per_s"]),
                    f"{figures['looping_share']:.0%}",
                    _rate(figures["accept_length_before_loops"], 2),
                ]
            )
    names = ["head", "task", "speed-up", "accept length", "acceptance at depth 1, 2, ..."]
    names += ["tokens/s", "plain tokens/s", "looping tokens", "accept length before loops"]
    return "## Tasks\n\n" + _table(names, rows) if rows else ""


def _sameness(card: Mapping[str, Any]) -> str:
    rows = []
    for one in card["heads"]:
        found = one.get("differences")
        if found is not None:
            steps = [each["steps"] for each in found["first"] if each["steps"] is not None]
            rows.append(
                [
                    one["name"],
                    f"{found['num_compared'] - found['num_different']} of {found['num_compared']}",
                    f"{max(steps):.1f} steps" if steps else "",
                ]
            )
    names = ["head", "answers equal to plain decoding", "largest margin where they part"]
    return "## The same answers\n\n" + _table(names, rows) if rows else ""


def _scores(card: Mapping[str, Any]) -> str:
    arms = [("plain decoding", card["plain"]["scores"])]
    arms += [(one["name"], one.get("scores") or {}) for one in card["heads"]]
    rows = [
        [name, task, str(one["right"]), str(one["wrong"]), str(one["unknown"])]
        for name, scores in arms
        for task, one in scores.items()
    ]
    note = card["scoring_problem"]
    text = f"\n\nPrograms were not run: {note}." if note else ""
    names = ["with", "task", "right", "wrong", "unknown"]
    return "## Right answers\n\n" + _table(names, rows) + text if rows else ""


def _failures(card: Mapping[str, Any]) -> str:
    lines = [f"- {one['name']}: {one['error']}" for one in card["heads"] if one["error"]]
    return "## Failed\n\n" + "\n".join(lines) if lines else ""


def _rate(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _table(names: list[str], rows: list[list[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(_cell(one) for one in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
