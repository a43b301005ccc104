"""The default target's real tokenizer over real rows, when both are on this machine."""

import json
from itertools import islice
from pathlib import Path

import pytest

from fledge.contracts.conversation import Conversation, Message
from fledge.contracts.tokenize_settings import TokenizeSettings
from fledge.data.tokenize_stage import prepare_job, tokenize
from fledge.models.tokenizer import TargetTokenizer
from fledge.store.cache import CacheLayout, default_cache_dir
from fledge.store.corpus import Corpus, Sample
from tests.unit.data.tokenize_support import row, write_source

ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
END = "<|im_end|>"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    folder = CacheLayout(default_cache_dir()).target("x").parent
    found = sorted(folder.glob("smollm2-135m-instruct-*"))
    if not found:
        pytest.skip("smollm2-135m-instruct is not in the cache; `make demo` fetches it")
    return found[0]


def real_rows(folder: Path) -> list[Conversation]:
    rows = []
    with (folder / "gsm8k_train.jsonl").open(encoding="utf-8") as file:
        for number, line in enumerate(islice(file, 150), start=1):
            task = json.loads(line)
            messages = [
                {"role": "user", "content": task["question"]},
                {"role": "assistant", "content": task["answer"]},
            ]
            rows.append(row(number, messages, source="gsm8k"))
    for name in ("glaive_toolcall_en_demo", "glaive_toolcall_zh_demo"):
        chats = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for number, chat in enumerate(chats[:40], start=1):
            turns = [
                {"role": ROLES[turn["from"]], "content": turn["value"]}
                for turn in chat["conversations"]
            ]
            rows.append(row(number, turns, source=name))
    return rows


def said(tokenizer: TargetTokenizer, sample: Sample) -> str:
    token_ids = sample.token_ids[sample.loss_mask].tolist()
    return tokenizer.decode(token_ids, keeps_special_tokens=True)


def test_every_answer_of_real_rows_and_nothing_else_has_loss(
    smollm2: Path, train_data: Path, tmp_path: Path
) -> None:
    rows = real_rows(train_data)
    source = write_source(tmp_path / "in", rows, "conversations")
    settings = TokenizeSettings(max_tokens=100_000, as_recorded=True)
    manifest = tokenize(prepare_job(source, str(smollm2), settings), tmp_path / "out")
    counts = manifest.counts["rows"]
    assert counts["used"] == counts["read"] == len(rows)
    tokenizer = TargetTokenizer.load(smollm2)
    by_id: dict[str, tuple[Message, ...]] = {one.id: one.messages for one in rows}
    corpus = Corpus.open(tmp_path / "out")
    assert len(corpus) == len(rows)
    for sample in corpus:
        messages = by_id[sample.row_id]
        answers = [str(one["content"]) for one in messages if one["role"] == "assistant"]
        assert said(tokenizer, sample) == "".join(answer + END for answer in answers)
        upto = [i for i, one in enumerate(messages) if one["role"] == "assistant"][-1]
        whole = tokenizer.encode_all(
            [tokenizer.render(messages[: upto + 1], add_generation_prompt=False)]
        )[0]
        # The line break behind the last turn is the template's.
        assert sample.token_ids.tolist() == whole[: len(sample.token_ids)]
        assert len(whole) - len(sample.token_ids) == 1
