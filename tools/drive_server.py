"""Has outside load generators drive a real `fledge serve`, and compares their counts with ours.

    python -m venv G && G/bin/pip install guidellm==0.8.1
    python -m venv A && A/bin/pip install aiperf==0.13.0
    python tools/drive_server.py --guidellm G/bin/guidellm --aiperf A/bin/aiperf --out FILE.json

Both count tokens of prompts and answers with the target's tokenizer, from the text they get. The
server says what it counted in `usage` and at /metrics. All of it must agree, without one error.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from server_subject import MODEL, Subject, serving

from fledge.contracts import provenance

_PROMPT_TOKENS, _ANSWER_TOKENS, _CONCURRENCY = 32, 24, 8
_COUNTED = {
    "prompt_tokens": "fledge_prompt_tokens_total",
    "answer_tokens": "fledge_answer_tokens_total",
}


def run(command: list[str], place: Path) -> None:
    # With HF_HUB_OFFLINE set, aiperf takes no local tokenizer.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment.pop("PYTHONPATH", None)
    with (place / "output.log").open("wb") as log:
        done = subprocess.run(command, cwd=place, env=environment, stdout=log, stderr=log)
    if done.returncode:
        text = (place / "output.log").read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"{command[0]} failed with {done.returncode}: {text[-3000:]}")


def drive_guidellm(program: Path, subject: Subject, target: Path, place: Path, num: int) -> Any:
    data = f"prompt_tokens={_PROMPT_TOKENS},output_tokens={_ANSWER_TOKENS}"
    backend = f"kind=openai_http,target={subject.url},model={MODEL},request_format=/v1/completions"
    command = [str(program), "run", "--backend", backend, "--disable-progress"]
    command += ["--profile", f"kind=concurrent,streams={_CONCURRENCY}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={target}"]
    command += ["--data", f"kind=synthetic_text,{data}"]
    command += ["--constraint", f"kind=max_requests,count={num}"]
    # Its own counts, not those of our usage.
    command += ["--metrics", "kind=generative,prefer_response_metrics=false"]
    command += ["--output", f"kind=json,path={place / 'report.json'}"]
    run(command, place)
    (benchmark,) = json.loads((place / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    metrics = benchmark["metrics"]
    return {
        "requests": metrics["request_totals"]["successful"],
        "errors": metrics["request_totals"]["errored"] + metrics["request_totals"]["incomplete"],
        "prompt_tokens": metrics["prompt_token_count"]["successful"]["total_sum"],
        "answer_tokens": metrics["output_token_count"]["successful"]["total_sum"],
    }


def drive_aiperf(program: Path, subject: Subject, target: Path, place: Path, num: int) -> Any:
    command = [str(program), "profile", "--model", MODEL, "--url", subject.url, "--streaming"]
    command += ["--endpoint-type", "completions", "--tokenizer", str(target), "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", str(_PROMPT_TOKENS)]
    command += ["--output-tokens-mean", str(_ANSWER_TOKENS), "--request-count", str(num)]
    command += ["--concurrency", str(_CONCURRENCY), "--workers-max", "2"]
    command += ["--artifact-dir", str(place / "artifacts")]
    run(command, place)
    file = place / "artifacts" / "profile_export_aiperf.json"
    report = json.loads(file.read_text(encoding="utf-8"))
    return {
        "requests": int(report["completed_request_count"]["avg"]),
        "errors": len(report.get("error_summary") or []),
        "prompt_tokens": report["total_isl"]["avg"],
        "answer_tokens": report["total_osl"]["avg"],
        "usage_prompt_tokens": report["total_usage_prompt_tokens"]["avg"],
        "usage_answer_tokens": report["total_usage_completion_tokens"]["avg"],
        "requests_whose_usage_differs": report["usage_discrepancy_count"]["avg"],
    }


def compare(name: str, theirs: dict[str, Any], before: Any, after: Any) -> dict[str, Any]:
    """Their counts beside what the server counted meanwhile."""
    ours = {kind: after[figure] - before[figure] for kind, figure in _COUNTED.items()}
    wrong = [
        f"{name} counts {theirs[kind]} {kind} and the server {ours[kind]}"
        for kind in _COUNTED
        if theirs[kind] != ours[kind]
    ]
    if theirs["errors"]:
        wrong.append(f"{name} met {theirs['errors']} errors")
    bad = [one for one in after if "fledge_requests_total" in one and 'status="200"' not in one]
    wrong += [f"the server answered {one}" for one in bad if after[one] > before.get(one, 0)]
    return {"theirs": theirs, "ours": ours, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--guidellm", type=Path)
    parser.add_argument("--aiperf", type=Path)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    drivers = {"guidellm": drive_guidellm, "aiperf": drive_aiperf}
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(Path(directory), "--cache-tokens", "32768") as subject,
    ):
        target = Path(directory) / "target"
        for name, drive in drivers.items():
            program = getattr(options, name)
            if program is None:
                continue
            place = Path(directory) / name
            place.mkdir()
            before = subject.figures()
            theirs = drive(program.absolute(), subject, target, place, options.requests)
            found[name] = compare(name, theirs, before, subject.figures())
    document = {"provenance": provenance.collect(device="cpu"), "runs": found}
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))
    if wrong := [one for run_of in found.values() for one in run_of["wrong"]]:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
