"""Tokens per second with a useless head under the adaptive controller, over plain decoding.

    python tools/measure_never_slower.py --target smollm2-135m-instruct --out benchmarks/FILE.json

A random head is the worst case: every draft is wasted, and the controller has to find that out
while it serves. Rounds with and without the head alternate on the same prompts; the first round of
each warms up. The ratio comes with a 95% interval from resampled rounds.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from fledge import Engine, EngineSettings, SamplingParams
from fledge.contracts import provenance
from fledge.engine.timing import measure_pass_times
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.target import Target
from fledge.testing import target_of, tiny_model


def random_head(target: Target) -> Eagle3Head:
    """As large as a real head for this target, and ignorant."""
    config = target.config
    torch.manual_seed(0)
    return Eagle3Head(
        HeadConfig(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=target.hidden_size // config.num_attention_heads,
            vocab_size=target.vocab_size,
            draft_vocab_size=min(8192, target.vocab_size),
            **({"taps": (1, 2, 3)} if target.num_layers < 8 else {}),
        )
    )


def one_round(engine: Engine, prompts: list[list[int]], max_tokens: int) -> float:
    """Tokens per second of decoding, prompts included."""
    started = time.perf_counter()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    completions = engine.generate(prompts, params)
    tokens = sum(completion.stats.num_tokens for completion in completions)
    return tokens / (time.perf_counter() - started)


def compare(
    plain: Engine, adaptive: Engine, *, num_requests: int, max_tokens: int, rounds: int
) -> dict[str, object]:
    rng = random.Random(num_requests)
    prompts = [[rng.randrange(3, 90) for _ in range(16)] for _ in range(num_requests)]
    ratios, rates = [], []
    for number in range(rounds + 1):
        order = [plain, adaptive] if number % 2 else [adaptive, plain]
        rate = {id(engine): one_round(engine, prompts, max_tokens) for engine in order}
        if number:
            ratios.append(rate[id(adaptive)] / rate[id(plain)])
            rates.append((rate[id(plain)], rate[id(adaptive)]))
    resampled = sorted(statistics.mean(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "requests": num_requests,
        "plain_tokens_per_s": round(statistics.mean(rate for rate, _ in rates), 2),
        "adaptive_tokens_per_s": round(statistics.mean(rate for _, rate in rates), 2),
        "ratio": round(statistics.mean(ratios), 4),
        "ratio_95": [round(resampled[50], 4), round(resampled[1949], 4)],
        "controller": adaptive.stats.controller,
    }


def load(name: str, device: str, dtype: str) -> Target:
    place = pick_device(device)
    if name == "tiny":
        return target_of(tiny_model().to(place))
    return Target.load(resolve_target(name).directory, dtype=pick_dtype(dtype, place), device=place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="or `tiny`")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", default="1,4,16")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--commit", help="where the tree is not a checkout")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = load(options.target, options.device, options.dtype)
    head = random_head(target).to(target.device, target.dtype)
    settings = EngineSettings(max_requests=64, share_prefixes=False)
    times = measure_pass_times(target, head, settings, name=f"{options.target} random head")
    rows = []
    for num_requests in map(int, options.requests.split(",")):
        plain, adaptive = (
            Engine(target, None, settings),
            Engine(target, head, settings, times=times),
        )
        row = compare(
            plain,
            adaptive,
            num_requests=num_requests,
            max_tokens=options.max_tokens,
            rounds=options.rounds,
        )
        rows.append(row)
        print(json.dumps(row), flush=True)
    kind = torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu"
    document = {
        "provenance": provenance.collect(device=kind, commit=options.commit),
        "target": Path(options.target).name,
        "dtype": str(target.dtype),
        "head": "random, as large as a real one",
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
