"""Has schemathesis ask a real `fledge serve` everything that its own OpenAPI document allows.

    python -m venv S && S/bin/pip install schemathesis
    python tools/fuzz_server.py --schemathesis S/bin/schemathesis --examples 100

It fails on any 5xx, and on any answer that the document does not admit: status, type or shape.
"""

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from server_subject import serving

_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "negative_data_rejection",
    "use_after_free",
    "ensure_resource_availability",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--schemathesis", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Random requests ask for as many tokens as they may.
    limits = ["--cache-tokens", "32768", "--set", "serve.max_answer_tokens=32"]
    with tempfile.TemporaryDirectory() as place, serving(Path(place), *limits) as subject:
        command = [str(options.schemathesis.absolute()), "run", f"{subject.url}/openapi.json"]
        command += ["--checks", ",".join(_CHECKS), "--continue-on-failure"]
        command += ["--max-examples", str(options.examples), "--seed", str(options.seed)]
        command += ["--request-timeout", "120", "--suppress-health-check", "all"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        code = subprocess.run(command, cwd=place, env=environment, check=False).returncode
        log = (Path(place) / "server.log").read_text(encoding="utf-8")
    if faults := [line for line in log.splitlines() if '"traceback"' in line]:
        raise SystemExit(f"{len(faults)} faults in the server's log; the first: {faults[0][:2000]}")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
