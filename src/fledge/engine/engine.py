"""The engine: requests in, tokens out.

    while there is work:  admit waiting requests and read their prompts,
                          draft a tree for every running request,
                          verify all trees in one target pass, commit, hand out what is new.

Without a head every tree is a root and the same cycle is plain decoding.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from pathlib import Path

from fledge.contracts.errors import RequestError
from fledge.contracts.outputs import Chunk, Completion
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings
from fledge.engine.blocks import BlockPool, SlotTable
from fledge.engine.drafter import Drafter, HeadDrafter, NoDrafter
from fledge.engine.request import Prompt, Request, RequestMaker
from fledge.engine.sequence import Sequence
from fledge.engine.text import Detokenizer
from fledge.engine.verifier import Verifier
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.self_check import TESTED_MODEL_TYPES, check_same_as_transformers
from fledge.models.target import Target


class Engine:
    """A target, with or without a head, that answers prompts. It serves one thread."""

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
        self._requests = RequestMaker(target)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

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
        progress = progress or SilentProgress()
        name = str(precision).removeprefix("torch.")
        progress.note(f"{target}: {resolved.origin}; running in {name} on {place}")
        loaded = Target.load(resolved.directory, dtype=precision, device=place)
        if unused := loaded.unused_generation_settings:
            progress.note(
                f"{target} asks for {unused} in its generation_config.json; fledge does not apply "
                "them, so transformers' generate may answer differently until they are reset."
            )
        if loaded.config.model_type not in TESTED_MODEL_TYPES:
            check_same_as_transformers(loaded)
        return cls(loaded, loaded_head, settings)

    def generate(
        self, prompts: Many[Prompt], params: SamplingParams | Many[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer several prompts together; the answers come in the order of the prompts."""
        requests = self._requests.make_all(prompts, params)
        sequences = [self.add(request) for request in requests]
        try:
            while not all(seq.is_finished for seq in sequences):
                self._advance(sequences)
        finally:
            self.abort(sequences)
        return [seq.completion() for seq in sequences]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer one prompt piece by piece; the last chunk carries the completion.

        Several streams may be read in turns: whoever asks for a chunk moves all of them on.
        """
        seq = self.add(self._requests.make(prompt, params or SamplingParams()))
        num_sent = 0
        try:
            while True:
                while len(seq.output_ids) == num_sent:
                    self._advance([seq])
                fresh = tuple(seq.output_ids[num_sent:])
                num_sent += len(fresh)
                completion = seq.completion() if seq.is_finished else None
                yield Chunk(text=seq.take_new_text(), token_ids=fresh, completion=completion)
                if completion is not None:
                    return
        finally:
            self.abort([seq])

    def add(self, request: Request) -> Sequence:
        """Queue a request; `step` moves it on, and the sequence shows how far it is."""
        tokenizer = self.target.tokenizer
        seq = Sequence(
            request,
            SlotTable(self._blocks, self.target.device),
            Detokenizer(tokenizer.decode) if tokenizer else None,
        )
        self._waiting.append(seq)
        return seq

    def abort(self, sequences: Many[Sequence]) -> None:
        """Forget requests and free what they hold; finished ones have nothing left to free."""
        for seq in sequences:
            if seq in self._waiting:
                self._waiting.remove(seq)
            if seq in self._running:
                self._running.remove(seq)
                seq.table.release()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def _advance(self, sequences: Many[Sequence]) -> None:
        if any(seq.is_dropped for seq in sequences):
            raise RequestError(
                "the request was dropped: a pass that served it together with others failed or "
                "was interrupted. Ask again."
            )
        self.step()

    def step(self) -> None:
        """One cycle: read the prompts of new requests, draft and verify for the others."""
        try:
            self._cycle()
        except BaseException:
            # Some requests may have been committed and others not, caches half moved: a truthful
            # answer can only be had by asking again.
            for seq in self._running:
                seq.is_dropped = not seq.is_finished
                seq.table.release()
            self._running = []
            raise

    def _cycle(self) -> None:
        admitted = self._admit()
        if admitted:
            self._verifier.prefill(admitted)
        cycling = [seq for seq in self._running if seq not in admitted]
        if cycling:
            self._reserve(cycling)
            self._verifier.verify(cycling, self._drafter.draft(cycling))
        self._retire()

    def _admit(self) -> list[Sequence]:
        """Start waiting requests, as many as one prefill pass may hold and at least one."""
        admitted: list[Sequence] = []
        num_tokens = 0
        while self._waiting and len(self._running) < self.settings.max_requests:
            prompt_len = len(self._waiting[0].request.prompt_token_ids)
            num_tokens += prompt_len
            if admitted and num_tokens > self.settings.max_prefill_tokens:
                break
            seq = self._waiting.popleft()
            seq.start()
            seq.table.reserve(prompt_len)
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

    def _retire(self) -> None:
        """Let go of what has finished."""
        for seq in self._running:
            if seq.is_finished:
                seq.table.release()
        self._running = [seq for seq in self._running if not seq.is_finished]
        if not self.has_work:
            self._blocks.check_integrity()
            assert self._blocks.num_owned == 0, "a finished request left blocks behind"
