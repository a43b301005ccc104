"""A tiny target that has something to say: for tests of training, and for yours.

Random targets say random things, and no head can learn to guess them. This one is trained for some
seconds on a small language of animals, and answers like this:

    fox hare eel  ->  the fox hears the hare. the hare finds the eel.

Which verb belongs to an animal has to be learnt, which animals come has to be copied. The target
does not have to be good at it: a head learns whatever it says.
"""

import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.progress import SilentProgress
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.contracts.settings import EngineSettings
from fledge.contracts.tokenize_settings import TokenizeSettings
from fledge.data import tokenize_stage
from fledge.data.regenerate.in_process import EngineAnswerer
from fledge.data.regenerate.stage import regenerate
from fledge.engine.engine import Engine
from fledge.store.manifest import CONVERSATIONS, Plan
from fledge.store.rows import rows_file, write_rows
from fledge.store.stage_directory import open_stage
from fledge.testing import tiny_model, tiny_tokenizer

# fmt: off
_ANIMALS = (
    "ant", "bear", "crow", "deer", "eel", "fox", "goat", "hare",
    "ibis", "jay", "kite", "lynx", "mole", "newt", "owl", "puma",
    "quail", "rat", "seal", "toad", "vole", "wolf", "yak", "zebu",
)
# fmt: on
_VERBS = ("sees", "hears", "calls", "finds")
_ASSISTANT_ID = 4
_BATCH = 16
_LEARNING_RATE = 5e-3
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def ask(count: int, *, seed: int = 0) -> list[str]:
    """Different prompts of the language, of which there are 12,144."""
    assert count <= 12_144, f"the language has 12,144 prompts, not {count}"
    source = random.Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[" ".join(source.sample(_ANIMALS, 3))] = None
    return list(prompts)


def answer(prompt: str) -> str:
    """What a perfect speaker of the language answers."""
    animals = prompt.split()
    verbs = [_VERBS[_ANIMALS.index(animal) % len(_VERBS)] for animal in animals]
    pairs = zip(animals, verbs, animals[1:], strict=False)
    return " ".join(f"the {one} {verb} the {other}." for one, verb, other in pairs)


def save_language_target(
    directory: Path, *, seed: int = 0, num_steps: int = 160, **sizes: Any
) -> Path:
    """Train the target and write it like any other; about ten seconds on one core.

    `sizes` are of transformers' config, in place of the usual ones.
    """
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", seed=seed, vocab_size=len(tokenizer), **{**_SIZES, **sizes})
    _draw_narrow(model, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    warm, prompts = num_steps // 8, iter(ask(num_steps * _BATCH, seed=seed + 1))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (num_steps - step) / (num_steps - warm))
    )
    for _ in range(num_steps):
        ids_BT = _batch([next(prompts) for _ in range(_BATCH)], tokenizer)
        labels_BT = ids_BT[:, 1:].masked_fill(~_is_answer(ids_BT)[:, :-1], 0)
        logits_BTV = model(input_ids=ids_BT).logits[:, :-1]
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=0)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_language_corpus(
    directory: Path,
    target: Path,
    *,
    num_prompts: int,
    seed: int = 2,
    temperatures: tuple[float, ...] = (0.0,),
    draft_vocab_size: int = 64,
) -> Path:
    """What the target answers to prompts of the language, as `fledge tokenize` leaves it.

    `directory` gets `conversations`, `answers` and `corpus`; the last is returned.
    """
    _write_conversations(directory / "conversations", ask(num_prompts, seed=seed))
    settings = RegenerateSettings(max_tokens=80, temperatures=temperatures)
    engine = Engine.load(
        str(target), settings=EngineSettings(max_requests=128, max_pass_tokens=4096), device="cpu"
    )
    regenerate(
        directory / "conversations",
        directory / "answers",
        settings,
        EngineAnswerer(engine, str(target), settings),
        progress=SilentProgress(),
    )
    chosen = TokenizeSettings(draft_vocab_size=draft_vocab_size, max_tokens=256)
    job = tokenize_stage.prepare_job(directory / "answers", str(target), chosen)
    tokenize_stage.tokenize(job, directory / "corpus")
    return directory / "corpus"


def _write_conversations(directory: Path, prompts: list[str]) -> None:
    rows = [
        Conversation(
            id=f"animals/{number}",
            messages=({"role": "user", "content": prompt},),
            origin=Origin(source="animals", licence="Apache-2.0", file="animals", row=number),
        )
        for number, prompt in enumerate(prompts, start=1)
    ]
    with open_stage(directory, Plan(kind=CONVERSATIONS, settings={})) as stage:
        if not stage.is_finished:
            write_rows(rows_file(directory, 0), rows)
            stage.finish(counts={"rows": len(rows)}, files=[rows_file(directory, 0)])


@torch.no_grad()
def _draw_narrow(model: Any, *, seed: int) -> None:
    """Small weights, as training wants them; `tiny_model` draws wide ones."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.06)
        else:
            parameter.fill_(1.0)


def _batch(prompts: list[str], tokenizer: Any) -> Tensor:
    """Prompts with their answers in the tiny tokenizer's chat template, filled up with padding."""
    texts = [f"<|user|>{one}<eos><|assistant|>{answer(one)}<eos>" for one in prompts]
    rows = [torch.tensor(ids) for ids in tokenizer(texts)["input_ids"]]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _is_answer(ids_BT: Tensor) -> Tensor:
    """True from the token that begins the answer on."""
    return (ids_BT == _ASSISTANT_ID).cumsum(dim=1) > 0
