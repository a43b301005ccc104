"""Reading whole documents on CUDA: the fused call and its twin, captures and those of the CPU."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.features.capture import capture
from fledge.features.capture_job import open_input
from fledge.features.feature_store import FeatureStore
from fledge.ops.attention import AttentionSpec
from fledge.ops.document_attention import DocumentAttention, attend_documents_plain
from fledge.ops.documents import make_documents
from fledge.ops.vocab_share import weigh_part, weigh_part_plain
from fledge.testing import save_tiny_target, target_of, tiny_model
from tests.unit.features.capture_support import SMALL, random_samples, save_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
LENGTHS = (700, 1, 33, 1300, 128)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("window", [None, 1, 100, 4096])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size"), [(9, 3, 64), (32, 8, 128), (4, 1, 256), (4, 4, 24)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_equals_its_twin(
    window: int | None, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    query, keys, values = (
        torch.randn(sum(LENGTHS), heads, head_size, generator=generator, device=CUDA).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    documents = make_documents(LENGTHS, CUDA)
    spec = AttentionSpec(scale=head_size**-0.5, window=window)
    ours = DocumentAttention(documents).attend(query, keys, values, spec)
    wide = (tensor.double() for tensor in (query, keys, values))
    twin = attend_documents_plain(*wide, documents, spec)
    assert ours.shape == twin.shape
    assert relative(ours, twin) < {torch.float32: 1e-4, torch.float16: 2e-3}.get(dtype, 1e-2)


@pytest.mark.parametrize(
    "architecture", ["llama", "mistral-sliding", "gemma2-hybrid", "gpt-oss-hybrid-moe"]
)
def test_a_target_reads_on_cuda_what_it_reads_on_the_cpu(architecture: str) -> None:
    model = tiny_model(architecture)
    token_ids_T = torch.randint(3, 97, (120,), generator=torch.Generator().manual_seed(0))
    lengths, taps = (70, 1, 49), (0, 2, 4)
    on_cpu = target_of(model).read(token_ids_T, make_documents(lengths, torch.device("cpu")), taps)
    on_cuda = target_of(model.to(CUDA)).read(
        token_ids_T.to(CUDA), make_documents(lengths, CUDA), taps
    )
    assert relative(on_cuda.features_TF.cpu(), on_cpu.features_TF) < 1e-3
    assert relative(on_cuda.final_TD.cpu(), on_cpu.final_TD) < 1e-3


def made(base: Path, name: str, device: torch.device, settings: CaptureSettings) -> FeatureStore:
    given = open_input(
        base / "corpus", str(base / "target"), settings, dtype=torch.float32, device=device
    )
    capture(given, base / name)
    return FeatureStore.open(base / name)


def test_captures_on_cuda_are_those_of_the_cpu_and_repeat(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target", "gemma3-hybrid")
    lengths = [int(length) for length in np.random.default_rng(0).integers(3, 200, 60)]
    save_corpus(tmp_path / "corpus", tmp_path / "target", random_samples(lengths))
    settings = replace(SMALL, features="exact", target="hidden", target_features="exact")
    first, second, cpu = (
        made(tmp_path, name, device, settings)
        for name, device in (("first", CUDA), ("second", CUDA), ("cpu", torch.device("cpu")))
    )
    assert first.manifest.files == second.manifest.files
    assert len(first) == len(cpu)
    for place in range(len(cpu)):
        ours, theirs = first.read(place), cpu.read(place)
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.rows["greedy"].tolist() == theirs.rows["greedy"].tolist()
        for name in ("taps.values", "final.values", "log_mass"):
            np.testing.assert_allclose(ours.rows[name], theirs.rows[name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", [262, 49152, 128256])
def test_a_part_of_the_vocabulary_is_weighed_as_its_twin_does(
    vocab_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    logits_PV = 6 * torch.randn(300, vocab_size, generator=generator, device=CUDA)
    is_part_V = torch.rand(vocab_size, generator=generator, device=CUDA) < 0.3
    logits_PV[1, is_part_V] -= 200
    logits_PV = logits_PV.to(dtype)
    fused, plain = weigh_part(logits_PV, is_part_V), weigh_part_plain(logits_PV, is_part_V)
    highest_P = logits_PV.max(dim=-1).values
    assert torch.equal(logits_PV.gather(1, fused.greedy_P[:, None])[:, 0], highest_P)
    torch.testing.assert_close(fused.log_part_P, plain.log_part_P, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.log_share_P, plain.log_share_P, rtol=1e-5, atol=2e-5)
