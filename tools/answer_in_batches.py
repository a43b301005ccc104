"""Answers conversations with transformers' generate in large batches, through the regenerate stage.

    python tools/answer_in_batches.py CONVERSATIONS --out ANSWERS --target T

For GPU machines whose host is slow: a batch of thousands costs one eager pass a token, whatever its
size. Journal, resume and manifest are those of `fledge regenerate`; sampled answers depend on the
batch they were drawn in.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fledge.cli.progress import terminal_progress
from fledge.contracts.errors import RequestError
from fledge.contracts.recipe import load_recipe
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.dialogue import Dialogue, Reply
from fledge.data.regenerate.stage import regenerate
from fledge.data.regenerate.worklist import Worklist
from fledge.models.resolve import resolve_target, target_name
from fledge.models.tokenizer import TargetTokenizer

_CACHE_TOKENS = 1_400_000
"""Most tokens of one batch in the cache, padding included."""


class BatchAnswerer:
    """Groups open rows by temperature, the longest prompts first, and answers group by group."""

    def __init__(self, target: str, settings: RegenerateSettings, *, batch: int) -> None:
        directory = resolve_target(target).directory
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(self.device)
        self._tokenizer = TargetTokenizer.load(directory)
        self.model = target_name(target)
        self.identity = {"model": self.model, "tokenizer": self._tokenizer.identity}
        self._settings, self._batch = settings, batch

    def answer(self, worklist: Worklist) -> None:
        while dialogues := list(worklist.pending()):
            asked: dict[float, list[tuple[list[int], Dialogue]]] = {}
            for dialogue in dialogues:
                question = dialogue.question
                assert question is not None
                try:
                    prompt = self._tokenizer.encode_chat(question.messages, question.tools)
                except RequestError as error:
                    worklist.fail(dialogue, str(error))
                else:
                    asked.setdefault(question.temperature, []).append((prompt, dialogue))
            for temperature, group in asked.items():
                group.sort(key=lambda one: -len(one[0]))
                while group:
                    self._answer_first(group, temperature, worklist)

    def _answer_first(
        self,
        group: list[tuple[list[int], Dialogue]],
        temperature: float,
        worklist: Worklist,
    ) -> None:
        """Answer as many of the group as fit a batch, and take them off."""
        room = len(group[0][0]) + self._settings.max_tokens
        count = max(1, min(self._batch, _CACHE_TOKENS // room))
        chosen, group[:] = group[:count], group[count:]
        torch.manual_seed(self._settings.seed + len(group))
        replies = self._generate([ids for ids, _ in chosen], temperature)
        for (_, dialogue), reply in zip(chosen, replies, strict=True):
            worklist.record(dialogue, reply)

    def _generate(self, prompts: list[list[int]], temperature: float) -> list[Reply]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
        lengths = torch.tensor([len(one) for one in prompts])
        mask = torch.arange(longest) >= longest - lengths[:, None]
        sampling = (
            {
                "do_sample": True,
                "temperature": temperature,
                "top_k": 0,
                "top_p": self._settings.top_p,
            }
            if temperature
            else {"do_sample": False}
        )
        said = self._model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.long().to(self.device),
            max_new_tokens=self._settings.max_tokens,
            pad_token_id=0,
            **sampling,
        )[:, longest:].tolist()
        return [self._reply(one) for one in said]

    def _reply(self, said: list[int]) -> Reply:
        eos = self._model.generation_config.eos_token_id
        ends = {eos} if isinstance(eos, int) else set(eos or ())
        end = next((n for n, token in enumerate(said) if token in ends), None)
        kept = said if end is None else said[: end + 1]
        text = self._tokenizer.decode(kept)
        return Reply(
            message={"role": "assistant", "content": text},
            finish_reason="length" if end is None else "stop",
            token_ids=tuple(kept),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--set", action="append", default=[], dest="assignments")
    arguments = parser.parse_args()
    settings = load_recipe(None, arguments.assignments).regenerate
    answerer = BatchAnswerer(arguments.target, settings, batch=arguments.batch)
    manifest = regenerate(
        arguments.source, arguments.out, settings, answerer, progress=terminal_progress()
    )
    print(manifest.counts, file=sys.stderr)


if __name__ == "__main__":
    main()
