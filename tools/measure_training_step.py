"""Tokens per second, memory and share of the matrix-product peak of one training step of a head.

    python tools/measure_training_step.py --out benchmarks/FILE.json
    python tools/measure_training_step.py --cases 8b --profile --out FILE.json
    python tools/measure_training_step.py --cases whole-steps --repeats 40 --out FILE.json
    python tools/measure_training_step.py --cases tiny --device cpu --repeats 1 --out FILE.json

Random features, K draft steps, bfloat16 products, float32 weights, a fused AdamW step included. The
fast path is compared with the twin that writes everything out, in the same run. Floating-point
operations are those of the products, attention left out: forward, and twice that backward.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from training_step_cases import CASES, NUM_TAPS, Case

from fledge.contracts import provenance
from fledge.contracts.train_settings import LossSettings, OptimizerSettings
from fledge.engine.graphs import Graphs
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.models.target_reading import Readout
from fledge.ops.documents import make_documents
from fledge.ops.micro_batch import MicroBatch, TargetRows
from fledge.training.distributed import Processes
from fledge.training.optimizer import Optimizer
from fledge.training.passes import CapturedPasses, LaunchedPasses, Passes
from fledge.training.ttt import TTTModule, count_labels


def random_module(case: Case, dtype: torch.dtype, device: torch.device) -> TTTModule:
    """Every token of the target is a draft token: the rest of its vocabulary costs nothing here."""
    torch.manual_seed(0)
    shape = asdict(case.shape)
    config = HeadConfig(
        target_hidden_size=case.shape.hidden_size,
        vocab_size=case.shape.draft_vocab_size,
        num_taps=NUM_TAPS,
        **shape,
    )
    with torch.device(device):
        head = Eagle3Head(config, torch.arange(case.shape.draft_vocab_size))
        matrix_VD = torch.randn(case.shape.draft_vocab_size, case.shape.hidden_size, dtype=dtype)
    return TTTModule(
        head,
        matrix_VD,
        Readout(matrix_VD * case.shape.hidden_size**-0.5),
        LossSettings(steps=case.num_steps),
        compute_dtype=dtype,
        is_plain=case.is_plain,
    )


def random_batch(case: Case, dtype: torch.dtype, device: torch.device) -> MicroBatch:
    """All tokens but those of prompts have loss, so that all rows that can be asked are."""
    lengths = [case.document_len] * (case.num_tokens // case.document_len)
    documents = make_documents(lengths, device, padded_to=case.num_tokens)
    size, num_tokens = case.shape.hidden_size, case.num_tokens
    positions_T = documents.positions_T
    first_row = max(1, int(case.prompt_share * case.document_len) - 1)
    rows_R = ((positions_T >= first_row) & (positions_T < case.document_len - 1)).nonzero()[:, 0]
    num_rows = rows_R.shape[0]
    vocab_size = case.shape.draft_vocab_size
    return MicroBatch(
        token_ids_T=torch.randint(vocab_size, (num_tokens,), device=device),
        loss_mask_T=positions_T > first_row,
        documents=documents,
        features_TF=torch.randn(num_tokens, NUM_TAPS * size, dtype=dtype, device=device),
        targets=TargetRows(
            rows_R=rows_R,
            greedy_R=torch.randint(vocab_size, (num_rows,), device=device),
            log_mass_R=torch.zeros(num_rows, device=device),
            final_RD=torch.randn(num_rows, size, dtype=dtype, device=device),
        ),
        sample_numbers=(),
        first_labels=(first_row,) * len(lengths),
    )


def time_steps(step: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each, measured on the device where there is one."""
    if device.type != "cuda":
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
        return seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]


def measure_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of large matrix products of random numbers, as long as training lasts.

    A device that was idle starts slowly, and one that is kept busy may be slowed down by its heat.
    """
    size, seconds = (8192, 2.0) if device.type == "cuda" else (256, 0.01)
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    out = torch.empty_like(a)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        time_steps(lambda: torch.mm(a, b, out=out), 50, device)
    return 2 * size**3 / statistics.median(time_steps(lambda: torch.mm(a, b, out=out), 200, device))


def measure(
    case: Case, *, repeats: int, peak: float, device: torch.device, has_profile: bool
) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    module = random_module(case, dtype, device)
    batch = random_batch(case, dtype, device)
    mask_T = batch.loss_mask_T.cpu().numpy()
    counts_K = count_labels(mask_T, batch.documents.lengths, case.num_steps)
    denominators_K = torch.from_numpy(counts_K).to(device)
    if case.is_captured is None:
        step = plain_step(module, batch, denominators_K)
    else:
        step = whole_step(case, module, batch, denominators_K)
    started = time.perf_counter()
    for _ in range(3):
        loss = step().item()
    warm_up_s = time.perf_counter() - started
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = time_steps(step, repeats, device)
    rate = case.num_tokens / statistics.median(seconds)
    flops = case.shape.flops_per_token(case.num_steps)
    has_all = not case.prompt_share
    if has_profile:
        show_profile(step)
    return {
        **asdict(case),
        "tokens_per_s": round(rate),
        "step_ms": [round(1e3 * one, 2) for one in seconds],
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "share_of_product_peak": round(rate * flops / peak, 4) if has_all else None,
        "gflop_per_token": round(flops / 1e9, 3),
        "warm_up_s": round(warm_up_s, 1),
        "loss": round(loss, 4),
    }


def plain_step(
    module: TTTModule, batch: MicroBatch, denominators_K: torch.Tensor
) -> Callable[[], torch.Tensor]:
    is_fused = denominators_K.is_cuda
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=is_fused)

    def step() -> torch.Tensor:
        loss: torch.Tensor = module(batch, denominators_K).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def whole_step(
    case: Case, module: TTTModule, batch: MicroBatch, denominators_K: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """What the trainer does with a micro-batch that lies on the device."""
    settings = OptimizerSettings(kind="muon", learning_rate=1e-5, muon_rate=1e-5)
    graphs = Graphs(denominators_K.device) if case.is_captured else None
    optimizer = Optimizer(module, settings, 1000, graphs=graphs)
    passes: Passes = LaunchedPasses(module, Processes())
    if graphs is not None:
        passes = CapturedPasses(module, graphs, longest=case.document_len)
    numbers = itertools.count()

    def step() -> torch.Tensor:
        loss = passes.learn(batch, denominators_K, None, is_last=True).loss
        optimizer.clip()
        optimizer.step(next(numbers))
        return loss

    return step


def show_profile(step: Callable[[], object]) -> None:
    """What the device and the host spent their time on in one step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=70))


def measure_or_say(case: Case, **options: Any) -> dict[str, Any]:
    """A twin may need more memory than there is; that is a result too."""
    try:
        return measure(case, **options)
    except torch.OutOfMemoryError:
        return {**asdict(case), "tokens_per_s": None, "peak_bytes": None, "error": "out of memory"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def compare(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fast over twin, where both ran."""
    by_name = {str(result["name"]): result for result in results}
    ratios: list[dict[str, Any]] = []
    for name, twin in by_name.items():
        fast = by_name.get(name.replace("-twin", "-fast"))
        if not twin["is_plain"] or fast is None or not twin["tokens_per_s"]:
            continue
        ratio: dict[str, Any] = {
            "name": name.removesuffix("-twin"),
            "speed": round(fast["tokens_per_s"] / twin["tokens_per_s"], 3),
        }
        if fast["peak_bytes"] and twin["peak_bytes"]:
            ratio["memory"] = round(fast["peak_bytes"] / twin["peak_bytes"], 3)
        ratios.append(ratio)
    return ratios


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="8b,smollm2", help="of " + ", ".join(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="print kernels of each fast case")
    parser.add_argument("--commit", help="where git is not at hand")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak = measure_peak(dtype, device)
    print(f"matrix-product peak: {peak / 1e12:.2f} TFLOP/s", flush=True)
    results: list[dict[str, Any]] = []
    for case in (case for name in options.cases.split(",") for case in CASES[name]):
        has_profile = options.profile and not case.is_plain and device.type == "cuda"
        result = measure_or_say(
            case, repeats=options.repeats, peak=peak, device=device, has_profile=has_profile
        )
        results.append(result)
        shown = ("tokens_per_s", "share_of_product_peak", "peak_bytes", "warm_up_s", "error")
        print(case.name, {key: result[key] for key in shown if key in result}, flush=True)
        document = {
            "provenance": provenance.collect(device=name_of(device), commit=options.commit),
            "product_peak_flops": round(peak),
            "results": results,
            "fast_over_twin": compare(results),
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(compare(results)))


if __name__ == "__main__":
    main()
