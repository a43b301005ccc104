"""Measures the feature codec: what each format loses, on invented and on real hidden states.

On a target's own hidden states three figures stand beside the bytes: the error of a token as a
share of its size; the error of a channel as a share of its spread, for the middle channel, the
worst tenth and the worst; and how often the probe behind `capture.layers = "auto"`, a ridge
regression fitted on decoded features, has the target's choice on top, and what share of the final
states' variance it misses. Final hidden rows are judged by what they do to the target's
distribution.

    python tools/measure_codec.py --target NAME --texts FILE.jsonl --out benchmarks/FILE.json

Texts are JSON lines; all strings of a line are joined. Without --target only invented data is used.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rival_codecs import (
    Rounding,
    by_tap,
    fp8_per_token,
    int8_per_token,
    lloyd_max,
    uniform,
    with_tables,
)
from torch import Tensor

from fledge.contracts.capture_settings import FeatureFormat
from fledge.contracts.feature_formats import FORMAT_BITS, FORMATS, block_size, row_bytes
from fledge.contracts.progress import SilentProgress
from fledge.contracts.provenance import collect
from fledge.features.channel_spread import channels_of
from fledge.features.probe_rows import ProbeRows, read_probe_rows
from fledge.features.sample_rows import SampleRows
from fledge.features.tap_probe import compare_taps
from fledge.features.taps import default_taps_of
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.target import Target
from fledge.ops.codec_tables import Tables, tables_on
from fledge.ops.feature_codec import make_codec
from fledge.store.channels import Channels
from fledge.store.corpus_shard import Sample

NUM_TAPS = 3
INVENTED_HIDDEN = 4096
ROUNDS = 5
RIDGE = 0.1


def variants(hidden_size: int, fitted: Tensor) -> dict[str, tuple[float, Rounding]]:
    """Everything that is compared: bits a value with scales, and what a row becomes."""
    found: dict[str, tuple[float, Rounding]] = {}
    num_taps = fitted.shape[1] // hidden_size
    channels = channels_of(fitted)
    for name in FORMATS:
        codec = make_codec(
            name,
            hidden_size=hidden_size,
            num_taps=num_taps,
            dtype=torch.bfloat16,
            channels=channels,
        )
        found[name] = (
            8 * codec.bytes_per_row / codec.width,
            lambda rows, codec=codec: codec.decode(codec.encode(rows), torch.float32),
        )
    block = block_size(hidden_size)
    for name, bits in FORMAT_BITS.items():
        usual = tables_on(bits, block, torch.device("cpu"))
        cost = bits + 16 / block
        found[f"{name}, channels as they are"] = (cost, with_tables(usual, None))
        if name in ("q5", "q4"):
            identity = usual._replace(hadamard_KK=math.sqrt(block) * torch.eye(block))
            found[f"{name}, not rotated"] = (cost, with_tables(identity, fitted))
            for rule in (lloyd_max, uniform):
                edges, levels = rule(bits)
                tables = Tables(usual.hadamard_KK, edges.float(), levels.float())
                label = f"{name}, {rule.__name__.replace('_', '-')} levels"
                found[label] = (cost, with_tables(tables, fitted))
    found["fp8 e4m3 per token"] = (8.0, by_tap(fp8_per_token, hidden_size))
    found["int8 per token"] = (8.0, by_tap(int8_per_token, hidden_size))
    return found


def errors(exact: Tensor, decoded: Tensor, spread: Tensor, hidden_size: int) -> dict[str, float]:
    sizes, misses = (
        torch.stack([tap.norm(dim=1) for tap in torch.split(rows, hidden_size, dim=1)])
        for rows in (exact, decoded - exact)
    )
    # The first tokens of a text are of another size; they would decide every mean.
    is_usual = (sizes < 10 * sizes.median(dim=1, keepdim=True).values).all(dim=0)
    channels = (decoded - exact)[is_usual].square().mean(dim=0).sqrt() / spread
    return {
        "token_error_median": round(float((misses / sizes.clamp_min(1e-30)).median()), 5),
        "channel_error_median": round(float(channels.median()), 5),
        "channel_error_p90": round(float(channels.quantile(0.9)), 5),
        "channel_error_worst": round(float(channels.max()), 5),
    }


def measure_invented(kind: str) -> list[dict[str, Any]]:
    """Three taps of a Gaussian; for `outliers` one channel of every 500 is 1000 times larger."""
    chance = torch.Generator().manual_seed(0)
    rows = torch.randn(1024, NUM_TAPS * INVENTED_HIDDEN, generator=chance)
    if kind == "outliers":
        rows[:, ::500] *= 1000
    fitted, judged = rows[:512], rows[512:]
    spread = torch.from_numpy(channels_of(fitted).spread)
    entries = []
    for name, (bits, rounding) in variants(INVENTED_HIDDEN, fitted).items():
        figures = errors(judged, rounding(judged), spread, INVENTED_HIDDEN)
        entries.append({"format": name, "bits_per_value": round(bits, 4), **figures})
    return entries


def read_samples(target: Target, path: Path, max_tokens: int) -> list[Sample]:
    """The texts of a file, each with a label at every token."""
    assert target.tokenizer is not None
    samples, total = [], 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        text = "\n".join(value for value in json.loads(line).values() if isinstance(value, str))
        ids = np.array(target.tokenizer.encode(text)[:512], np.uint32)
        if len(ids) > 8:
            samples.append(Sample(ids, np.ones(len(ids), bool), str(number), path.name, 0))
            total += len(ids)
        if total >= max_tokens:
            break
    return samples


def measure_target(name: str, texts: Path, device: torch.device, max_tokens: int) -> dict[str, Any]:
    target = Target.load(
        resolve_target(name).directory, dtype=pick_dtype("auto", device), device=device
    )
    samples = read_samples(target, texts, max_tokens)
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
    taps = default_taps_of(target.config)
    rows = read_probe_rows(
        samples,  # all that is asked of a corpus is samples by number
        SampleRows(lengths, lengths - 2),
        target,
        taps,
        pass_tokens=4096,
        progress=SilentProgress(),
    )
    rows = replace(rows, layers={tap: layer.cpu().float() for tap, layer in rows.layers.items()})
    exact = torch.cat([rows.layers[tap] for tap in taps], dim=1)
    is_judged = rows.is_judged_R.cpu()
    fitted, size = exact[~is_judged], target.hidden_size
    spread = torch.from_numpy(channels_of(fitted).spread)
    entries = []
    for label, (bits, rounding) in variants(size, fitted).items():
        decoded = rounding(exact)
        entries.append(
            {
                "format": label,
                "bits_per_value": round(bits, 4),
                **errors(exact[is_judged], decoded[is_judged], spread, size),
                **probe(rows, target, taps, decoded),
            }
        )
        print(name, entries[-1], flush=True)
    return {
        "taps": list(taps),
        "hidden_size": size,
        "texts": texts.name,
        "rows_fitted": int((~is_judged).sum()),
        "rows_judged": int(is_judged.sum()),
        "largest_channel_spread_over_median": round(float(spread.max() / spread.median()), 1),
        "features": entries,
        "final_rows": measure_final(rows.final_RD[rows.is_judged_R][:512], target),
    }


def probe(
    rows: ProbeRows, target: Target, taps: tuple[int, ...], decoded: Tensor
) -> dict[str, float]:
    parts = torch.split(decoded.to(rows.final_RD.device), target.hidden_size, dim=1)
    changed = replace(rows, layers=dict(zip(taps, parts, strict=True)))
    score = compare_taps(changed, target.readout, [taps], [RIDGE]).scores[0]
    return {
        "probe_accuracy": round(score.accuracy, 4),
        "probe_unexplained": round(score.unexplained, 5),
    }


@torch.no_grad()
def measure_final(final: Tensor, target: Target) -> list[dict[str, Any]]:
    """Kullback-Leibler divergence of the target's distribution, and how often its choice stays."""
    exact = torch.log_softmax(target.readout.logits(final).float(), dim=-1)
    entries = []
    for name in FORMATS:
        codec = make_codec(name, hidden_size=target.hidden_size, num_taps=1, dtype=torch.bfloat16)
        decoded = codec.decode(codec.encode(final), final.dtype)
        found = torch.log_softmax(target.readout.logits(decoded).float(), dim=-1)
        divergence = (exact.exp() * (exact - found)).sum(dim=-1)
        entries.append(
            {
                "format": name,
                "bytes": row_bytes(name, hidden_size=target.hidden_size, num_taps=1, itemsize=2),
                "divergence_mean": round(float(divergence.mean()), 6),
                "same_choice": round(
                    float((exact.argmax(-1) == found.argmax(-1)).float().mean()), 4
                ),
            }
        )
    return entries


def measure_speed(device: torch.device, num_rows: int) -> list[dict[str, Any]]:
    rows = torch.randn(num_rows, NUM_TAPS * INVENTED_HIDDEN, device=device, dtype=torch.bfloat16)
    channels = channels_of(rows[:512])
    return [
        {"format": name, "rows": num_rows, **speed_of(name, rows, channels)} for name in FORMAT_BITS
    ]


def speed_of(name: FeatureFormat, rows: Tensor, channels: Channels) -> dict[str, int]:
    codec = make_codec(
        name,
        hidden_size=INVENTED_HIDDEN,
        num_taps=NUM_TAPS,
        dtype=rows.dtype,
        channels=channels,
    )
    parts = codec.encode(rows)
    encode_s = timed(lambda: codec.encode(rows), rows.device)
    decode_s = timed(lambda: codec.decode(parts, rows.dtype), rows.device)
    return {
        "encode_tokens_per_s": round(len(rows) / encode_s),
        "decode_tokens_per_s": round(len(rows) / decode_s),
    }


def timed(work: Callable[[], object], device: torch.device) -> float:
    """The least of some rounds."""
    best = math.inf
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--max-tokens", type=int, default=6000)
    parser.add_argument("--speed-rows", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.target and arguments.texts is None:
        parser.error("--target needs --texts")
    device = pick_device(arguments.device)
    document = {
        "provenance": collect(device=str(device)),
        "invented_hidden_size": INVENTED_HIDDEN,
        "invented": {kind: measure_invented(kind) for kind in ("gaussian", "outliers")},
        "targets": {
            name: measure_target(name, arguments.texts, device, arguments.max_tokens)
            for name in arguments.target
        },
        "speed": measure_speed(device, arguments.speed_rows),
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
