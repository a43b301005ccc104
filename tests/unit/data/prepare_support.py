"""Small sources with something in them for every filter."""

import json
import random
import re
from pathlib import Path

from fledge.contracts.data_settings import (
    DecontaminateSettings,
    PrepareSettings,
    PrivacySettings,
    SourceSettings,
)

WORDS = re.findall(
    r"\w+",
    "river mountain teapot engine garden violin harbour lantern saddle copper meadow winter "
    "planet kitchen thunder orchard pencil bridge candle feather glacier hammer island jacket "
    "kettle ladder mirror needle oyster pepper quarry ribbon shovel tunnel umbrella valley",
)
BENCHMARK = "Explain in detail how a steam locomotive turns heat into motion on the rails today."


def sentence(rng: random.Random, num_words: int = 14) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words)).capitalize() + "."


def chat(text: str, answer: str = "Certainly.") -> str:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


def write_sources(directory: Path, *, num_rows: int = 200, seed: int = 1) -> PrepareSettings:
    """Files below `directory`, and settings that name them by relative paths.

    chat     num_rows good rows; 5 more that are equal to earlier ones, 4 nearly equal, 3 with the
             benchmark's prompt, 2 with a card number, which is dropped; 2 malformed lines
    prompts  num_rows // 2 lines, 6 of them with an e-mail address
    shared   num_rows // 4 conversations of two turns, 1 of them without turns
    """
    rng = random.Random(seed)
    texts = [sentence(rng, 60) for _ in range(num_rows)]
    lines = [chat(text) for text in texts]
    lines += [chat(text, answer="Another answer.") for text in texts[:5]]
    lines += [chat(f"{text} Please") for text in texts[5:9]]
    lines += [chat(f"{sentence(rng, 3)} {BENCHMARK} {number}") for number in range(3)]
    lines += [chat(f"{sentence(rng)} My card is 4111 1111 1111 1111.") for _ in range(2)]
    rng.shuffle(lines)
    lines[3:3] = ['{"messages": [', "not JSON at all"]
    (directory / "chat.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    prompts = [sentence(rng) for _ in range(num_rows // 2)]
    prompts[:6] = [f"{sentence(rng)} Write to jo{i}@example.org today" for i in range(6)]
    (directory / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    shared = [
        {
            "conversations": [
                {"from": "human", "value": sentence(rng)},
                {"from": "gpt", "value": "Yes."},
                {"from": "human", "value": sentence(rng)},
                {"from": "gpt", "value": "No."},
            ]
        }
        for _ in range(num_rows // 4)
    ]
    shared[-1]["conversations"] = []
    (directory / "shared.json").write_text(json.dumps(shared, indent=1), encoding="utf-8")
    (directory / "bench.jsonl").write_text(json.dumps({"prompt": BENCHMARK}) + "\n")
    return PrepareSettings(
        sources=(
            SourceSettings(name="chat", path=("chat.jsonl",), licence="MIT"),
            SourceSettings(name="prompts", path=("prompts.txt",), licence="CC0-1.0"),
            SourceSettings(name="shared", path=("shared.json",), licence="Apache-2.0"),
        ),
        privacy=PrivacySettings(actions={"card": "drop"}),
        decontaminate=DecontaminateSettings(against=("bench.jsonl",)),
    )


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a finished directory except the manifest, which says when it was made."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
