"""Native products against torch's: every format, odd sizes, any company, and what is packed."""

import platform
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fledge.ops import native_library as native_library_module
from fledge.ops.native_library import NativeLibrary, NoNativeKernelsError, native_library
from fledge.ops.native_product import Format, NativeMatrix, check_products
from fledge.store.compiler import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return native_library()


def _halves(*shape: int, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * 0.02).half().float()


def _weights(form: Format, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Floats as a file of such weights holds them once it is dequantised."""
    generator = torch.Generator().manual_seed(seed)
    groups = rows * columns // 32

    def whole(low: int, high: int, per: int = 32) -> Tensor:
        count = rows * columns // per
        return torch.randint(low, high, (count, per), generator=generator).float()

    if form is Format.FOUR_HALF:
        step, least = _halves(2, groups, 1, generator=generator)
        found = whole(0, 16) * step + least
    elif form is Format.FOUR_FLOAT:
        step, least = _halves(2, groups, 1, generator=generator)
        sixes = torch.randint(1, 64, (2, groups, 1), generator=generator)
        found = whole(0, 16) * (step * sixes[0]) - least * sixes[1]
    elif form is Format.EIGHT_HALF:
        codes = whole(-127, 128)
        codes[:, 0] = 127
        found = codes * _halves(groups, 1, generator=generator)
    elif form is Format.EIGHT_FINE:
        codes = whole(-32, 32, per=16)
        fine = torch.randint(-127, 128, (2 * groups, 1), generator=generator)
        found = codes * (_halves(2 * groups, 1, generator=generator) * fine)
    else:
        found = torch.randn(rows, columns, generator=generator)
        found = found.bfloat16().float() if form is Format.BRAIN else found
    return found.view(rows, columns).contiguous()


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (7, 96), (50, 832)])
def test_products_in_every_format(
    library: NativeLibrary, form: Format, rows: int, columns: int
) -> None:
    weight = _weights(form, rows, columns)
    bias = torch.randn(rows)
    matrix = NativeMatrix(library, weight, bias)
    assert matrix.formats == (form,)
    x = torch.randn(33, columns)
    whole = matrix(x)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    sizes = torch.nn.functional.linear(x.abs().double(), weight.abs().double())
    assert float(((whole - wanted).abs() / (sizes + 1)).max()) < 1e-6
    for count in range(1, 33):
        assert matrix(x[:count]).equal(whole[:count]), f"{count} rows have other bits than 33"
    assert matrix(x[17:20]).equal(whole[17:20])


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("outlier", [1.0, 300.0])
def test_products_are_as_exact_as_float32(
    library: NativeLibrary, form: Format, outlier: float
) -> None:
    """Against float64, also where a few columns are much larger than the others."""
    weight = _weights(form, 256, 576, seed=1)
    x = torch.randn(24, 576, generator=torch.Generator().manual_seed(2))
    x[:, ::97] *= outlier
    exact = x.double() @ weight.double().t()
    ours, torchs = (
        (found - exact).square().mean().sqrt()
        for found in (NativeMatrix(library, weight)(x).double(), (x @ weight.t()).double())
    )
    assert ours < 2 * torchs


def _searched(library: NativeLibrary, form: Format, weight: Tensor) -> NativeMatrix:
    matrix = NativeMatrix(library, weight, is_searched=True)
    # Products of these alone are screened.
    assert form not in (Format.EIGHT_HALF, Format.EIGHT_FINE) or matrix.formats == (form,)
    return matrix


def _best(matrix: NativeMatrix, x: Tensor) -> list[int]:
    """By a thread of its own: one that had to make nearly all products screens no more for long."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(matrix.best(x).tolist()))
    thread.start()
    thread.join()
    return found


def _first_best(products: Tensor) -> list[int]:
    return [int(row.argmax()) for row in products.numpy()]


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (50, 96), (832, 576)])
def test_best_outputs_are_those_of_all(
    library: NativeLibrary, form: Format, rows: int, columns: int
) -> None:
    """Few rows of x and many, and rows of weights that are equal or nearly so."""
    weight = _weights(form, rows, columns)
    weight[3], weight[rows - 1] = weight[rows // 2], weight[rows // 2]
    matrix = _searched(library, form, weight)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100, columns, generator=generator)
    x[:10] = weight[rows // 2] * 3  # whose largest products are equal
    x[10:20] += weight[7:8] * 50  # and one far above the others
    wanted = _first_best(matrix(x))
    for count in (1, 2, 3, 4, 5, 8, 17, 100):
        for begin in range(0, 100 - count + 1, count):
            found = _best(matrix, x[begin : begin + count])
            assert found == wanted[begin : begin + count], (count, begin)


@pytest.mark.parametrize("form", [Format.EIGHT_HALF, Format.EIGHT_FINE])
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e-20, 300.0, 1e17, 1e25])
def test_best_outputs_of_any_size(library: NativeLibrary, form: Format, size: float) -> None:
    """Also where some columns are far larger, and where all products are nearly or quite equal."""
    weight = _weights(form, 320, 96)
    x = torch.randn(12, 96, generator=torch.Generator().manual_seed(3))
    x[:6, ::31] *= size
    x[6:] *= size
    matrix = _searched(library, form, weight)
    assert _best(matrix, x) == _first_best(matrix(x))
    for _ in range(3):  # the second time it may be known that nearly all blocks have to be made
        assert matrix.best(x).tolist() == _first_best(matrix(x))


@pytest.mark.parametrize(
    ("form", "of_weights", "of_x"),
    [
        (Format.EIGHT_HALF, 1.0, 1.0),
        (Format.EIGHT_HALF, 1.0, 2.0**-110),
        (Format.EIGHT_FINE, (1 + 2.0**-17) * 2.0**-85, 1.0),
        (Format.EIGHT_FINE, (1 + 2.0**-17) * 2.0**-60, 2.0**-60),
    ],
)
def test_the_best_output_may_be_told_by_the_lower_digits_alone(
    library: NativeLibrary, form: Format, of_weights: float, of_x: float
) -> None:
    """Also where the squares of weights or of x are too small for floats."""
    weight = torch.zeros(32, 32)
    weight[:, 0] = -127.0
    weight[1:16] = weight[17:] = -torch.arange(96, 128).float()
    weight[0, 0], weight[16, 0], weight[16, 1:] = 127.0, 126.0, 127.0
    x = torch.full((4, 32), 32000.0)
    x[:, 0] = 4194304.0  # so large that the others are nothing in the highest digits
    matrix = _searched(library, form, weight * of_weights)
    assert _best(matrix, x * of_x) == _first_best(matrix(x * of_x)) == [16] * 4


@pytest.mark.parametrize("form", [Format.EIGHT_HALF, Format.EIGHT_FINE, Format.FOUR_HALF])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_has_no_best_output(
    library: NativeLibrary, form: Format, bad: float
) -> None:
    matrix = _searched(library, form, _weights(form, 64, 96))
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(4))
    wanted = _first_best(matrix(x))
    x[2, 40] = bad
    found = _best(matrix, x)
    assert found[2] == -1
    assert found[:2] + found[3:] == wanted[:2] + wanted[3:]


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e-20, 1e20, 1e30])
def test_products_of_any_size(library: NativeLibrary, form: Format, size: float) -> None:
    weight = _weights(form, 40, 96)
    x = torch.randn(5, 96) * size
    found, exact = NativeMatrix(library, weight)(x), x.double() @ weight.double().t()
    largest = float((x.abs().double() @ weight.abs().double().t()).max())
    assert float((found - exact).abs().max()) <= 1e-6 * largest + 1e-36


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("size", [1.0, 1.866, 1.867, 1.99, 2.0])
def test_the_largest_sums_have_room(library: NativeLibrary, form: Format, size: float) -> None:
    """All columns at the largest whole number or just above it, with the largest or least codes."""
    weight = _weights(form, 64, 96)
    groups = weight.view(64, 3, 32)
    groups[:32, :, 2:] = groups[:32].amax(dim=2, keepdim=True)
    groups[32:, :, 2:] = groups[32:].amin(dim=2, keepdim=True)
    signs = torch.ones(6, 96)
    signs[1], signs[2, ::2], signs[3, 4::8], signs[4, 32:64] = -1, -1, -1, -1
    x = signs * size
    x[5] = torch.linspace(-size, size, 96)
    matrix = NativeMatrix(library, weight)
    found, exact = matrix(x), x.double() @ weight.double().t()
    sizes = x.abs().double() @ weight.abs().double().t()
    assert float(((found - exact).abs() / (sizes + 1e-30)).max()) < 1e-5
    assert torch.cat([matrix(row[None]) for row in x]).equal(found)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_row(
    library: NativeLibrary, form: Format, bad: float
) -> None:
    weight = _weights(form, 40, 96)
    x = torch.randn(7, 96)
    wanted = NativeMatrix(library, weight)(x)
    x[3, 50] = bad
    found = NativeMatrix(library, weight)(x)
    others = [0, 1, 2, 4, 5, 6]
    assert found[others].equal(wanted[others])
    assert not found[3][weight[:, 50] != 0].isfinite().any()


def test_rows_of_odd_length_stay_floats(library: NativeLibrary) -> None:
    weight = torch.randn(13, 41)
    matrix, x = NativeMatrix(library, weight), torch.randn(9, 41)
    assert matrix.formats == (Format.FLOATS,)
    assert matrix.packed_bytes == 0
    torch.testing.assert_close(matrix(x), x @ weight.t())


def test_packing_gives_back_the_same_floats(library: NativeLibrary) -> None:
    """Products with unit rows are the weights themselves, whatever they are packed in."""
    for form in Format:
        weight = _weights(form, 9, 64, seed=3)
        matrix = NativeMatrix(library, weight)
        assert matrix(torch.eye(64)).t().equal(weight)


def test_one_other_float_is_not_packed(library: NativeLibrary) -> None:
    weight = _weights(Format.FOUR_HALF, 40, 64)
    weight[37, 5] += 1e-3
    matrix = NativeMatrix(library, weight)
    assert matrix.formats == (Format.FLOATS,)
    assert matrix(torch.eye(64)).t().equal(weight)


def test_pieces_have_formats_of_their_own(library: NativeLibrary) -> None:
    first, second = _weights(Format.FOUR_HALF, 6, 64), _weights(Format.EIGHT_HALF, 5, 64)
    weight = torch.cat([first, second, torch.randn(3, 64)])
    matrix = NativeMatrix(library, weight, sizes=[6, 5, 3])
    assert matrix.formats == (Format.FOUR_HALF, Format.EIGHT_HALF, Format.FLOATS)
    x = torch.randn(6, 64)
    torch.testing.assert_close(matrix(x), x @ weight.t(), rtol=1e-5, atol=1e-5)


def test_rounded_weights_are_near(library: NativeLibrary) -> None:
    weight = torch.randn(24, 64)
    matrix = NativeMatrix(library, weight, rounded=Format.EIGHT_HALF)
    found = matrix(torch.eye(64)).t()
    assert matrix.formats == (Format.EIGHT_HALF,)
    assert 0 < float((found - weight).abs().max()) < float(weight.abs().max()) / 200


def test_the_library_is_checked(library: NativeLibrary) -> None:
    assert check_products(library)


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    native_library.cache_clear()
    try:
        with pytest.raises(NoNativeKernelsError, match=r"there is no C\+\+ compiler"):
            native_library()
    finally:
        native_library.cache_clear()


def test_a_compiler_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("compiler")
    broken = place / "broken-c++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\n'
        "echo 'error: no such target' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("FLEDGE_CACHE", str(place / "cache"))
    native_library.cache_clear()
    try:
        with pytest.raises(NoNativeKernelsError, match="cannot compile them .error: no such"):
            native_library()
    finally:
        native_library.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are kinds of x86-64")
@pytest.mark.parametrize(
    "kind", ["x86-64", "x86-64-v3", "alderlake", "x86-64-v4", "icelake-server"]
)
def test_every_kind_of_processor_has_kernels(kind: str, tmp_path: Path) -> None:
    """Without AVX, with AVX2 and AVX-512, with dots of bytes and without: tests run only what this
    processor is of."""
    compiler = find_compiler()
    assert compiler is not None
    source = Path(native_library_module.__file__).parent / "native" / "decoder.cpp"
    options = ["-O0", "-std=c++17", "-w", f"-march={kind}", "-fopenmp", "-S"]
    command = [compiler, str(source), *options, "-o", str(tmp_path / "kernels.s")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
