"""Puts what vLLM and fledge reached side by side: the `join` of `compare_vllm.py`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEASURES = {"tokens_per_s": "whole run", "decode_tokens_per_s": "decoding alone"}
PLAIN = "plain"


def join(subjects: Sequence[str]) -> dict[str, Any]:
    """`subjects` are NAME=VLLM.json,OURS.json: of ours there may be several."""
    found = {}
    for subject in subjects:
        name, _, paths = subject.partition("=")
        theirs, *ours = (
            json.loads(Path(path).read_text(encoding="utf-8")) for path in paths.split(",")
        )
        found[name] = _join_one(theirs, ours)
    return {"what": "vLLM and fledge on the same machine in the same hour", "subjects": found}


def _join_one(theirs: dict[str, Any], ours: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ways: dict[str, dict[str, Any]] = {}
    for document in ours:
        for size, cells in document["cells"].items():
            ways.setdefault(size, {}).update(cells)
    sizes = sorted({size for cells in theirs["cells"].values() for size in cells}, key=int)
    return {
        "vllm": theirs["vllm"],
        "provenance": {
            "vllm": theirs["provenance"],
            "fledge": [document["provenance"] for document in ours],
        },
        "failed_in_vllm": theirs["failed"],
        "skipped_in_vllm": theirs.get("skipped", {}),
        "cells": {
            size: {
                measure: _cell(
                    {
                        chain: cells[size][measure]
                        for chain, cells in theirs["cells"].items()
                        if size in cells
                    },
                    ways.get(size, {}),
                    measure,
                )
                for measure in MEASURES
            }
            for size in sizes
        },
    }


def _cell(chains: dict[str, float], ways: dict[str, Any], measure: str) -> dict[str, Any]:
    best = max(chains, key=lambda chain: chains[chain])
    found: dict[str, Any] = {
        "vllm_by_chain": chains,
        "vllm_best_chain": int(best),
        "vllm_best": chains[best],
        "fledge": {way: cell[measure] for way, cell in ways.items()},
    }
    if PLAIN in ways and "0" in chains:
        found["plain_over_vllm_plain"] = ways[PLAIN][measure] / chains["0"]
    if ways:
        chosen = "adaptive" if "adaptive" in ways else max(ways, key=lambda w: ways[w][measure])
        found |= {
            "fledge_way": chosen,
            "fledge_over_vllm_best": ways[chosen][measure] / chains[best],
        }
        if PLAIN in ways:
            found["over_own_plain"] = ways[chosen].get("over_plain") or _against_plain(
                ways[chosen], ways[PLAIN]
            )
    return found


def _against_plain(one: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """Ratio of whole runs: of the best rounds, and the lowest and highest of any two."""
    ratios = [p / s for p in plain["seconds"] for s in one["seconds"]]
    return {
        "ratio": min(plain["seconds"]) / min(one["seconds"]),
        "low": min(ratios),
        "high": max(ratios),
    }


def markdown(document: dict[str, Any]) -> str:
    """A table for each subject and measure."""
    lines = []
    for name, subject in document["subjects"].items():
        for measure, title in MEASURES.items():
            cells = {size: both[measure] for size, both in subject["cells"].items()}
            ways = list(dict.fromkeys(way for cell in cells.values() for way in cell["fledge"]))
            heads = ["requests", "vLLM plain", "vLLM best (chain)", *(f"fledge {w}" for w in ways)]
            heads += ["over vLLM plain", "over vLLM best"]
            lines += [f"{name}, tokens a second, {title}:", "", _row(heads)]
            lines.append(_row(["--:"] * len(heads)))
            lines += [_row(_numbers(size, cell, ways)) for size, cell in cells.items()]
            lines.append("")
    return "\n".join(lines)


def _numbers(size: str, cell: dict[str, Any], ways: Sequence[str]) -> list[str]:
    theirs, ours = cell["vllm_by_chain"], cell["fledge"]
    return [
        size,
        _whole(theirs.get("0")),
        f"{_whole(cell['vllm_best'])} ({cell['vllm_best_chain']})",
        *(_whole(ours.get(way)) for way in ways),
        _ratio(cell.get("plain_over_vllm_plain")),
        _ratio(cell.get("fledge_over_vllm_best")),
    ]


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _row(words: Sequence[str]) -> str:
    return "| " + " | ".join(words) + " |"
