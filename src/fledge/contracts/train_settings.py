"""Settings of training: the loss, the optimizer, what is measured on the way."""

from dataclasses import dataclass, field
from typing import Literal

from fledge.contracts.capture_settings import FeatureFormat
from fledge.contracts.data_settings import check_range
from fledge.contracts.errors import ConfigError
from fledge.contracts.head_settings import HeadSettings

LossKind = Literal["soft_cross_entropy", "acceptance", "blend"]
LossMean = Literal["labels", "positions"]
Precision = Literal["auto", "float32", "bfloat16"]
Parallel = Literal["ddp", "fsdp"]
OptimizerKind = Literal["adamw", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the head is taught."""

    kind: LossKind = "soft_cross_entropy"
    """Against the target's probabilities, or the sum of min(p, q) that serving would accept, or
    from the first to the second as a guess becomes likely to be accepted."""

    target_temperature: float = 1.0
    """The target's probabilities are taught at this temperature; below 1 its best tokens count
    more, as greedy decoding counts them."""

    draft_temperature: float = 1.0
    """And the head's own are compared with them at this one: where both are the same, the head
    drafts at temperature 1 what the target says at temperature 1."""

    steps: int = 7
    """Draft steps that training goes through: training-time test."""

    early_steps: int = 0
    """Draft steps of the first part of training, which is quicker with fewer; 0 takes `steps`."""

    early_share: float = 0.5
    """How much of training that part is."""

    step_decay: float = 0.8
    """Step k counts this to the power of k."""

    chain_weights: bool = False
    """A guess counts as much as the guesses before it are likely to be accepted; with it, 1 is a
    good step_decay."""

    start_share: float = 0.0
    """Indices count by how likely a chain of guesses begins there, as far as this: 0 has all count
    alike, 1 none where serving would never begin. Only with chain_weights."""

    mean: LossMean = "labels"
    """Divide by the number of positions with loss, or by all positions."""

    greedy_in_vocab_only: bool = False
    """Leave out positions whose most probable token is not in the draft vocabulary."""

    feature_weight: float = 0.0
    """Weight of a smooth L1 loss between the head's normed output and the target's: what EAGLE-3
    left out."""

    def __post_init__(self) -> None:
        for name in ("target_temperature", "draft_temperature"):
            check_range(name, getattr(self, name), 0.05, 10)
        check_range("steps", self.steps, 1, 32)
        check_range("early_steps", self.early_steps, 0, self.steps)
        check_range("early_share", self.early_share, 0, 1)
        check_range("step_decay", self.step_decay, 0.01, 1)
        check_range("start_share", self.start_share, 0, 1)
        if self.start_share and not self.chain_weights:
            raise ConfigError(
                f"start_share is {self.start_share} and chain_weights false; where chains begin is "
                "known from what they are accepted for: set chain_weights = true, or start_share "
                "= 0."
            )
        check_range("feature_weight", self.feature_weight, 0)

    def steps_at(self, done_share: float) -> int:
        """Draft steps when this share of training is done."""
        is_early = self.early_steps > 0 and done_share < self.early_share
        return self.early_steps if is_early else self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """A warm-up, a cosine, and what a gradient does to the weights."""

    kind: OptimizerKind = "adamw"
    """AdamW for all weights, or Muon for the matrices inside the head and AdamW for the rest."""

    learning_rate: float = 4e-4
    muon_rate: float = 0.05
    """Learning rate of what Muon moves: how far a step goes in every direction of a matrix. It
    rises and falls with the other."""

    muon_decay: float = 0.0
    """Weight decay of what Muon moves, times its rate: no direction of a matrix grows beyond one
    over this. Without, matrices grow for as long as a run goes on."""

    min_ratio: float = 0.0
    """Where the cosine ends, as a share of the learning rate."""

    warmup: float = 0.02
    """Share of all steps over which the learning rate rises."""

    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.0
    """Of what AdamW moves."""

    clip: float = 0.5
    """Largest norm of the gradient; 0 does not clip."""

    balanced_taps: bool = True
    """Learn the weights that fuse the taps in units of each channel's size."""

    ema: float = 0.0
    """Decay of an average of the weights that is saved and measured instead; 0 keeps none."""

    def __post_init__(self) -> None:
        check_range("learning_rate", self.learning_rate, 1e-9, 10)
        check_range("muon_rate", self.muon_rate, 1e-9, 10)
        check_range("min_ratio", self.min_ratio, 0, 1)
        check_range("warmup", self.warmup, 0, 1)
        for name in ("weight_decay", "muon_decay"):
            check_range(name, getattr(self, name), 0, 10)
        check_range("clip", self.clip, 0)
        check_range("ema", self.ema, 0, 0.999999)
        if len(self.betas) != 2:
            raise ConfigError(f"betas has {len(self.betas)} numbers; AdamW takes 2.")
        for beta in self.betas:
            check_range("a beta", beta, 0, 0.999999)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSettings:
    """What is kept away from training, and measured on it."""

    share: float = 0.02
    """Of the conversations, chosen by their ids; at least one."""

    max_samples: int = 512
    """Most samples that one measurement reads."""

    every: int = 0
    """Steps between measurements; 0 makes about 20 of them."""

    decode_prompts: int = 16
    """Prompts that the engine really answers at each measurement; 0 for none."""

    decode_tokens: int = 64
    """Longest of these answers."""

    decode_depth: int = 0
    """Depth of the drafted chain; 0 takes the steps of the loss."""

    def __post_init__(self) -> None:
        check_range("share", self.share, 0.0, 0.5)
        for name in ("max_samples", "decode_tokens"):
            check_range(name, getattr(self, name), 1)
        for name in ("every", "decode_prompts", "decode_depth"):
            check_range(name, getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """From features, or a corpus and a live target, to a head."""

    epochs: int = 4
    sources: tuple[str, ...] = ()
    """Sources of the corpus that are learned from, `NAME*3` three times in every epoch; empty
    takes all once. What is held out stays the same."""

    share: float = 1.0
    """Of the conversations that are not held out: what is learned from."""

    max_steps: int = 0
    """Stop after so many steps even if epochs are left; 0 does not."""

    batch_tokens: int = 16384
    """Tokens of one step of the optimizer, over all processes."""

    micro_tokens: int = 8192
    """Tokens that one process works on at once; samples are packed into so many."""

    dtype: Precision = "auto"
    """What products are computed in; the weights that learn are float32."""

    seed: int = 0
    hidden_noise: float = 0.0
    """Features get uniform noise of up to this share of their size."""

    keep_readings: bool = False
    """Training beside the target: it reads every sample once before the first step, and what it
    said stays in the device's memory."""

    kept_format: FeatureFormat = "exact"
    """How that is kept: as the target computed it, or coded as `capture` codes features, final rows
    never in less than 8 bits; memory then holds two or three times as much text."""

    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at each measurement."""

    keep_checkpoints: int = 0
    """Checkpoints that stay, the newest and the best; 0 keeps all."""

    parallel: Parallel = "ddp"
    """How several processes share the work."""

    head: HeadSettings = field(default_factory=HeadSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    held_out: HeldOutSettings = field(default_factory=HeldOutSettings)

    def __post_init__(self) -> None:
        check_range("epochs", self.epochs, 1)
        check_range("share", self.share, 1e-6, 1)
        for name in ("max_steps", "checkpoint_every", "keep_checkpoints"):
            check_range(name, getattr(self, name), 0)
        check_range("micro_tokens", self.micro_tokens, 16)
        check_range("seed", self.seed, 0, 2**32 - 1)
        check_range("hidden_noise", self.hidden_noise, 0, 10)
        if self.kept_format != "exact" and not self.keep_readings:
            raise ConfigError(
                f'kept_format is "{self.kept_format}" and keep_readings false; set keep_readings = '
                'true, or kept_format = "exact".'
            )
        if self.batch_tokens < self.micro_tokens or self.batch_tokens % self.micro_tokens:
            raise ConfigError(
                f"batch_tokens is {self.batch_tokens} and micro_tokens {self.micro_tokens}; the "
                "first must be a multiple of the second."
            )
        if self.parallel == "fsdp" and self.optimizer.kind == "muon":
            raise ConfigError(
                'parallel is "fsdp" and optimizer.kind "muon": Muon needs whole matrices, which '
                'FSDP splits. Set parallel = "ddp", or optimizer.kind = "adamw".'
            )
