"""The engine: requests in, tokens out.

    while there is work:  ask the controller how much to draft, the scheduler who runs,
                          draft a tree for every decoding request that has room for one,
                          verify all trees and read chunks of new prompts in one target pass,
                          commit, hand out what is new, let go of what has ended.

Without a head every tree is a root and the same cycle is plain decoding.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

from fledge.contracts.errors import CapacityError, RequestError
from fledge.contracts.outputs import Chunk, Completion, EngineStats
from fledge.contracts.progress import Progress, SilentProgress
from fledge.contracts.sampling import SamplingParams
from fledge.contracts.settings import EngineSettings
from fledge.engine.cache import PagedCache
from fledge.engine.controller import make_controller
from fledge.engine.draft_plan import PLAIN, CycleReport, DraftPlan, Load
from fledge.engine.drafter import Drafter, HeadDrafter, NoDrafter
from fledge.engine.memory import plan_blocks, probe_bytes_per_slot
from fledge.engine.pass_times import PassTimes
from fledge.engine.request import Prompt, Request, RequestMaker
from fledge.engine.scheduler import Scheduler, StepPlan
from fledge.engine.sequence import Sequence
from fledge.engine.stats import StatsKeeper
from fledge.engine.text import Detokenizer
from fledge.engine.timing import measure_pass_times
from fledge.engine.verifier import Verifier, Yield
from fledge.models.head import Eagle3Head
from fledge.models.head_files import fit_to_target, load_head
from fledge.models.placement import pick_device, pick_dtype
from fledge.models.resolve import resolve_target
from fledge.models.self_check import TESTED_MODEL_TYPES, check_same_as_transformers
from fledge.models.target import Target
from fledge.ops.logit_rules import TokenCounts

_REFRESH_EVERY = 32
"""Cycles between two looks at what the calibration has counted."""


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
    ) -> None:
        """`drafter` replaces the head, for tests and for other kinds of draft.

        `times` is what the adaptive controller needs to know of the machine; without it drafting
        follows the settings in every cycle.
        """
        self.target = target
        self.settings = settings or EngineSettings()
        if drafter is None:
            drafter = NoDrafter()
            if head is not None:
                drafter = HeadDrafter(fit_to_target(head, target), target, self.settings)
        self._drafter = drafter
        self._cache = _make_cache(target, drafter, self.settings)
        drafter.attach(self._cache)
        self._verifier = Verifier(target, self.settings.accept, self._cache, drafter)
        self._scheduler = Scheduler(self._cache, self.settings)
        self._controller = make_controller(
            self.settings, times, max_pass_tokens=self.settings.max_pass_tokens
        )
        self._requests = RequestMaker(target, self._cache.capacity)
        self._counts = TokenCounts(target.vocab_size, target.device)
        self._stats = StatsKeeper()
        self._plan = PLAIN
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
        settings, times = settings or EngineSettings(), None
        if loaded_head is not None and settings.controller == "adaptive":
            loaded_head = fit_to_target(loaded_head, loaded)
            with progress.task("timing passes", unit=""):
                times = measure_pass_times(loaded, loaded_head, settings, name=target)
        return cls(loaded, loaded_head, settings, times=times)

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
        seq = self.add(self.make_request(prompt, params))
        num_sent = 0
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
        tokenizer = self.target.tokenizer
        self._num_added += 1
        seq = Sequence(
            request,
            self._counts,
            Detokenizer(tokenizer.decode) if tokenizer else None,
            priority=priority,
            client=client,
            arrival=self._num_added,
        )
        self._scheduler.add(seq)
        return seq

    def abort(self, sequences: Many[Sequence]) -> None:
        """Forget requests and free what they hold; ended ones have nothing left to free."""
        for seq in sequences:
            self._scheduler.cancel(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take a running request's memory, as if it had run out; it goes on later."""
        if seq.row >= 0:
            self._scheduler.preempt(seq)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        """What has happened since the engine was made, and how things stand."""
        return self._stats.report(
            self._scheduler, self._cache, self._drafter, self._controller.state()
        )

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
            self._cycle()
        except BaseException as error:
            self._drop_running(error)
            raise

    def _drop_running(self, error: BaseException) -> None:
        """A cycle was cut short: some requests may be committed and others not, entries half moved.

        A truthful answer can only be had by asking again.
        """
        for seq in self._scheduler.running:
            if not seq.is_finished:
                seq.error = RequestError(
                    "the request was dropped: a pass that served it together with others failed "
                    f"or was interrupted ({type(error).__name__}). Ask again."
                )
            seq.leave_cache()
        self._scheduler.running.clear()
        self._cache.reset()
        self._verifier.forget_sampling()

    def _cycle(self) -> None:
        started = time.perf_counter()
        load = self._load()
        if load.num_requests and self._drafter.num_scratch:
            self._plan = self._controller.choose(load)
        num_preemptions = self._scheduler.num_preemptions
        plan = self._scheduler.plan(
            num_scratch=0 if self._plan.is_plain else self._drafter.num_scratch,
            num_drafts=self._plan.nodes if load.num_requests else 0,
        )
        if self._scheduler.num_preemptions != num_preemptions:
            self._verifier.forget_sampling()
        planned = time.perf_counter()
        draft_plan = self._fit(self._plan, plan)
        trees = None if draft_plan.is_plain else self._drafter.draft(plan.drafting, draft_plan)
        drafted = time.perf_counter()
        result = self._verifier.run(plan, trees)
        verified = time.perf_counter()
        if not self._plan.is_plain:
            self._drafter.catch_up([seq for seq, _ in [*plan.finishing, *plan.reading]])
        caught_up = time.perf_counter()
        self._settle(plan)
        now = time.perf_counter()
        draft_s, target_s = drafted - planned + caught_up - verified, verified - drafted
        self._report(
            plan, draft_plan, load, result, draft_s, target_s, now - started - draft_s - target_s
        )

    def _load(self) -> Load:
        decoding = [seq for seq in self._scheduler.running if seq.is_decoding]
        unread = sum(seq.num_unread for seq in self._scheduler.running) - len(decoding)
        return Load(
            num_requests=len(decoding),
            num_sampled=sum(not seq.request.params.is_greedy for seq in decoding),
            # However much there is to read, a quarter of the pass is open for drafts.
            num_other_tokens=min(unread, self.settings.max_pass_tokens * 3 // 4),
            context_tokens=sum(seq.kv_len for seq in decoding),
        )

    def _fit(self, wanted: DraftPlan, plan: StepPlan) -> DraftPlan:
        """The controller's plan for the requests that really have room for drafts."""
        if wanted.is_plain or not plan.drafting:
            return PLAIN
        room = self.settings.max_pass_tokens - plan.num_decoding - plan.num_read_tokens
        most = len(plan.drafting) * self.settings.tree.budget
        nodes = max(0, min(wanted.nodes, most, room))
        return replace(wanted, nodes=nodes) if nodes else PLAIN

    def _settle(self, plan: StepPlan) -> None:
        """Make what was computed known, let go of what windows left behind and of what ended."""
        read = [seq for seq, _ in [*plan.finishing, *plan.reading]]
        for seq in [*plan.drafting, *plan.plain, *read]:
            if seq.has_ended:
                self._stats.count_ended(seq)
                self._scheduler.finish(seq, keep=seq.error is None)
            else:
                self._cache.publish(seq)
                self._cache.free_behind_windows(seq)
        if not self.has_work:
            self.check_integrity()

    def _report(
        self,
        plan: StepPlan,
        draft_plan: DraftPlan,
        load: Load,
        result: Yield,
        draft_s: float,
        target_s: float,
        other_s: float,
    ) -> None:
        drafter = self._drafter
        report = CycleReport(
            plan=draft_plan,
            load=replace(
                load, num_requests=plan.num_decoding, num_other_tokens=plan.num_read_tokens
            ),
            target_s=target_s,
            draft_s=draft_s,
            other_s=other_s,
            emitted=result.num_emitted,
            reached_D=result.reached_at_depth,
            accepted_D=result.accepted_at_depth,
            num_extended=drafter.num_extended if isinstance(drafter, HeadDrafter) else 0,
            gains=drafter.gains if isinstance(drafter, HeadDrafter) else None,
        )
        self._stats.count_cycle(report)
        if plan.num_decoding:
            self._controller.observe(report)
        if isinstance(drafter, HeadDrafter) and self._stats.num_cycles % _REFRESH_EVERY == 0:
            drafter.calibration.refresh()


def _make_cache(target: Target, drafter: Drafter, settings: EngineSettings) -> PagedCache:
    """Memory for the target and the head, sized by what the device has free."""
    target_bytes = probe_bytes_per_slot(target)
    bytes_per_slot = dict(target_bytes)
    if drafter.bytes_per_slot:
        head_bytes = bytes_per_slot.get(drafter.window, 0) + drafter.bytes_per_slot
        bytes_per_slot[drafter.window] = head_bytes
    max_tokens = target.context_len + drafter.num_scratch
    num_blocks = plan_blocks(
        bytes_per_slot, settings=settings, max_tokens=max_tokens, device=target.device
    )
    if None in num_blocks and num_blocks[None] * settings.block_size < 2:
        raise CapacityError("the cache memory holds fewer than two tokens; raise cache_tokens.")
    return PagedCache(
        num_blocks,
        block_size=settings.block_size,
        max_requests=settings.max_requests,
        max_tokens=max_tokens,
        device=target.device,
        head_window=drafter.window,
        target_windows=target_bytes,
        shares_prefixes=settings.share_prefixes,
    )
