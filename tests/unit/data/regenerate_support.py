"""Conversations to answer, and what the answers look like on disk."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fledge.contracts.conversation import Conversation, Message, Origin
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.endpoint import Endpoint
from fledge.data.regenerate.failures import Backoff
from fledge.data.regenerate.stage import regenerate
from fledge.data.regenerate.url_answerer import UrlAnswerer
from fledge.store.manifest import Manifest, Plan
from fledge.store.rows import row_files, rows_file, write_rows
from fledge.store.stage_directory import open_stage

FAST = Backoff(first_s=0.01, longest_s=0.1)
TOOLS = (
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}},
)


def say(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def row(number: int, *messages: Message, tools: tuple[dict[str, Any], ...] = ()) -> Conversation:
    return Conversation(
        id=f"chat/{number}",
        messages=messages,
        origin=Origin(source="chat", licence="CC0-1.0", file="chat.jsonl", row=number),
        tools=tools,
    )


def simple_rows(count: int, words: str = "") -> list[Conversation]:
    """One question each, with an answer that somebody else gave."""
    return [
        row(n, say("user", f"question {n}? {words}"), say("assistant", f"old answer {n}"))
        for n in range(1, count + 1)
    ]


def mixed_rows(count: int) -> list[Conversation]:
    """System prompts, many turns, tools, thinking, truncation: a bit of everything."""
    rows = []
    for n in range(1, count + 1):
        question = f"question {n}? {('', '[think]', '[long]', '[reason]')[n % 4]}"
        messages = [say("system", "be brief"), say("user", question), say("assistant", "old")]
        if n % 3 == 0:
            messages += [say("user", f"and then {n}?"), say("assistant", "old too")]
        if n % 5 == 0:
            messages += [
                say("user", f"weather {n}? [call weather]"),
                say("assistant", None, tool_calls=[call("weather", "old")]),
                say("tool", f"{n} degrees", tool_call_id="old"),
                say("assistant", "It is warm."),
            ]
        rows.append(row(n, *messages, tools=TOOLS if n % 5 == 0 else ()))
    return rows


def make_source(directory: Path, rows: Iterable[Conversation], rows_per_file: int = 40) -> Path:
    """A finished directory of conversations."""
    waiting = list(rows)
    with open_stage(directory, Plan(kind="conversations", settings={})) as stage:
        files = []
        for start in range(0, len(waiting), rows_per_file):
            path = rows_file(directory, len(files))
            write_rows(path, waiting[start : start + rows_per_file])
            files.append(path)
        sources = Counter(row.origin.source for row in waiting)
        stage.finish(counts={"rows": len(waiting), "sources": dict(sources)}, files=files)
    return directory


def ask(
    source: Path,
    out: Path,
    url: str,
    *,
    api_key: str | None = None,
    model: str = "tiny",
    give_up: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Manifest:
    """Regenerate through a URL, with short pauses."""
    chosen = RegenerateSettings(**{"concurrency": 8, "timeout_s": 1.0, **settings})
    shown = progress or SilentProgress()
    endpoint = Endpoint.parse(url, api_key)
    answerer = UrlAnswerer(endpoint, model, chosen, shown, FAST)
    return regenerate(source, out, chosen, answerer, progress=shown, give_up=give_up)


def output_bytes(directory: Path) -> dict[str, bytes]:
    """Everything that must not depend on how the run went."""
    return {path.name: path.read_bytes() for path in row_files(directory)}
