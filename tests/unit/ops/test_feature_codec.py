"""The feature codec: how much is lost, that outliers do not drown the rest, and that anybody can
read the bytes.

Catches a rotation that is not orthogonal, levels that do not fit a Gaussian, rows that depend on
their neighbours, scales that overflow, and a layout other than the documented one.
"""

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fledge.contracts.capture_settings import FeatureFormat
from fledge.contracts.errors import ArtifactError
from fledge.contracts.feature_formats import FORMATS, block_size, padded_size, row_bytes
from fledge.ops.codec_tables import SIGN_BITS, centroids, rotation_matrix, thresholds
from fledge.ops.feature_codec import Codec, make_codec
from fledge.ops.kernel_choice import choose_kernels
from fledge.store.channels import Channels

CODED: tuple[FeatureFormat, ...] = ("q8", "q6", "q5", "q4")
GAUSSIAN_ERRORS = {"q8": 0.0064, "q6": 0.0255, "q5": 0.0505, "q4": 0.0990}
"""Root of the mean square error of the best the levels can do on a Gaussian of variance 1."""

HIDDEN, NUM_TAPS = 128, 3


def codec_of(
    name: FeatureFormat, hidden_size: int = HIDDEN, channels: Channels | None = None
) -> Codec:
    return make_codec(
        name, hidden_size=hidden_size, num_taps=NUM_TAPS, dtype=torch.float32, channels=channels
    )


def gaussian(num_rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def loss(codec: Codec, rows: Tensor, dtype: torch.dtype = torch.float32) -> float:
    """Size of the error over the size of the rows."""
    decoded = codec.decode(codec.encode(rows), dtype)
    assert decoded.dtype == dtype
    return float((decoded.float() - rows.float()).norm() / rows.float().norm())


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_on_a_gaussian(name: FeatureFormat, dtype: torch.dtype) -> None:
    rows = gaussian(256, NUM_TAPS * HIDDEN).to(dtype)
    found = loss(codec_of(name), rows, dtype)
    # Products and results in bfloat16 add their rounding.
    rounding = {torch.float32: 0.0, torch.bfloat16: 0.003, torch.float16: 0.0005}[dtype]
    assert GAUSSIAN_ERRORS[name] < 1.03 * found
    assert found < 1.03 * math.hypot(GAUSSIAN_ERRORS[name], rounding)


def test_more_bits_are_better_and_exact_is_exact() -> None:
    rows = gaussian(64, NUM_TAPS * HIDDEN)
    errors = [loss(codec_of(name), rows) for name in FORMATS]
    assert errors[0] == 0
    assert all(fewer > more for more, fewer in zip(errors, errors[1:], strict=False))
    exact = make_codec("exact", hidden_size=4, num_taps=1, dtype=torch.bfloat16)
    stored = exact.encode(torch.ones(2, 4, dtype=torch.bfloat16))
    assert stored["values"].dtype == torch.bfloat16
    assert exact.decode(stored, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("name", CODED)
def test_channels_a_thousand_times_larger(name: FeatureFormat) -> None:
    """Without channels they drown their block; in units of its own spread each one loses the same.

    8 bits for each token, which is what others do, loses nearly all of the small ones.
    """
    rows = gaussian(512, NUM_TAPS * HIDDEN)
    large = [3, 40, HIDDEN + 7]
    sizes = torch.ones(NUM_TAPS * HIDDEN)
    sizes[large] = 1000
    middles = torch.zeros(NUM_TAPS * HIDDEN)
    middles[large] = 5000
    rows = rows * sizes + middles
    assert loss(codec_of(name), rows) < 1.2 * GAUSSIAN_ERRORS[name]
    channels = Channels(middles.numpy(), sizes.numpy())
    codec = codec_of(name, channels=channels)
    difference = codec.decode(codec.encode(rows), torch.float32) - rows
    by_channel = difference.square().mean(0).sqrt() / sizes
    assert float(by_channel.max()) < 1.2 * GAUSSIAN_ERRORS[name]
    step = rows[:, :HIDDEN].abs().amax(1, keepdim=True) / 127
    per_token = (rows[:, :HIDDEN] / step).round() * step
    small = [i for i in range(HIDDEN) if i not in large]
    assert float((per_token - rows[:, :HIDDEN])[:, small].norm() / rows[:, small].norm()) > 0.9


@pytest.mark.parametrize("name", FORMATS)
def test_no_rows(name: FeatureFormat) -> None:
    codec = codec_of(name, 48)
    parts = codec.encode(torch.zeros(0, NUM_TAPS * 48))
    codec.check_finite(parts)
    assert {part: array.shape[1] for part, array in parts.items()} == {
        part: columns for part, (_, columns) in codec.parts.items()
    }
    assert codec.decode(parts, torch.bfloat16).shape == (0, NUM_TAPS * 48)


@pytest.mark.parametrize("name", CODED)
def test_one_enormous_token_leaves_the_others_alone(name: FeatureFormat) -> None:
    rows = gaussian(16, NUM_TAPS * HIDDEN)
    codec = codec_of(name)
    before = codec.decode(codec.encode(rows), torch.float32)
    rows[5] *= 1e6
    after = codec.decode(codec.encode(rows), torch.float32)
    others = [row for row in range(16) if row != 5]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("hidden_size", [32, 48, 64, 100, 576, 640, 5120, 8192])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_a_row(hidden_size: int, name: FeatureFormat) -> None:
    codec = codec_of(name, hidden_size)
    parts = codec.encode(gaussian(2, NUM_TAPS * hidden_size))
    stored = sum(part.element_size() * part.shape[1] for part in parts.values())
    planned = row_bytes(name, hidden_size=hidden_size, num_taps=NUM_TAPS, itemsize=4)
    assert stored == codec.bytes_per_row == planned
    for part_name, part in parts.items():
        assert (part.dtype, part.shape[1]) == codec.parts[part_name]
        assert part.is_contiguous()
    assert codec.decode(parts, torch.float32).shape == (2, NUM_TAPS * hidden_size)
    assert block_size(hidden_size) in (32, 64, 128)
    assert padded_size(hidden_size) - hidden_size < 32


def test_bytes_of_the_formats_at_hidden_size_5120() -> None:
    found = {name: row_bytes(name, hidden_size=5120, num_taps=3, itemsize=2) for name in FORMATS}
    assert found == {"exact": 30720, "q8": 15600, "q6": 11760, "q5": 9840, "q4": 7920}


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("hidden_size", [100, 576])
@pytest.mark.parametrize("has_channels", [False, True])
def test_bytes_of_a_row_do_not_depend_on_the_others(
    name: FeatureFormat, hidden_size: int, has_channels: bool
) -> None:
    width = NUM_TAPS * hidden_size
    numbers = np.linspace(0.1, 3, width, dtype=np.float32)
    codec = codec_of(name, hidden_size, Channels(numbers, numbers) if has_channels else None)
    rows = gaussian(300, width) * torch.logspace(-3, 3, 300)[:, None]
    together = codec.encode(rows)
    for start, stop in ((0, 1), (7, 8), (100, 103), (150, 300)):
        alone = codec.encode(rows[start:stop])
        for part, array in alone.items():
            assert torch.equal(array, together[part][start:stop])


@given(
    st.integers(0, 2**32),
    st.sampled_from(CODED),
    st.sampled_from([32, 64, 128]),
    st.floats(1e-6, 1e8),
)
def test_an_error_is_never_far_beyond_the_step(
    seed: int, name: FeatureFormat, hidden_size: int, size: float
) -> None:
    """Heavy tails too: what a block loses is a share of its own size."""
    chance = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, hidden_size, generator=chance).pow(3) * size
    codec = make_codec(name, hidden_size=hidden_size, num_taps=1, dtype=torch.float32)
    error = codec.decode(codec.encode(rows), torch.float32) - rows
    assert bool((error.norm(dim=1) < 2.5 * GAUSSIAN_ERRORS[name] * rows.norm(dim=1)).all())


def test_rows_of_zeros_and_tiny_ones() -> None:
    rows = gaussian(4, NUM_TAPS * HIDDEN)
    rows[0] = 0
    rows[1] *= 1e-12
    rows[2] *= 1e-38
    rows[3] *= 3e9
    codec = codec_of("q5")
    parts = codec.encode(rows)
    codec.check_finite(parts)
    decoded = codec.decode(parts, torch.float32)
    assert not decoded[0].any()
    assert not decoded[2].any()
    for row in (1, 3):
        assert float((decoded[row] - rows[row]).norm() / rows[row].norm()) < 0.055


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused(name: FeatureFormat, bad: float) -> None:
    rows = gaussian(5, NUM_TAPS * HIDDEN)
    rows[2, 200] = bad
    rows[4, 0] = bad
    codec = codec_of(name)
    parts = codec.encode(rows)
    assert codec.is_finite_T(parts).tolist() == [True, True, False, True, False]
    with pytest.raises(
        ArtifactError,
        match=r"row 2 of the taps holds infinity, NaN or values beyond 4e9, and so do 1 others",
    ):
        codec.check_finite(parts, "the taps")


def test_values_beyond_the_scales_are_refused() -> None:
    codec = codec_of("q8")
    parts = codec.encode(gaussian(1, NUM_TAPS * HIDDEN) * 1e12)
    with pytest.raises(ArtifactError, match=r"the target overflowed\. Load it in bfloat16"):
        codec.check_finite(parts)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("hidden_size", [48, 64, 128])
def test_numpy_alone_decodes_the_same(name: FeatureFormat, hidden_size: int) -> None:
    width = NUM_TAPS * hidden_size
    spread = np.linspace(0.1, 30, width, dtype=np.float32)
    channels = Channels(spread - 5, spread)
    codec = codec_of(name, hidden_size, channels)
    parts = codec.encode(gaussian(9, width) * torch.from_numpy(spread))
    ours = codec.decode(parts, torch.float32).numpy()
    theirs = numpy_decode(
        {part: array.numpy() for part, array in parts.items()}, int(name[1]), hidden_size, channels
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def numpy_decode(
    parts: Mapping[str, np.ndarray], bits: int, hidden_size: int, channels: Channels
) -> np.ndarray:
    """From the documented rules, with nothing of fledge but the table of levels."""
    block = max(32, math.gcd(hidden_size, 128))
    padded = -(-hidden_size // block) * block
    num_values = NUM_TAPS * padded
    codes, start, below = np.zeros((len(parts["codes"]), num_values), np.int64), 0, 0
    for plane_bits in {8: [8], 6: [4, 2], 5: [4, 1], 4: [4]}[bits]:
        runs, stop = 8 // plane_bits, start + num_values * plane_bits // 8
        plane = parts["codes"][:, start:stop].astype(np.int64)
        fields = [plane >> plane_bits * run & (1 << plane_bits) - 1 for run in range(runs)]
        codes += np.concatenate(fields, axis=1) << below
        start, below = stop, below + plane_bits
    numbers = np.arange(block)
    digits = np.array([SIGN_BITS >> 127 - j & 1 for j in range(block)])
    ones = np.array([[int(i & j).bit_count() for j in numbers] for i in numbers])
    rotation = (1 - 2 * digits) * (-1.0) ** ones / np.sqrt(block)
    scales = parts["scales"].astype(np.float64) ** 2
    levels = centroids(bits).numpy()[codes].reshape(len(codes), -1, block)
    blocks = (levels * scales[:, :, None]) @ rotation
    rows = blocks.reshape(len(codes), NUM_TAPS, padded)[:, :, :hidden_size]
    return channels.center + channels.spread * rows.reshape(len(codes), -1)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_the_rotation_is_orthogonal_and_spreads_every_channel(block: int) -> None:
    rotation = rotation_matrix(block)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(block))
    torch.testing.assert_close(rotation.abs(), torch.full((block, block), block**-0.5))
    # Without the signs a constant block would end up in one value.
    assert float((rotation @ torch.ones(block)).abs().max()) < 0.75 * math.sqrt(block)


@pytest.mark.parametrize(("name", "bits"), [("q8", 8), ("q6", 6), ("q5", 5), ("q4", 4)])
def test_levels_are_the_means_of_their_cells(name: FeatureFormat, bits: int) -> None:
    levels, edges = centroids(bits), thresholds(bits)
    assert len(levels) == 2**bits
    assert len(edges) == 2**bits - 1
    assert bool((levels[:-1] < edges).all())
    assert bool((edges < levels[1:]).all())
    torch.testing.assert_close(levels, -levels.flip(0))
    grid = torch.linspace(-8, 8, 2_000_001, dtype=torch.float64)
    density = torch.exp(-grid.square() / 2) / math.sqrt(2 * math.pi)
    codes = torch.bucketize(grid, edges.double())
    mass = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, codes, density)
    first = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, codes, density * grid)
    torch.testing.assert_close(levels.double(), first / mass, rtol=1e-3, atol=1e-4)
    error = (density * (grid - levels.double()[codes]).square()).sum() / density.sum()
    assert float(error.sqrt()) == pytest.approx(GAUSSIAN_ERRORS[name], rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs on the GPU instead")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "hidden_size"), [("q5", 64), ("q8", 100), ("q4", 256), ("q6", 40)]
)
@pytest.mark.parametrize("has_channels", [False, True])
def test_the_kernel_gives_the_bytes_of_its_twin(
    name: FeatureFormat, hidden_size: int, dtype: torch.dtype, has_channels: bool
) -> None:
    pytest.importorskip("triton")
    width = NUM_TAPS * hidden_size
    spread = np.geomspace(0.01, 10, width, dtype=np.float32)
    codec = codec_of(name, hidden_size, Channels(spread / 2, spread) if has_channels else None)
    rows = gaussian(21, width).to(dtype)
    rows[1] = 0
    rows[2] *= 1e3
    rows[3, 1] = 5e4
    rows[4, width - 1] = torch.inf
    rows[5, 0] = torch.nan
    rows[6] = 1e-7
    plain = codec.encode(rows)
    with choose_kernels("triton"):
        fused = codec.encode(rows)
    good = codec.is_finite_T(plain)
    assert (
        good.tolist() == codec.is_finite_T(fused).tolist() == [i not in (4, 5) for i in range(21)]
    )
    for part, array in plain.items():
        assert torch.equal(fused[part][good].view(torch.uint8), array[good].view(torch.uint8)), part
