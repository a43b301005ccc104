"""A short soak with every default run; tools/soak.py does 10,000 requests and keeps the record."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _load_tool(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_hundreds_of_requests_leave_nothing_behind() -> None:
    result = _load_tool("soak").soak(80, seed=1)
    assert result["distinct_answers_checked"] > 20
    assert result["stats"]["num_preemptions"] > 0
