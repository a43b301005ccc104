"""The model card of a head that comes with fledge, from what the stages wrote and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fledge.data.markdown_table import render_table
from fledge.lab.scorecard import shown
from fledge.lab.training_table import render_training
from fledge.models.head import Eagle3Head
from fledge.models.head_config import HeadConfig
from fledge.store.catalogue import Alias
from fledge.store.manifest import Manifest

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about a head: what the stages wrote that made it and measured it."""

    training: Manifest
    """Of `fledge train`."""

    checkpoint: str | None = None
    """Name of the checkpoint, where it is not the one that training found best."""

    earlier: Sequence[Manifest] = ()
    """Of the runs before it, where it went on from their heads; the first one first."""

    corpora: Sequence[Manifest] = ()
    """Of `fledge tokenize`; the first has the draft vocabulary, unless the run chose its own."""

    data: Sequence[Document] = ()
    """Data cards of `fledge prepare`."""

    scorecards: Sequence[Document] = ()
    """Of `fledge select`."""

    tunings: Mapping[str, Document] = field(default_factory=dict)
    """Of `fledge tune`, by kind of device."""

    benches: Sequence[Document] = ()
    """Of `fledge bench`."""


def render_card(
    name: str,
    alias: Alias | None,
    head: Eagle3Head,
    evidence: Evidence,
    *,
    fingerprints: frozenset[str],
    weights_bytes: int,
    licence: str,
) -> str:
    """Markdown; `fingerprints` are those under which the documents may speak of the head."""
    parts = [
        f"# EAGLE-3 head for {name}",
        _facts(name, alias, head, evidence.training, weights_bytes=weights_bytes, licence=licence),
        "It comes with fledge and is the default head of its target: `fledge generate`, `chat`, "
        "`serve` and `demo` use it without being told, `--head none` does without. It was trained "
        "for exactly these weights of the target. It proposes tokens and the target checks each of "
        "them, so that it makes answers faster and changes none.",
        *_scorecards(evidence.scorecards, fingerprints),
        *_tunings(evidence.tunings),
        *_benches(evidence.benches),
        *_data(evidence),
        "## Training",
        *render_training([*evidence.earlier, evidence.training], evidence.checkpoint),
        "## Reproduce",
        _commands(evidence),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(
    name: str,
    alias: Alias | None,
    head: Eagle3Head,
    training: Manifest,
    *,
    weights_bytes: int,
    licence: str,
) -> str:
    target, config = name, head.config
    if alias is not None:
        target = f"{alias.model}, {alias.quantisation} dequantised; its weights: {alias.licence}"
    taps = "2, n//2 and n-3" if config.taps is None else ", ".join(map(str, config.taps))
    num_weights = sum(weight.numel() for weight in head.parameters())
    drafted = f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
    if head.common_V is not None:
        drafted += f"; on a CPU the {int(head.common_V.sum()):,} of them that are common"
    num_learned = training.plan.settings.get("head", {}).get("learned_tokens")
    if num_learned:
        drafted += f"; losses saw the {num_learned:,} that are said most often"
    turned = [("output rows", "the target's, turned by a learned matrix")]
    rows = [
        ("target", target),
        ("kind", _kind(config)),
        ("size", f"{num_weights:,} parameters, {weights_bytes / 1e6:.1f} MB in bfloat16"),
        ("draft vocabulary", drafted),
        *(turned if config.turned_rows else []),
        ("MLP width", _width(config, training)),
        *_attention(config, training),
        ("target layers read", f"{taps} (completed layers)"),
        ("licence of the head", licence),
    ]
    return render_table(("", ""), rows, num_left=2)


def _width(config: HeadConfig, training: Manifest) -> str:
    width = config.intermediate_size
    trained = training.plan.settings.get("head", {}).get("mlp_width", 0)
    if trained <= width:
        return f"{width:,}"
    idle = f"{trained - width:,} of {trained:,} that were trained"
    return f"{width:,}; {idle} did nothing and are left out"


def _attention(config: HeadConfig, training: Manifest) -> list[tuple[str, str]]:
    """A row where a number of heads was asked for; without, it is the target's."""
    if not training.plan.settings.get("head", {}).get("attention_heads", 0):
        return []
    said = f"{config.num_heads} query heads, {config.num_kv_heads} key-value heads"
    return [("attention", said)]


def _kind(config: HeadConfig) -> str:
    newer = [flag for flag in ("fc_norm", "norm_output") if getattr(config, flag)]
    older = [flag for flag in ("norm_before_fc", "norm_before_residual") if getattr(config, flag)]
    kind = "EAGLE-3.1" if newer else "EAGLE-3"
    return f"{kind} ({', '.join(newer + older)})" if newer or older else f"{kind}, one layer"


def _scorecards(cards: Sequence[Document], fingerprints: frozenset[str]) -> list[str]:
    parts = []
    for card in cards:
        settings = card["settings"]
        tree = settings["tree"]
        head = next(
            one for one in card["heads"] if one["rank"] and one["fingerprint"] in fingerprints
        )
        how = "greedy" if not settings["temperature"] else f"temperature {settings['temperature']}"
        shape = f"depth {tree['depth']}, width {tree['width']}, budget {tree['budget']}"
        if tree["width"] == 1:
            shape = f"chain of {tree['depth']}"
        compared = head["differences"]
        text = (
            f"{card['dtype']} on {card['device']}, {how}, {shape}, {settings['controller']} "
            f"controller, answers of at most {settings['max_tokens']} tokens, "
            f"{settings['concurrency']} in flight. Intervals are of 95%."
        )
        if compared is not None:
            equal = compared["num_compared"] - compared["num_different"]
            text += f" {equal:,} of {compared['num_compared']:,} answers equal plain decoding's."
        parts += [text, _tasks(card, head)]
    return ["## Figures on held-out prompts", *parts] if parts else []


def _tasks(card: Document, head: Document) -> str:
    rows = []
    for task, found in head["tasks"].items():
        figures, plain = found["figures"], card["plain"]["tasks"][task]
        rows.append(
            (
                task,
                shown(found["accept_length"]),
                _number(figures["accept_length_before_loops"]),
                shown(found["speed_up"]),
                f"{figures['tokens_per_s']:,.1f}",
                f"{plain['tokens_per_s']:,.1f}",
            )
        )
    means = (shown(head["accept_length"]), "", shown(head["speed_up"]), "", "")
    heads = ("task", "accept length", "before loops", "speed-up", "tokens/s", "without the head")
    return render_table(heads, [*rows, ("**all**", *means)])


def _tunings(tunings: Mapping[str, Document]) -> list[str]:
    if not tunings:
        return []
    rows = []
    for kind, found in tunings.items():
        best = found["best"]
        shape = f"depth {best['depth']}, width {best['width']}, budget {best['budget']}"
        bounds = "unknown" if best["ci"] is None else "{:.2f}, {:.2f}".format(*best["ci"])
        rows.append(
            (
                kind,
                f"{found['dtype']} on {found['device']}",
                f"{shape}, {best['controller']}",
                f"{found['concurrency']}",
                f"{best['speedup']:.2f} [{bounds}]",
                _number(best["accept_length"]),
            )
        )
    heads = ("device", "measured in", "drafts", "in flight", "speed-up", "accept length")
    return [
        "## How to draft with it",
        "What `fledge tune` found best; used by default on such devices.",
        render_table(heads, rows, num_left=3),
    ]


def _benches(benches: Sequence[Document]) -> list[str]:
    parts = []
    for document in benches:
        for found in document["comparisons"]:
            rows = [
                (f"{row['level']:g}", shown(row["speedup"]), shown(row["tpot_speedup"]))
                for row in found["rows"]
                if row["kind"] == "closed"
            ]
            heads = ("users at once", "throughput", "time per token")
            where = document["provenance"]["device"]
            parts += [f"Speed-up over {found['baseline']} on {where}.", render_table(heads, rows)]
    return ["## Under load", *parts] if parts else []


def _data(evidence: Evidence) -> list[str]:
    parts = []
    for card in evidence.data:
        rows = [
            (
                one["name"],
                "the target itself" if one["is_self"] else "prompts of people",
                one["licence"],
                f"{one['rows']['out']:,}",
            )
            for one in card["sources"]
        ]
        totals = card["totals"]
        against = card["filters"]["decontaminate"]["against"]
        privacy = card["filters"]["privacy"]["enabled"]
        identifiers = sum(totals["identifiers"].values())
        parts += [
            render_table(("source", "written by", "licence", "rows"), rows, num_left=3),
            f"{card['rows']:,} conversations. "
            + (f"{identifiers:,} identifiers replaced or dropped. " if privacy else "")
            + (
                f"{totals['rows']['overlaps']:,} rows left out for text shared with a benchmark."
                if against
                else "Rows were not compared with benchmarks."
            ),
        ]
    if evidence.corpora:
        samples, tokens, said = (
            sum(corpus.counts[name] for corpus in evidence.corpora)
            for name in ("samples", "tokens", "loss_tokens")
        )
        several = len(evidence.corpora) > 1
        parts.append(
            f"The target answered them itself: {samples:,} samples, {tokens:,} tokens, {said:,} of "
            f"them answers{f', in {len(evidence.corpora)} corpora' if several else ''}."
            + _coverage(evidence)
        )
    return ["## Data", *parts] if parts else []


def _coverage(evidence: Evidence) -> str:
    """Of the vocabulary that the first corpus brings; a run that chose its own did not keep it."""
    if evidence.training.plan.settings.get("head", {}).get("draft_vocab_size"):
        return ""
    coverage = evidence.corpora[0].counts["vocabulary"]["coverage"]
    where = " in the first" if len(evidence.corpora) > 1 else ""
    return f" The draft vocabulary covers {coverage:.1%} of what it said{where}."


def _commands(evidence: Evidence) -> str:
    runs = (*evidence.earlier, evidence.training)
    sources: list[tuple[str, Mapping[str, Any]]]
    sources = [("tokenize", corpus.provenance) for corpus in evidence.corpora]
    sources += [("train", run.provenance) for run in runs]
    sources += [("select", card["provenance"]) for card in evidence.scorecards]
    sources += [("tune", found["provenance"]) for found in evidence.tunings.values()]
    sources += [("bench", found["provenance"]) for found in evidence.benches]
    rows = [
        (name, f"`{made['command']}`", str(made["device"]), str(made["date"]))
        for name, made in sources
    ]
    fingerprint = evidence.training.fingerprint
    return (
        render_table(("stage", "command", "device", "date"), rows, num_left=4)
        + f"\n\nFingerprint of the training run: `{fingerprint}`."
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
