"""The engine: requests in, tokens out.

    while there is work:  admit waiting requests and read their prompts,
                          draft a tree for every running request,
                          verify all trees in one target pass, commit, hand out what is new.

Without a head every tree is a root and the same cycle is plain decoding.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import cast

from fledge.contracts.errors import RequestError
from fledge.contracts.outputs import Chunk, Completion
from fledge.contracts.progress import Progress
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings
from fledge.engine.blocks import BlockPool, SlotTable
from fledge.engine.drafter import Drafter, HeadDrafter, NoDrafter
from fledge.engine.sequence import Request, Sequence
from fledge.engine.text import Detokenizer
from fledge.engine.verifier import Verifier
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.target import Target
from fledge.models.tokenizer import Message

Prompt = str | Many[int] | Many[Message]
"""A text (put through the chat template, if there is one), a conversation, or token ids."""


class Engine:
    """A target, with or without a head, that answers prompts."""

    def __init__(
        self,
        target: Target,
        head: Eagle3Head | None = None,
        settings: EngineSettings | None = None,
        *,
        drafter: Drafter | None = None,
    ) -> None:
        """`drafter` replaces the head, for tests and for other kinds of draft."""
        self.target = target
        self.settings = settings or EngineSettings()
        if drafter is None:
            drafter = NoDrafter(target.device)
            if head is not None:
                drafter = HeadDrafter(fit_to_target(head, target), target, self.settings.tree)
        self._drafter = drafter
        self._verifier = Verifier(target, self.settings.accept, drafter.taps)
        self._blocks = BlockPool(self.settings.block_size)
        self._waiting: deque[Request] = deque()
        self._running: list[Sequence] = []
        self._next_request_id = itertools.count()

    @classmethod
    def load(
        cls,
        target: str,
        head: str | Path | None = None,
        settings: EngineSettings | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        progress: Progress | None = None,
    ) -> "Engine":
        """Build an engine from names: a target as `--target` takes it, a head's directory."""
        place = pick_device(device)
        precision = pick_dtype(dtype, place)
        # The head is read first: it is small, and a wrong path should not cost a target's loading.
        loaded_head = load_head(Path(head)) if head is not None else None
        resolved = resolve_target(target, progress=progress)
        return cls(
            Target.load(resolved.directory, dtype=precision, device=place), loaded_head, settings
        )

    def generate(
        self, prompts: Many[Prompt], params: SamplingParams | Many[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer several prompts together; the answers come in the order of the prompts."""
        if isinstance(params, SamplingParams) or params is None:
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"there are {len(prompts)} prompts and {len(params)} sets of sampling parameters; "
                "give one for all or one for each."
            )
        requests = [self.make_request(*pair) for pair in zip(prompts, params, strict=True)]
        done: dict[int, Completion] = {}
        for request in requests:
            self.add(request)
        try:
            while len(done) < len(requests):
                for seq in self.step():
                    if seq.is_finished:
                        done[seq.request.request_id] = seq.completion()
        finally:
            self.abort(requests)
        return [done[request.request_id] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer one prompt piece by piece; the last chunk carries the completion."""
        request = self.make_request(prompt, params or SamplingParams())
        self.add(request)
        num_sent = 0
        try:
            while True:
                for seq in self.step():
                    if seq.request.request_id != request.request_id:
                        continue
                    fresh = tuple(seq.output_ids[num_sent:])
                    num_sent += len(fresh)
                    completion = seq.completion() if seq.is_finished else None
                    yield Chunk(text=seq.take_new_text(), token_ids=fresh, completion=completion)
                    if completion is not None:
                        return
        finally:
            self.abort([request])

    def make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Check a prompt and turn it into token ids."""
        token_ids = self._encode(prompt)
        context_len = self.target.context_len
        if not token_ids:
            raise RequestError("the prompt is empty: it has no tokens to continue from.")
        if len(token_ids) >= context_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens and the target's context holds "
                f"{context_len}, the answer included; shorten the prompt."
            )
        largest = max(token_ids)
        if largest >= self.target.vocab_size or min(token_ids) < 0:
            raise RequestError(
                f"the prompt holds token id {largest}; the target's vocabulary has ids 0 to "
                f"{self.target.vocab_size - 1}."
            )
        if params.stop and self.target.tokenizer is None:
            raise RequestError("stop texts need a tokenizer, and this target was built without.")
        eos = frozenset() if params.ignore_eos else self.target.eos_token_ids
        return Request(
            request_id=next(self._next_request_id),
            prompt_token_ids=tuple(token_ids),
            params=params,
            max_new_tokens=min(params.max_tokens, context_len - len(token_ids)),
            eos_token_ids=eos | frozenset(params.stop_token_ids),
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return list(cast(Many[int], prompt))
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise RequestError("this target was built without a tokenizer; give token ids.")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise RequestError("the prompt is empty.")
            return tokenizer.encode_prompt(prompt)
        if not tokenizer.has_chat_template:
            raise RequestError(
                "this target has no chat template, so it cannot read a conversation; "
                "give the prompt as one text."
            )
        return tokenizer.encode_chat(cast(Many[Message], prompt))

    def add(self, request: Request) -> None:
        """Queue a request; `step` serves it."""
        self._waiting.append(request)

    def abort(self, requests: Many[Request]) -> None:
        """Forget requests and free what they hold; finished ones are none of its business."""
        ids = {request.request_id for request in requests}
        self._waiting = deque(r for r in self._waiting if r.request_id not in ids)
        for seq in self._running:
            if seq.request.request_id in ids:
                seq.table.release()
        self._running = [s for s in self._running if s.request.request_id not in ids]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[Sequence]:
        """One cycle for every request that is running; returns those with new tokens."""
        admitted = self._admit()
        if admitted:
            self._verifier.prefill(admitted)
        cycling = [seq for seq in self._running if not seq.is_finished and seq not in admitted]
        if cycling:
            self._reserve(cycling)
            self._verifier.verify(cycling, self._drafter.draft(cycling))
        return self._retire(admitted + cycling)

    def _admit(self) -> list[Sequence]:
        """Start waiting requests, as many as one prefill pass may hold and at least one."""
        admitted: list[Sequence] = []
        num_tokens = 0
        while self._waiting and len(self._running) < self.settings.max_requests:
            num_tokens += len(self._waiting[0].prompt_token_ids)
            if admitted and num_tokens > self.settings.max_prefill_tokens:
                break
            request = self._waiting.popleft()
            tokenizer = self.target.tokenizer
            detokenizer = Detokenizer(tokenizer.decode) if tokenizer else None
            table = SlotTable(self._blocks, self.target.device)
            table.reserve(len(request.prompt_token_ids))
            seq = Sequence(request, table, detokenizer)
            admitted.append(seq)
            self._running.append(seq)
        self._grow_caches()
        return admitted

    def _reserve(self, sequences: list[Sequence]) -> None:
        """Room for the newest token and for the worst case of the cycle behind it."""
        for seq in sequences:
            seq.table.reserve(seq.len + self._drafter.num_scratch)
        self._grow_caches()

    def _grow_caches(self) -> None:
        self._verifier.grow_cache(self._blocks.num_slots)
        self._drafter.grow_cache(self._blocks.num_slots)

    def _retire(self, sequences: list[Sequence]) -> list[Sequence]:
        for seq in sequences:
            if seq.is_finished:
                seq.table.release()
        self._running = [seq for seq in self._running if not seq.is_finished]
        if not self.has_work:
            self._blocks.check_integrity()
            assert self._blocks.num_owned == 0, "a finished request left blocks behind"
        return sequences
