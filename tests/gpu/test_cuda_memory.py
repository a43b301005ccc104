"""Memory and kernels that a GPU does not give: said with numbers, and nothing stays behind.

The device is made small by a limit on what this process may take of it; kernels cannot be built
where the C compiler is one that always fails.
"""

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts.errors import CapacityError
from fledge.testing import save_tiny_target, target_of, tiny_head, tiny_model
from tests.lossless.support import prompts, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
MIB = 2**20
TREE = EngineSettings(
    controller="fixed", tree=TreeSettings(depth=4, width=3, budget=12), graphs="on"
)
ROWS = 2 * 4 * 64 * 4
"""Bytes of a token in a layer of the targets below: keys and values of 4 heads of 64."""


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Inside, this process can take so much more of the device and no more."""
    torch.zeros(1, device=CUDA)
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(CUDA)
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(CUDA) + num_bytes) / total, CUDA
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
        gc.collect()
        torch.cuda.empty_cache()


def save_target(directory: Path, **options: int) -> Path:
    sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    return save_tiny_target(directory, "llama", **{**sizes, "num_hidden_layers": 4, **options})


def load(directory: Path, cache_tokens: int) -> Engine:
    settings = EngineSettings(cache_tokens=cache_tokens, max_requests=4)
    return Engine.load(str(directory), None, settings, device="cuda", dtype="float32")


def test_memory_that_runs_out_at_the_start_names_a_cache_that_fits(tmp_path: Path) -> None:
    directory = save_target(tmp_path / "target")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with room_for(288 * MIB):
        asked = 400 * MIB // (4 * ROWS)
        with pytest.raises(CapacityError, match="ran out of memory for a cache of") as caught:
            load(directory, asked)
        found = re.search(r"lower cache_tokens to (\d+) or less", str(caught.value))
        assert found is not None, str(caught.value)
        fitting = int(found[1])
        assert asked // 8 < fitting < asked // 2
        del caught  # it holds what was taken
        gc.collect()
        torch.cuda.empty_cache()
        (answer,) = load(directory, fitting).generate([[5, 6, 7]], params)
        assert len(answer.token_ids) == 4


def test_a_cache_beyond_what_is_free_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    free, _ = torch.cuda.mem_get_info(CUDA)
    with pytest.raises(CapacityError, match=r"are free there; lower it to \d+ or less"):
        load(save_target(tmp_path / "target"), 4 * free // (4 * ROWS))


def test_a_target_that_does_not_fit_is_told_in_numbers(tmp_path: Path) -> None:
    # Far larger than what other tests may have left in torch's keeping.
    directory = save_target(tmp_path / "target", intermediate_size=32_768, num_hidden_layers=11)
    with room_for(32 * MIB), pytest.raises(CapacityError) as caught:
        load(directory, 256)
    assert "the target needs 1.0 GiB on cuda" in str(caught.value)
    assert "use a smaller target, --dtype bfloat16, or --device cpu" in str(caught.value)


@pytest.mark.parametrize("room", [32 * MIB, 900 * MIB], ids=["no room", "no room for a moment"])
def test_a_head_that_does_not_fit_is_told_in_numbers(room: int) -> None:
    target = target_of(tiny_model("llama", hidden_size=256).to(CUDA))
    head = tiny_head(target, intermediate_size=300_000)
    wanted = r"the head needs .* on cuda:0|cuda:0 ran out of memory for matrices that are laid"
    with room_for(room), pytest.raises(CapacityError, match=wanted):
        Engine(target, head, TREE)


def test_engines_side_by_side_and_nothing_left_behind() -> None:
    asked, params = prompts(4), SamplingParams(max_tokens=30, ignore_eos=True)
    models = [tiny_model(name).to(CUDA) for name in ("llama", "gemma3-hybrid")]
    off = EngineSettings(graphs="off")
    wanted = [
        token_ids(Engine(target_of(one), settings=off).generate(asked, params)) for one in models
    ]
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = []
    for _ in range(3):
        targets = [target_of(one) for one in models]
        engines = [Engine(one, tiny_head(one, draft_vocab_size=97), TREE) for one in targets]
        running = [
            [engine.add(engine.make_request(prompt, params)) for prompt in asked]
            for engine in engines
        ]
        while any(engine.has_work for engine in engines):
            for engine in engines:
                if engine.has_work:
                    engine.step()
        assert [[seq.output_ids for seq in some] for some in running] == wanted
        assert all(engine.stats.num_replayed > 0 for engine in engines)
        del targets, engines, engine, running
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved(CUDA))
    # The first leaves the products' scratch and what torch keeps for its streams.
    assert held[2] <= held[1] + 2 * MIB, held


PROGRAM = """
import json, logging, sys, torch
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.testing import target_of, tiny_head, tiny_model
target = target_of(tiny_model("llama").to("cuda"))
tree = TreeSettings(depth=4, width=3, budget=12)
engine = Engine(target, tiny_head(target), EngineSettings(controller="fixed", tree=tree))
answers = engine.generate(json.loads(sys.argv[1]), SamplingParams(max_tokens=16))
print(json.dumps([list(one.token_ids) for one in answers]))
"""


def test_kernels_that_cannot_be_built_leave_it_to_their_twins(tmp_path: Path) -> None:
    asked = [list(prompt) for prompt in prompts(3)]
    target = target_of(tiny_model("llama").to(CUDA))
    wanted = token_ids(Engine(target).generate(asked, SamplingParams(max_tokens=16)))
    broken = {"CC": "/bin/false", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(asked)],
        env=os.environ | broken,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [list(one) for one in wanted]
    assert "cannot be built here" in done.stderr
    assert "the plain operations take its place and are slower" in done.stderr
