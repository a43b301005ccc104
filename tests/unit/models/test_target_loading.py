"""Targets that cannot be used are refused with a sentence, before or while they are loaded.

Catches: a model whose layers keep a running state (it would answer nonsense after the first
rejected draft), weights that are missing or of another shape and silently random, layers that are
cut off, rotations that depend on the neighbours in a batch, a truncated download, a damaged config
or tokenizer that ends in a traceback, and a device or type that does not exist.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from fledge import Engine, SamplingParams
from fledge.contracts.errors import (
    ArtifactError,
    CapacityError,
    ConfigError,
    MismatchError,
    RequestError,
)
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.target import Target
from fledge.models.target_loading import check_supported, load_model
from fledge.models.target_path import choose_target_path
from fledge.models.tokenizer import TargetTokenizer
from fledge.ops.kv import KVPool
from fledge.ops.packed import SequencePart, pack
from fledge.testing import save_tiny_target, target_of, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers_logging.disable_progress_bar()
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "good")


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "target"))


def load(directory: Path) -> Any:
    return load_model(directory, dtype=torch.float32, device=CPU)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_good_directory_answers(saved: Path) -> None:
    target = Target.load(saved, dtype=torch.float32, device=CPU)
    assert target.directory == saved
    assert (target.num_layers, target.hidden_size, target.context_len) == (4, 32, 512)
    assert target.eos_token_ids == {2}
    answer = Engine(target).generate(["hi"], SamplingParams(max_tokens=3))[0]
    assert 1 <= len(answer.token_ids) <= 3


def test_loading_leaves_transformers_logging_as_it_was(saved: Path) -> None:
    transformers_logging.enable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    load(saved)
    assert transformers_logging.get_verbosity() == verbosity
    assert transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba", "jamba", "falcon_h1", "zamba"])
def test_layers_with_a_running_state_are_refused(model_type: str) -> None:
    with pytest.raises(MismatchError) as caught:
        check_supported(AutoConfig.for_model(model_type))
    message = str(caught.value)
    assert f"model type {model_type!r} has layers of type" in message
    assert "full_attention, sliding_attention" in message
    assert "cannot be rolled back after a rejected draft" in message


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("t5", "'t5' is an encoder-decoder; fledge drives decoder-only models"),
        ("bart", "'bart' is an encoder-decoder"),
        ("bloom", "'bloom' does not route its attention through transformers' attention interface"),
        ("rwkv", "'rwkv' does not route its attention"),
        ("vit", "'vit' has no causal language model in transformers"),
        ("gemma3n_text", "'gemma3n_text' shares keys and values between 15 layers"),
        ("llama4_text", "'llama4_text' has layers of type chunked_attention"),
        ("bert", "'bert' is an encoder with a causal mode; fledge drives decoder-only models"),
        ("bert-generation", "'bert-generation' is an encoder"),
        ("roberta", "'roberta' is an encoder"),
        ("electra", "'electra' is an encoder"),
        ("diffllama", "'diffllama' computes its attention outside transformers' attention inter"),
        ("doge", "'doge' computes its attention outside"),
        ("hrm_text", "'hrm_text' computes its attention outside"),
        ("nemotron", "'nemotron' computes its attention outside"),
        ("recurrent_gemma", "'recurrent_gemma' computes its attention outside"),
    ],
)
def test_other_architectures_are_refused(model_type: str, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        check_supported(AutoConfig.for_model(model_type))


def test_an_encoder_is_refused_as_a_decoder_too() -> None:
    with pytest.raises(MismatchError, match="'bert' is an encoder"):
        check_supported(AutoConfig.for_model("bert", is_decoder=True))


ORDINARY = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma3_text", "olmo2", "olmo3"),
    *("mistral", "gpt_oss", "deepseek_v3", "phi3", "granite", "smollm3", "glm4", "ernie4_5"),
    *("gpt2", "gpt_neox", "opt"),
)


@pytest.mark.parametrize("model_type", ORDINARY)
def test_ordinary_decoders_are_not_refused(model_type: str) -> None:
    check_supported(AutoConfig.for_model(model_type))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("model_type", "rope", "rope_type"),
    [
        ("phi3", {"rope_parameters": LONGROPE}, "longrope"),
        ("phi3", {"rope_scaling": {**LONGROPE, "type": "longrope"}}, "longrope"),
        ("llama", {"rope_parameters": DYNAMIC}, "dynamic"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": DYNAMIC}},
            "dynamic",
        ),
    ],
)
def test_rotations_that_depend_on_the_whole_batch_are_refused(
    model_type: str, rope: dict[str, Any], rope_type: str
) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    config = AutoConfig.for_model(model_type, **sizes, **rope)
    with pytest.raises(MismatchError) as caught:
        check_supported(config)
    assert f"{model_type!r} uses rope type {rope_type!r}" in str(caught.value)
    assert "a request's answer would depend on its neighbours" in str(caught.value)


SIZE_KEYS = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")


@pytest.mark.parametrize("key", SIZE_KEYS)
def test_configs_without_a_size(key: str) -> None:
    config = AutoConfig.for_model("llama")
    vars(config)[key] = None  # past the validation that this class has and others lack
    with pytest.raises(MismatchError, match=f"'llama' has no {key} in its config; fledge needs"):
        check_supported(config)


@pytest.mark.parametrize("key", SIZE_KEYS)
@pytest.mark.parametrize("value", [0, -32])
def test_sizes_below_one(directory: Path, key: str, value: int) -> None:
    change_config(directory, **{key: value})
    with pytest.raises(ArtifactError, match=f"'llama' says {key} {value}; it must be 1 or more"):
        load(directory)


def test_an_unsupported_model_is_refused_before_its_weights_are_read(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    change_config(directory, model_type="qwen3_next", layer_types=["linear_attention"] * 4)
    with pytest.raises(MismatchError, match="layers of type linear_attention"):
        load(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{nope", "not a valid JSON file"),
        (b"\xff\xfe\x00", "not a valid JSON file"),
        (b"[1, 2]", ""),  # the reason depends on the version of transformers
        (b"{}", "Should have a `model_type` key"),
        (b'{"model_type": "nonesuch"}', "does not recognize this architecture"),
        (b'{"model_type": "llama", "hidden_size": "big"}', "'hidden_size' expected int, got str"),
        (b'{"model_type": "llama", "num_attention_heads": 3}', "number of attention heads (3)"),
        (b'{"model_type": "llama", "num_attention_heads": 0}', "modulo by zero"),
    ],
)
def test_config_garbage(directory: Path, content: bytes, message: str) -> None:
    (directory / "config.json").write_bytes(content)
    with pytest.raises(ArtifactError, match="cannot read .*config.json") as caught:
        load(directory)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_beside_the_weights_is_refused_without_a_question(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked the user"))
    change_config(directory, model_type="other", auto_map={"AutoConfig": "code.Config"})
    with pytest.raises(ArtifactError, match=r"cannot read .*config\.json.*custom code"):
        load(directory)
    path = directory / "tokenizer_config.json"
    settings = {"tokenizer_class": "Other", "auto_map": {"AutoTokenizer": ["code.Other", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ArtifactError, match="no usable tokenizer in .*custom code"):
        TargetTokenizer.load(directory)


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"has no config.json; it is not a target directory"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 20, 2000, -1])
def test_truncated_weights(directory: Path, keep: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArtifactError, match="are damaged or truncated .*; fetch them again") as c:
        load(directory)
    assert str(directory) in str(c.value)


def test_no_weights_at_all(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match="cannot load a causal language model from"):
        load(directory)


def test_a_shard_that_is_not_there(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match="model-00001.safetensors"):
        load(directory)


def test_missing_tensors_are_not_filled_with_random_numbers(directory: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(ArtifactError, match=f"lacks 1 tensors of the model, among them '{name}'"):
        load(directory)


def test_a_config_with_more_layers_than_the_weights(directory: Path) -> None:
    change_config(directory, num_hidden_layers=5)
    with pytest.raises(ArtifactError, match=r"lacks 9 tensors of the model, .*layers\.4\."):
        load(directory)


@pytest.mark.parametrize(
    ("architecture", "num_layers", "changes"),
    [
        ("llama", 3, {}),
        ("llama", 1, {}),
        ("qwen3-moe", 2, {}),
        ("deepseek-v3-moe", 3, {}),
        ("gemma3-hybrid", 2, {"layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_a_config_with_fewer_layers_than_the_weights(
    tmp_path: Path, architecture: str, num_layers: int, changes: dict[str, Any]
) -> None:
    directory = save_tiny_target(tmp_path / "target", architecture)
    change_config(directory, num_hidden_layers=num_layers, **changes)
    with pytest.raises(ArtifactError) as caught:
        load(directory)
    assert (
        f"holds weights of 4 layers, but num_hidden_layers in its config.json is {num_layers}"
        in (str(caught.value))
    )


@pytest.mark.parametrize("model_class", [AutoModel, AutoModelForCausalLM])
def test_layers_that_are_cut_off_under_other_names(tmp_path: Path, model_class: Any) -> None:
    """GPT-2 calls its layers h, and its checkpoints do without the prefix of the whole model."""
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 97}
    model_class.from_config(AutoConfig.for_model("gpt2", **sizes)).save_pretrained(tmp_path)
    change_config(tmp_path, n_layer=3)
    with pytest.raises(ArtifactError, match="weights of 4 layers, but num_hidden_layers .* is 3"):
        load(tmp_path)


def test_tensors_that_are_not_decoder_layers_may_be_left_over(directory: Path) -> None:
    """Rotation buffers of old checkpoints, other towers, multi-token prediction modules."""
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "vision_tower.layers.9.mlp.up_proj.weight": torch.ones(2, 2),
        "model.layers.4.eh_proj.weight": torch.ones(2, 4),
        "model.layers.4.input_layernorm.weight": torch.ones(32),
        "mtp.norm.weight": torch.ones(2),
    }
    change_tensors(directory, lambda tensors: tensors.update(extra))
    assert load(directory).config.num_hidden_layers == 4


class _Unloadable:
    """A model that does not fit the device."""

    base_model_prefix = "model"

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def to(self, device: torch.device) -> "_Unloadable":
        raise torch.OutOfMemoryError("no room")

    def parameters(self) -> list[torch.Tensor]:
        return [torch.empty(1024, 1024, 256, device="meta")]


def test_a_target_that_does_not_fit(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fledge.models.target_loading.AutoModelForCausalLM.from_pretrained",
        lambda *args, **kwargs: (_Unloadable(), defaultdict(set)),
    )
    with pytest.raises(CapacityError, match="needs 1.0 GiB on cpu, which does not have them free"):
        load(saved)


def test_a_target_larger_than_the_device_is_not_tried(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fledge.models.target_loading.AutoModelForCausalLM.from_pretrained",
        lambda *args, **kwargs: (_Unloadable(), defaultdict(set)),
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**29, 2**33))
    monkeypatch.setattr(_Unloadable, "to", None)
    with pytest.raises(CapacityError, match=r"needs 1.0 GiB on cuda, which has 0.5 free; use a sm"):
        load_model(saved, dtype=torch.float32, device=torch.device("cuda"))


def test_a_tensor_of_another_shape(directory: Path) -> None:
    name = "model.norm.weight"
    change_tensors(directory, lambda tensors: tensors.update({name: torch.ones(5)}))
    with pytest.raises(ArtifactError) as caught:
        load(directory)
    assert f"1 tensors in {directory} have other shapes" in str(caught.value)
    assert f"among them '{name}': [5] instead of [32]" in str(caught.value)


def test_a_config_of_another_width(directory: Path) -> None:
    change_config(directory, hidden_size=64)
    with pytest.raises(
        ArtifactError, match=r"'lm_head.weight': \[262, 32\] instead of \[262, 64\]"
    ):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "nope"}, "nope"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": None, "factor": 2.0}},
            "NoneType",
        ),
    ],
)
def test_values_that_only_the_model_code_trips_over(
    directory: Path, changes: dict[str, Any], reason: str
) -> None:
    change_config(directory, **changes)
    with pytest.raises(ArtifactError, match=f"cannot load a causal language model .*{reason}"):
        load(directory)


def test_memory_that_runs_out_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))

    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(target, "_model", fail)
    positions = torch.arange(3)
    packed = pack([SequencePart(positions + 5, positions, positions, positions)])
    monkeypatch.setattr(Target, "device", CPU)
    out_of_memory = pytest.raises(CapacityError, match="ran out of memory in a pass of 3 tokens")
    with choose_target_path("plain"), out_of_memory:
        target.forward(packed, KVPool(3))


@pytest.mark.parametrize("taps", [(), (-1,), (1, 5)])
def test_taps_that_do_not_fit(taps: tuple[int, ...]) -> None:
    target = target_of(tiny_model("llama"))
    target.check_taps((0, 4))
    with pytest.raises(ConfigError) as caught:
        target.check_taps(taps)
    assert f"taps {list(taps)} do not fit the target, which has 4 layers" in str(caught.value)


@pytest.mark.parametrize("eos", [None, 7, [7, 9]])
def test_end_of_text_ids_are_those_of_generate(eos: int | list[int] | None) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = eos
    expected = {None: {2}, 7: {7}}.get(eos if not isinstance(eos, list) else 0, {7, 9})
    assert target_of(model).eos_token_ids == expected


def test_a_target_without_an_end() -> None:
    model = tiny_model("llama", eos_token_id=None)
    model.generation_config.eos_token_id = None
    assert target_of(model).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: [path.unlink() for path in d.glob("tokenizer*")],
        lambda d: (d / "tokenizer.json").write_text("{nope"),
        lambda d: (d / "tokenizer.json").write_text("{}"),
        lambda d: (d / "tokenizer.json").write_bytes((d / "tokenizer.json").read_bytes()[:500]),
        lambda d: (d / "tokenizer_config.json").write_text("{nope"),
    ],
    ids=["missing", "garbage", "empty", "truncated", "config"],
)
def test_tokenizers_that_cannot_be_read(directory: Path, damage: Callable[[Path], Any]) -> None:
    damage(directory)
    with pytest.raises(ArtifactError, match="no usable tokenizer in") as caught:
        Target.load(directory, dtype=torch.float32, device=CPU)
    assert str(directory) in str(caught.value)
    assert "needs tokenizer.json" in str(caught.value)


def test_a_template_that_raises() -> None:
    inner = tiny_tokenizer()
    inner.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        TargetTokenizer(inner).encode_chat([{"role": "user", "content": "hi"}])


def test_prompts_are_chats_only_where_there_is_a_template() -> None:
    chatty, plain = (
        TargetTokenizer(tiny_tokenizer(has_chat_template=has)) for has in (True, False)
    )
    assert chatty.encode_prompt("hi") == chatty.encode("<|user|>hi<eos><|assistant|>")
    assert chatty.encode_prompt("hi", raw=True) == plain.encode_prompt("hi") == plain.encode("hi")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:-1", "cuda:x"])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown device {name!r}; use auto, cpu, cuda or"):
        pick_device(name)


def test_devices_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="device 'mps' is not supported"):
        pick_device("mps")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("cuda:0").index == 0
    with pytest.raises(ConfigError, match=r"device 'cuda:1' was asked for, .* sees 1 CUDA devices"):
        pick_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == CPU


def test_types(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert pick_dtype("auto", CPU) == torch.float32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert pick_dtype("auto", cuda) == torch.bfloat16
    assert pick_dtype("float16", CPU) == torch.float16
    with pytest.raises(ConfigError, match="unknown dtype 'int8'; use one of auto, float32"):
        pick_dtype("int8", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert pick_dtype("auto", cuda) == torch.float16
    with pytest.raises(
        ConfigError, match=r"cuda \(Tesla T4\) has no bfloat16; use --dtype float16"
    ):
        pick_dtype("bfloat16", cuda)
