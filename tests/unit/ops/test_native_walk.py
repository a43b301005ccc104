"""Tokens drawn by the native kernels: those of `sample`, whatever is asked for."""

import ctypes
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fledge.contracts.sampling import SamplingParams
from fledge.ops import native_walk
from fledge.ops.native_chains import ChainRows, TokenChain
from fledge.ops.native_library import NativeLibrary, native_library
from fledge.ops.native_walk import Draw, NativeWalk, check_walks
from fledge.ops.sampling import make_sampling_batch, sample
from fledge.store.compiler import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
NAN = float("nan")


class _Walks:
    """Chains of the rows given, one behind the other, and how often the twin was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: NativeLibrary) -> None:
        self.rows = ChainRows(max_requests=8, max_rows=64)
        self.walk = NativeWalk(library, self.rows)
        self.num_asked = 0
        ask = native_walk._ask_twin

        def count(*asked: Any) -> int | None:
            self.num_asked += 1
            return ask(*asked)

        monkeypatch.setattr(native_walk, "_ask_twin", count)

    def run(
        self, logits_TV: Tensor, chains: list[list[int]], draws: list[Draw]
    ) -> list[int | None]:
        """Each chain is its drafts."""
        made = [TokenChain(0, 0, [0, *drafts]) for drafts in chains]
        self.rows.write(made)
        return self.walk.run(logits_TV, made, draws)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> _Walks:
    return _Walks(monkeypatch, native_library())


def _twin(logits_V: Tensor, params: SamplingParams, position: int) -> int:
    batch = make_sampling_batch([params], logits_V.device)
    return int(sample(logits_V[None], batch, torch.tensor([position])))


def _some_logits(draw: random.Random, generator: torch.Generator, rows: int) -> Tensor:
    size = draw.choice([1, 2, 3, 17, 33, 1000, 1025, 4099])
    logits = torch.randn(rows, size, generator=generator) * draw.choice([0.01, 1.0, 4.0, 30.0])
    logits += draw.choice([0.0, 0.0, -100.0, 1e4])
    if draw.random() < 0.4:  # many are equal
        logits = logits.round()
    if draw.random() < 0.2:
        logits *= 1e-20
    if draw.random() < 0.3:
        logits[:, 1:][torch.rand(rows, size - 1, generator=generator) < 0.5] = float("-inf")
    return logits


def _some_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=draw.choice([0.0, 1e-3, 0.3, 0.7, 1.0, 1.0, 1.5, 5.0]),
        top_k=draw.choice([0, 0, 0, 1, 2, 20, 50, 6000]),
        top_p=draw.choice([1.0, 1.0, 0.9, 0.9, 0.5, 0.1, 1e-9, 0.99999]),
        min_p=draw.choice([0.0, 0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=draw.choice([0, draw.randrange(2**63), 2**63 - 1]),
    )


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_those_of_the_twin(walks: _Walks, seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_rows = 0
    for _ in range(150):
        rows = draw.choice([1, 2, 5])
        logits = _some_logits(draw, generator, rows)
        draws = [Draw(_some_params(draw), draw.randrange(10_000)) for _ in range(rows)]
        wanted = [_twin(row, *one) for row, one in zip(logits, draws, strict=True)]
        assert walks.run(logits, [[]] * rows, draws) == wanted, (logits.shape, draws)
        num_rows += rows
    assert walks.num_asked < num_rows // 10, "the kernels decide nearly always"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.7, top_p=0.9, seed=5),
        SamplingParams(temperature=1.0, top_k=50, top_p=0.95, min_p=0.02, seed=5),
    ],
)
def test_rows_as_wide_as_real_ones(walks: _Walks, params: SamplingParams) -> None:
    """Parts of a row are looked at by several threads, and in no order."""
    logits = torch.randn(6, 49_152, generator=torch.Generator().manual_seed(1)) * 3
    logits[::2, 77] += 12
    draws = [Draw(params, place) for place in range(6)]
    wanted = [_twin(row, *one) for row, one in zip(logits, draws, strict=True)]
    assert walks.run(logits, [[]] * 6, draws) == wanted
    assert walks.num_asked == 0


def test_all_tokens_are_drawn_as_often_as_they_should_be(walks: _Walks) -> None:
    """Not the twin's bits alone: the distribution of 4,000 draws of a small row."""
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0]])
    counts = torch.zeros(4)
    for position in range(4000):
        (token,) = walks.run(logits, [[]], [Draw(SamplingParams(temperature=0.8), position)])
        assert token is not None
        counts[token] += 1
    expected = (logits[0].double() / 0.8).softmax(-1) * 4000
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3, "chi-square, 3 degrees, 0.1%"


def test_a_walk_ends_at_the_first_draft_that_differs(walks: _Walks) -> None:
    """Rows behind it are not looked at: they may hold anything."""
    params = [SamplingParams(temperature=1.0, seed=3), SamplingParams(), SamplingParams(seed=1)]
    logits = torch.randn(10, 500, generator=torch.Generator().manual_seed(2))
    said = [_twin(logits[row], params[0], 40 + row) for row in range(4)]
    best = logits.argmax(dim=-1).tolist()
    logits[3] = logits[6] = NAN
    chains = [[said[0], said[1], 499 - said[2]], [best[4], 0], [best[7], best[8]]]
    found = walks.run(logits, chains, [Draw(one, 40) for one in params])
    assert found[:3] == said[:3]
    assert found[4:6] == best[4:6]
    assert found[7:10] == best[7:10]


def test_logits_that_are_no_numbers_choose_nothing(walks: _Walks) -> None:
    for bad in (NAN, float("inf")):
        logits = torch.zeros(2, 40)
        logits[0, 7] = bad
        params = SamplingParams(temperature=1.0)
        assert walks.run(logits, [[], []], [Draw(params, 0)] * 2)[0] is None
    nothing = torch.full((1, 40), float("-inf"))
    assert walks.run(nothing, [[]], [Draw(SamplingParams(temperature=0.5), 0)]) == [None]


def test_what_is_too_near_to_tell_is_asked_of_the_twin(walks: _Walks) -> None:
    """Half of the weight is above the second of two equal tokens, and floats end at some point."""
    even = torch.zeros(8, 2)
    draws = [Draw(SamplingParams(temperature=1.0, top_p=0.5, seed=seed), 0) for seed in range(8)]
    assert walks.run(even, [[]] * 8, draws) == [1] * 8
    assert walks.num_asked > 0
    for temperature in (1e-320, 1e-25, 1e25, 1e300):
        params = SamplingParams(temperature=temperature, top_p=0.8, seed=3)
        row = torch.randn(1, 30, generator=torch.Generator().manual_seed(5))
        assert walks.run(row, [[]], [Draw(params, 1)]) == [_twin(row[0], params, 1)]
    # From there on the twin walks the chain, down to logits that are no numbers.
    params = SamplingParams(temperature=1e25, seed=8)
    rows = torch.randn(4, 30, generator=torch.Generator().manual_seed(6))
    said = [_twin(rows[place], params, place) for place in range(3)]
    rows[2] = NAN
    found = walks.run(rows, [[said[0], said[1], 4]], [Draw(params, 0)])
    assert found[:3] == [said[0], said[1], None]


def test_no_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cast(NativeLibrary, SimpleNamespace(run_walk=lambda *_: 1))
    walks = _Walks(monkeypatch, library)
    with pytest.raises(MemoryError, match="no memory to choose tokens of 1 requests"):
        walks.run(torch.zeros(1, 4), [[]], [Draw(SamplingParams(temperature=1.0), 0)])


def test_walks_prove_themselves() -> None:
    library = native_library()
    assert check_walks(library)

    def walk_astray(walk: Any, num_threads: int) -> int:
        """From the sixth row on every token is another one."""
        failed: int = library.run_walk(walk, num_threads)
        said = np.frombuffer((ctypes.c_int64 * 8).from_address(walk._obj.said), dtype=np.int64)
        said[5:] += 1
        return failed

    assert not check_walks(cast(NativeLibrary, SimpleNamespace(run_walk=walk_astray)))
