"""llama2.c data file to Hugging Face directory."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import SilentProgress
from fledge.models.llama2c import convert_llama2c

D, F, L, H, K, CONTEXT = 32, 48, 2, 4, 2, 16
PIECES = [" ", "a", "b", "ab", " a", " ab"]
V = 3 + 256 + len(PIECES)
SHAPES = [(V, D), (L, D), (L, D, D), (L, K * 8, D), (L, K * 8, D), (L, D, D), (L, D)]
SHAPES += [(L, F, D), (L, D, F), (L, F, D), (D,), (2, CONTEXT, 4)]


def write_data(path: Path) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype("<f4") * 0.3 for shape in SHAPES]
    tokens = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(bytes([n]) for n in range(256))]
    tokens += [piece.encode() for piece in PIECES]
    vocabulary = struct.pack("<i", 5) + b"".join(
        struct.pack("<fi", -float(token_id), len(token)) + token
        for token_id, token in enumerate(tokens)
    )
    weights = b"".join(array.tobytes() for array in arrays)
    path.write_bytes(struct.pack("<7i", D, F, L, H, K, V, CONTEXT) + weights + vocabulary)
    return arrays


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotate(x: np.ndarray) -> np.ndarray:
    """Neighbouring pairs, as llama2.c does it; x is [position, head, 8]."""
    angle = np.arange(len(x))[:, None] / 10000.0 ** (np.arange(0, 8, 2) / 8)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out = np.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out


def forward(arrays: list[np.ndarray], tokens: list[int]) -> np.ndarray:
    """llama2.c's forward pass in plain numpy."""
    embed, norm1, wq, wk, wv, wo, norm2, w1, w2, w3, final, _ = (a.astype("f8") for a in arrays)
    x, count = embed[tokens], len(tokens)
    for i in range(L):
        h = rms(x, norm1[i])
        q = rotate((h @ wq[i].T).reshape(count, H, 8))
        k = rotate((h @ wk[i].T).reshape(count, K, 8)).repeat(H // K, 1)
        v = (h @ wv[i].T).reshape(count, K, 8).repeat(H // K, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(8)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", probs, v).reshape(count, D) @ wo[i].T
        h = rms(x, norm2[i])
        gate = h @ w1[i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w3[i].T)) @ w2[i].T
    return rms(x, final) @ embed.T


def test_converted_model_computes_what_llama2c_does(tmp_path):
    arrays = write_data(tmp_path / "data")
    out = tmp_path / "out"
    out.mkdir()
    convert_llama2c(tmp_path / "data", out, progress=SilentProgress())
    model = AutoModelForCausalLM.from_pretrained(out)
    tokens = [1, 260, 261, 5, 262, 100]
    logits = model(torch.tensor([tokens])).logits[0].detach().numpy()
    np.testing.assert_allclose(logits, forward(arrays, tokens), atol=1e-4)
    assert model.generation_config.eos_token_id == [2, 1]
    tokenizer = AutoTokenizer.from_pretrained(out)
    first = 3 + 256
    assert tokenizer("ab").input_ids == [1, first + PIECES.index(" ab")]
    assert tokenizer("z").input_ids == [1, first, 3 + ord("z")]
    assert tokenizer.decode(tokenizer("ab é").input_ids, skip_special_tokens=True) == "ab é"


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (slice(0, 20), "is not a llama2.c checkpoint: its first seven numbers are"),
        (slice(4, None), "is not a llama2.c checkpoint"),
        (slice(0, 4000), "is truncated: it has 4000 bytes, its header describes"),
        (slice(0, -2), rf"tokenizer in .* damaged after {V - 1} of {V} tokens"),
    ],
)
def test_damaged_files_are_refused(tmp_path, cut, message):
    write_data(tmp_path / "data")
    (tmp_path / "data").write_bytes((tmp_path / "data").read_bytes()[cut])
    (tmp_path / "out").mkdir()
    with pytest.raises(ArtifactError, match=message):
        convert_llama2c(tmp_path / "data", tmp_path / "out", progress=SilentProgress())
