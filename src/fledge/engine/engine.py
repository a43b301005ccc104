"""The engine: requests in, tokens out.

    while there is work:  ask the controller how much to draft, the scheduler who runs,
                          draft a tree for every decoding request that has room for one,
                          verify all trees and read chunks of new prompts in one target pass,
                          commit, hand out what is new, let go of what has ended.

Without a head every tree is a root and the same cycle is plain decoding.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from pathlib import Path

from fledge.contracts.errors import RequestError
from fledge.contracts.outputs import Chunk, Completion, EngineStats
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import AcceptRule, EngineSettings
from fledge.engine.controller import AdaptiveController, make_controller
from fledge.engine.cycle import make_cycle
from fledge.engine.drafter import Drafter, NoDrafter
from fledge.engine.grammar import GrammarCompiler
from fledge.engine.head_drafter import HeadDrafter
from fledge.engine.memory import allocate_cache, make_cache
from fledge.engine.pass_times import PassTimes
from fledge.engine.request import Prompt, Request, RequestMaker
from fledge.engine.scheduler import Scheduler
from fledge.engine.sequence import Sequence
from fledge.engine.text import Detokenizer
from fledge.engine.timing import measure_pass_times
from fledge.engine.verifier import Verifier
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.self_check import TESTED_MODEL_TYPES, check_same_as_transformers
from fledge.models.shipped_heads import choose_head, describe_drafting
from fledge.models.target import Target
from fledge.ops.accept import Walk, walk_gumbel, walk_rejection
from fledge.ops.logit_rules import TokenCounts
from fledge.ops.synthetic_walk import SyntheticWalk

_RULES: dict[AcceptRule, Callable[..., Walk]] = {
    "gumbel": walk_gumbel,
    "rejection": walk_rejection,
}


class Engine:
    """A target, with or without a head, that answers prompts. It serves one thread."""

    def __init__(
        self,
        target: Target,
        head: Eagle3Head | None = None,
        settings: EngineSettings | None = None,
        *,
        drafter: Drafter | None = None,
        times: PassTimes | None = None,
        measured_with: SyntheticWalk | None = None,
        waits_for_cycles: bool = False,
    ) -> None:
        """`drafter` replaces the head, for tests and for other kinds of draft.

        `times` is what the adaptive controller needs to know of the machine; without it drafting
        follows the settings in every cycle. `measured_with` makes drafts right by chance and the
        answers worthless: it is for measuring an engine, and no command that answers has it. Nor
        has one `waits_for_cycles`, which shows what running ahead of the host is worth.
        """
        self.target = target
        self.settings = settings or EngineSettings()
        if measured_with is not None:  # drafts that are right by chance are not to be copied
            self.settings = replace(self.settings, copies=False)
        walk = measured_with or _RULES[self.settings.accept]
        if drafter is None and head is not None:
            head = fit_to_target(head, target)
            drafter = HeadDrafter(head, target, self.settings, has_noise=walk is walk_gumbel)
        self._drafter = drafter = drafter or NoDrafter()
        self._cache = make_cache(target, drafter, self.settings)
        drafter.attach(self._cache)
        self._verifier = Verifier(target, self._cache, drafter, walk)
        self._scheduler = Scheduler(self._cache, self.settings)
        self._controller = make_controller(
            self.settings, times, max_pass_tokens=self.settings.max_pass_tokens
        )
        self._requests = RequestMaker(target, self._cache.capacity)
        self._counts = TokenCounts(target.vocab_size, target.device)
        self.grammars = GrammarCompiler(target.tokenizer, target.vocab_size, target.eos_token_ids)
        self._cycle = make_cycle(
            target,
            self._cache,
            drafter,
            self._scheduler,
            self._verifier,
            self._controller,
            self.settings,
            walk,
            times=times,
            waits_for_cycles=waits_for_cycles,
        )
        self._num_added = 0

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
        """Build an engine from names: a target as `--target` takes it, a head's directory.

        `default` is the head that comes with fledge for the target, and none where there is none;
        settings that ask for no tree of their own then draft as tuning found best.
        """
        place = pick_device(device)
        precision = pick_dtype(dtype, place)
        directory, settings = choose_head(
            head, target, settings, device_kind=place.type, progress=progress
        )
        # The head is read first: it is small, and a wrong path should not cost a target's loading.
        loaded_head = load_head(directory) if directory is not None else None
        resolved = resolve_target(target, progress=progress)
        progress = progress or SilentProgress()
        name = str(precision).removeprefix("torch.")
        progress.note(f"{target}: {resolved.origin}; running in {name} on {place}")
        progress.note(describe_drafting(directory, settings))
        loaded = Target.load(resolved.directory, dtype=precision, device=place)
        if unused := loaded.unused_generation_settings:
            progress.note(
                f"{target} asks for {unused} in its generation_config.json; fledge does not apply "
                "them, so transformers' generate may answer differently until they are reset."
            )
        if loaded.config.model_type not in TESTED_MODEL_TYPES:
            check_same_as_transformers(loaded)
        if loaded.why_plain is not None:
            progress.note(f"{target} runs on transformers' layers: {loaded.why_plain}")
        times = None
        if loaded_head is not None and settings.controller == "adaptive":
            loaded_head = fit_to_target(loaded_head, loaded)
            with progress.task("timing passes", unit=""):
                times = measure_pass_times(loaded, loaded_head, settings, name=target)
        engine = cls(loaded, loaded_head, settings, times=times)
        if place.type == "cuda":
            allocate_cache(engine._cache, loaded)
        return engine

    def capture_ahead(self, progress: Progress | None = None, *, budget_s: float = 45.0) -> int:
        """Capture likely cycles, so that no request waits for that; returns how many graphs.

        For engines that will answer for long, on CUDA; elsewhere nothing is done.
        """
        steady = self._cycle.ahead.steady
        if not steady.can_capture:
            return 0
        # A real request first: kernels prove themselves on what it reads.
        length = min(9, self.max_tokens - 3)
        self.generate([[1] * length], SamplingParams(max_tokens=3, ignore_eos=True))
        is_measured = isinstance(self._controller, AdaptiveController)
        num_graphs = steady.capture_ahead(
            progress or SilentProgress(), budget_s=budget_s, is_measured=is_measured
        )
        self._cache.reset()
        self._cycle.forget_stats()
        return num_graphs

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
        seq, num_sent = self.add(self.make_request(prompt, params)), 0
        try:
            while True:
                while len(seq.output_ids) == num_sent:
                    self._advance([seq])
                fresh = tuple(seq.output_ids[num_sent:])
                logprobs = tuple(seq.logprobs[num_sent:]) if seq.logprobs else None
                num_sent += len(fresh)
                completion = seq.completion() if seq.is_finished else None
                yield Chunk(
                    text=seq.take_new_text(),
                    token_ids=fresh,
                    completion=completion,
                    logprobs=logprobs,
                )
                if completion is not None:
                    return
        finally:
            self.abort([seq])

    def make_request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Check a prompt and turn it into token ids, for `add`."""
        return self._requests.make(prompt, params or SamplingParams())

    def add(self, request: Request, *, priority: int = 0, client: str = "") -> Sequence:
        """Queue a request; `step` moves it on, and the sequence shows how far it is.

        Higher priorities go first; clients of equal priority take turns by tokens served.
        """
        tokenizer, params, detokenizer = self.target.tokenizer, request.params, None
        if tokenizer is not None:
            # What ends an answer is no part of its text, whatever else is shown.
            shown = frozenset(params.shown_token_ids) - request.eos_token_ids
            detokenizer = Detokenizer(partial(tokenizer.decode, shown=shown))
        grammar = self.grammars.start(params.grammar) if params.grammar is not None else None
        self._num_added += 1
        seq = Sequence(
            request,
            self._counts,
            detokenizer,
            grammar=grammar,
            priority=priority,
            client=client,
            arrival=self._num_added,
        )
        self._scheduler.add(seq)
        return seq

    def abort(self, sequences: Many[Sequence]) -> None:
        """Forget requests and free what they hold; ended ones have nothing left to free."""
        self._cycle.host.leave()
        for seq in sequences:
            self._scheduler.cancel(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take a running request's memory, as if it had run out; it goes on later."""
        if seq.row >= 0:
            self._cycle.host.leave()
            self._scheduler.preempt(seq)
            self._verifier.forget_sampling()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def max_tokens(self) -> int:
        """Most tokens that a prompt and its answer may have together."""
        capacity, context_len = self._cache.capacity, self.target.context_len
        # The last token is never read, so it needs no memory.
        return context_len if capacity is None else min(context_len, capacity + 1)

    @property
    def stats(self) -> EngineStats:
        """What has happened since the engine was made, and how things stand."""
        return self._cycle.report(self._controller.state())

    def check_integrity(self) -> None:
        """Prove that no block of memory is lost or shared wrongly."""
        self._cache.check_integrity(self._scheduler.running)

    def _advance(self, sequences: Many[Sequence]) -> None:
        for seq in sequences:
            if seq.error is not None:
                raise seq.error
        self.step()

    def step(self) -> None:
        """One cycle: draft and verify for requests that decode, read prompts of the others."""
        try:
            self._cycle.run()
        except BaseException as error:
            self._drop_running(error)
            raise

    def _drop_running(self, error: BaseException) -> None:
        """A cycle was cut short: some requests may be committed and others not, entries half moved.

        A truthful answer can only be had by asking again.
        """
        for seq in self._scheduler.drop_running():
            if not seq.is_finished:
                seq.error = RequestError(
                    "the request was dropped: a pass that served it together with others failed "
                    f"or was interrupted ({type(error).__name__}). Ask again."
                )
            self._cycle.stats.count_ended(seq)
        self._cycle.forget()
        self._cache.reset()
        self._verifier.forget_sampling()
