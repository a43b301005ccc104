"""How a head was trained, for its model card: a column for each run it went through."""

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.data.markdown_table import render_table
from fledge.store.manifest import Manifest


def render_training(runs: Sequence[Manifest], checkpoint: str | None) -> list[str]:
    """Paragraphs; `checkpoint` is of the last run, where it is not what that run found best."""
    columns = [_facts(run) for run in runs]
    if checkpoint is not None:
        columns[-1]["checkpoint"] = checkpoint
    rows = [
        (name, *(column[name] for column in columns))
        for name in columns[0]
        if any(column[name] for column in columns)
    ]
    if len(runs) == 1:
        return [render_table(("", ""), rows, num_left=2)]
    heads = ("", *(f"run {number}" for number in range(1, len(runs) + 1)))
    return [
        f"{len(runs)} runs, each going on from the head of the one before.",
        render_table(heads, rows, num_left=len(heads)),
    ]


def _facts(run: Manifest) -> dict[str, str]:
    settings, counts = run.plan.settings, run.counts
    length = counts["best"].get("accept_length")
    # A run that stops after so many steps need not come to the end of its epochs.
    epochs = "" if settings.get("max_steps") else f" in {settings['epochs']} epochs"
    return {
        "steps": f"{counts['steps']:,}",
        "checkpoint": f"step {counts['best_step']:,}",
        "tokens seen": f"{counts['tokens']:,}{epochs}",
        "sources, times an epoch": ", ".join(settings.get("sources", ())),
        "tokens a step": f"{settings['batch_tokens']:,}",
        "loss": _loss(settings["loss"]),
        "optimizer": _optimizer(settings["optimizer"]),
        "seed": str(settings["seed"]),
        "accept length while training": "" if length is None else f"{length:.2f}",
    }


def _loss(loss: Mapping[str, Any]) -> str:
    temperature, decay = loss.get("target_temperature", 1.0), loss["step_decay"]
    parts = [f"{loss['kind']}, {loss['steps']} draft steps"]
    if early := loss.get("early_steps"):
        parts.append(f"{early} in the first {loss['early_share']:.0%}")
    if temperature != 1:
        parts.append(f"the target's probabilities at temperature {temperature:g}")
    if decay != 1:
        parts.append(f"each {decay:g} of the one before")
    if loss.get("chain_weights"):
        parts.append("each by how likely the guesses before it are accepted")
    if share := loss.get("start_share"):
        parts.append(f"{share:.0%} of its weight by how likely a chain begins there")
    return ", ".join(parts)


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    rate = f"learning rate {optimizer['learning_rate']:g}"
    if optimizer.get("kind") == "muon":
        muon = f"rate {optimizer['muon_rate']:g}"
        if decay := optimizer.get("muon_decay", 0.0):
            muon += f", weight decay {decay:g}"
        return f"Muon for matrices, {muon}; AdamW for the rest, {rate}"
    return f"AdamW, {rate}"
