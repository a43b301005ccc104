"""Other engines from our side: found or not, commands in their words, counts made comparable."""

import json
import sys
from pathlib import Path

import pytest

from fledge.contracts.errors import ConfigError, EngineError, MismatchError
from fledge.contracts.outputs import Completion, Stats
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.server_settings import ServeSettings
from fledge.contracts.settings import TreeSettings
from fledge.contracts.tuned_settings import TunedSettings
from fledge.interop.engines import sglang_runner
from fledge.interop.engines.acceptance import our_acceptance
from fledge.interop.engines.installation import InstalledEngine, find_engine
from fledge.interop.engines.job import EngineRun, run_in_engine
from fledge.interop.engines.pair import EnginePair, prepare_pair
from fledge.interop.engines.serving import ServerPlan, pick_port, print_words, server_words
from fledge.interop.export import export_head
from fledge.models.head_files import load_head, save_head
from fledge.testing import save_tiny_target, target_of, tiny_head, tiny_model, tiny_tokenizer
from tests.unit.interop.head_cases import write_head, write_target


@pytest.fixture
def pair(tmp_path: Path) -> EnginePair:
    head = write_head(tmp_path / "head")
    return EnginePair(
        target=Path("/models/target"),
        head=head,
        head_config=load_head(head).config,
        directory=Path("/models/target"),
        context_len=512,
    )


def plan(pair: EnginePair, **changes: object) -> ServerPlan:
    settings = ServeSettings(port=9000, api_keys_file=None)
    given: dict[str, object] = {
        "pair": pair,
        "tuned": TunedSettings(tree=TreeSettings(depth=5, width=4, budget=20)),
        "settings": settings,
        "model_names": ("mine",),
        "max_requests": 16,
        "dtype": "bfloat16",
        "is_cpu": False,
        **changes,
    }
    return ServerPlan(**given)  # type: ignore[arg-type]


def test_vllm_drafts_the_depth_of_the_tree_as_a_chain(pair: EnginePair) -> None:
    words = server_words("vllm", plan(pair))
    assert words[:3] == ["vllm", "serve", "/models/target"]
    assert f'"model": "{pair.head}", "num_speculative_tokens": 5' in words[4]
    rest = "--host 127.0.0.1 --port 9000 --served-model-name mine --dtype bfloat16"
    assert " ".join(words[5:]) == f"{rest} --max-num-seqs 16"
    assert server_words("vllm", plan(pair, is_cpu=True))[-1] == "--enforce-eager"


def test_sglang_counts_the_root(pair: EnginePair) -> None:
    text = print_words("sglang", plan(pair))
    tree = "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 21"
    assert tree in text
    assert text.endswith("--dtype bfloat16 --max-running-requests 16")


def test_llama_server_shares_its_context_among_its_slots(pair: EnginePair) -> None:
    text = print_words("llamacpp", plan(pair))
    assert "--spec-type draft-eagle3 --spec-draft-n-max 5" in text
    assert "--parallel 16 --ctx-size 8192" in text


def test_limits_on_prompts_and_answers_become_the_length_of_the_model(pair: EnginePair) -> None:
    limited = ServeSettings(port=9000, max_prompt_tokens=100, max_answer_tokens=50)
    assert "--max-model-len 150" in print_words("vllm", plan(pair, settings=limited))
    assert "--context-length 150" in print_words("sglang", plan(pair, settings=limited))


def test_keys_are_never_printed(pair: EnginePair) -> None:
    kept = ServeSettings(port=9000, api_keys_file="keys.txt")
    for engine in ("vllm", "sglang", "llamacpp"):
        text = print_words(engine, plan(pair, settings=kept, keys=("secret",)))
        assert "secret" not in text
        assert "keys.txt" in text
    from_environment = print_words("vllm", plan(pair, keys=("secret",)))
    assert from_environment.endswith('--api-key "$FLEDGE_API_KEYS"')


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": ("one", "two")}, "there are 2 API keys, and SGLang takes one"),
        ({"model_names": ("one", "two")}, "there are 2 model names, and SGLang takes one"),
    ],
)
def test_what_sglang_cannot_do_is_refused(
    pair: EnginePair, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        server_words("sglang", plan(pair, **changes))


def test_a_free_port_is_picked_where_any_will_do() -> None:
    assert pick_port(8000) == 8000
    assert 1024 < pick_port(0) < 65536


def test_an_engine_that_is_not_installed_comes_with_the_way_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"SGLang is not installed.*pip install sglang") as error:
        find_engine("sglang")
    assert "--engine-python sglang-env/bin/python" in str(error.value)


def test_a_python_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="/no/such/python cannot be run as a Python"):
        find_engine("vllm", Path("/no/such/python"))
    with pytest.raises(ConfigError, match="could not be asked for vLLM"):
        find_engine("vllm", Path("/bin/false"))


def test_an_engine_that_fails_is_quoted() -> None:
    """Here for want of its library: the runner runs, and says so."""
    engine = InstalledEngine(name="llamacpp", python=Path(sys.executable), version="0")
    run = EngineRun(
        target=Path("target.gguf"),
        head=None,
        tree=TreeSettings(),
        prompts=((1,),),
        params=SamplingParams(logit_bias={3: 1.0}, stop=("x",)),
        eos_token_ids=(2,),
        dtype="float32",
        max_model_len=64,
    )
    with pytest.raises(EngineError, match=r"llama.cpp 0 failed: .*No module named 'xllamacpp'"):
        run_in_engine(engine, [run])
    with pytest.raises(EngineError, match="did not answer within 0.001 seconds"):
        run_in_engine(engine, [run], timeout_s=0.001)


def test_what_an_engine_says_can_be_kept(tmp_path: Path) -> None:
    engine = InstalledEngine(name="llamacpp", python=Path(sys.executable), version="0")
    with pytest.raises(EngineError):
        run_in_engine(engine, [], keep_in=tmp_path / "kept", turn=tmp_path / "turn")
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {"job.json", "log"}
    job = json.loads((tmp_path / "kept" / "job.json").read_text(encoding="utf-8"))
    assert job == {"runs": [], "turn": str(tmp_path / "turn")}


def completion(depths: tuple[int, ...]) -> Completion:
    stats = Stats(
        num_tokens=len(depths),
        cycles=2,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        longest_gap_s=0.0,
        num_prompt_reused=0,
        num_preemptions=0,
        offered_at_depth=(2, 2, 1),
        accepted_at_depth=(2, 1, 1),
    )
    return Completion(
        text="",
        token_ids=tuple(range(len(depths))),
        prompt_token_ids=(1,),
        finish_reason="stop",
        stats=stats,
        draft_depths=depths,
    )


def test_acceptance_is_counted_as_the_other_engine_counts_it() -> None:
    """Two cycles: one draft accepted; then three, of which the second ended the answer."""
    answers = [completion((0, 1, 0, 1, 2))]
    verified = our_acceptance(answers, 3, "verified")
    assert (verified.num_drafts, verified.accepted_at_position) == (2, (2, 1, 1))
    assert verified.rates == (1.0, 0.5, 1.0)
    first = our_acceptance(answers, 3, "all_but_last")
    assert (first.num_drafts, first.accepted_at_position) == (1, (1, 0, 0))
    assert first.rates == (1.0, 0.0, None)


def test_exports_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    target = write_target(tmp_path / "target")
    plain = prepare_pair("vllm", str(target), None)
    assert (plain.target, plain.head) == (target, None)
    first = prepare_pair("llamacpp", str(target), None)
    made = first.target.stat().st_mtime_ns
    again = prepare_pair("llamacpp", str(target), None)
    assert (again.target, again.target.stat().st_mtime_ns) == (first.target, made)
    assert first.target.name == "target.gguf"


def test_the_last_layer_is_refused_for_llama_cpp(tmp_path: Path) -> None:
    """llama.cpp hands over a normed state there, as its acceptance of such heads shows."""
    target = save_tiny_target(tmp_path / "target")
    model = target_of(tiny_model("llama", vocab_size=len(tiny_tokenizer())))
    save_head(tiny_head(model, taps=(1, 2, 4)), tmp_path / "head")
    with pytest.raises(MismatchError, match="hands over the normed state"):
        export_head(tmp_path / "head", tmp_path / "out", "gguf", target=str(target))


@pytest.mark.parametrize("name", ["spec_correct_drafts_histogram", "spec_accept_histogram"])
def test_sglang_counts_passes_by_how_many_drafts_they_accepted(name: str) -> None:
    """Two answers: passes that accepted none, one, two and so on of three drafts."""
    facts = [{name: [2, 1, 0, 3]}, {name: [1, 1]}, {}]
    assert sglang_runner._accepted(facts, 3) == [8, 5, 3, 3]
    assert sglang_runner._accepted([{}], 0) == [0]


def test_options_of_an_engine_are_handed_over(tmp_path: Path) -> None:
    run = EngineRun(
        target=tmp_path,
        head=tmp_path,
        tree=TreeSettings(depth=3, width=1, budget=3),
        prompts=((1,),),
        params=SamplingParams(),
        eos_token_ids=(),
        dtype="bfloat16",
        max_model_len=64,
        engine_options={"attention_backend": "triton"},
    )
    options = sglang_runner._options(run.as_json())
    assert options["attention_backend"] == "triton"
    assert options["speculative_num_draft_tokens"] == 4
