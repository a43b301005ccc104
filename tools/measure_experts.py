"""What verifying costs a target with experts: more tokens touch more experts, and each is read.

    python tools/measure_experts.py --shape qwen3-moe-12-layers --out benchmarks/FILE.json

A pass reads a chain of tokens behind a context, captured as the engine captures it. Tokens are all
different, as those of real drafts, or copies of one, which go to the same few experts and would
make drafting look cheaper than it is. Experts touched are counted in the routers of transformers'
modules. What the engine's own timing finds for the same sizes stands beside: the controller goes by
it.

    floor   (dense weights + layers x touched experts x bytes of one) / measured bandwidth
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from measure_target_pass import BLOCK, graph_s, timed_s
from measured_engines import Results, Subject, numbers, option_parser, wait
from rooflines import Limits, weight_bytes

from fledge.engine.memory import probe_bytes_per_slot
from fledge.engine.timing import _PassTimer
from fledge.models.target import Target
from fledge.models.target_path import choose_target_path
from fledge.ops.kv import KVGroups
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass

KINDS = ("different", "copies")


class Passes:
    """One request with a context, whose next tokens are read again and again."""

    def __init__(self, target: Target, context: int, most_tokens: int) -> None:
        self.target, self.context = target, context
        blocks = -(-(context + most_tokens) // BLOCK) + 1
        windows = probe_bytes_per_slot(target)
        table_BP = torch.arange(blocks, device=target.device)[None]
        self.tables = BlockTables(BLOCK, dict.fromkeys(windows, table_BP))
        self.memory = KVGroups(dict.fromkeys(windows, blocks * BLOCK))
        target.forward(self.packed("different", 0, context), self.memory)

    def packed(self, kind: str, context: int, num_tokens: int) -> TreePass:
        device = self.target.device
        places = torch.arange(context, context + num_tokens, device=device)
        if kind == "copies":
            places = torch.full_like(places, 77)
        return make_tree_pass(
            chain_tokens_C=places * 7919 % self.target.vocab_size,
            chain_B=torch.tensor([num_tokens], device=device),
            context_B=torch.tensor([context], device=device),
            trees=None,
            num_rows=num_tokens,
            tables=self.tables,
            num_short=1,
        )

    def seconds(self, kind: str, num_tokens: int, rounds: int) -> float:
        """Of a captured pass; on a CPU of a plain one."""
        packed = self.packed(kind, self.context, num_tokens)

        def run() -> None:
            self.target.forward(packed, self.memory)

        if self.target.device.type != "cuda":
            return min(timed_s(run, self.target.device)[0] for _ in range(rounds))
        run()
        wait(self.target.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph_s(graph.replay, rounds)

    def experts_touched(self, kind: str, num_tokens: int) -> float:
        """Mean over layers."""
        counts: list[int] = []

        def count(module: Any, args: Any, output: Any) -> None:
            counts.append(len(output[2].unique()))

        gates = [layer.mlp.gate for layer in self.target.layers if hasattr(layer.mlp, "experts")]
        hooks = [gate.register_forward_hook(count) for gate in gates]
        try:
            with choose_target_path("plain"):
                self.target.forward(self.packed(kind, self.context, num_tokens), self.memory)
        finally:
            for hook in hooks:
                hook.remove()
        return sum(counts) / len(counts)


def cell(
    subject: Subject, passes: Passes, timer: Callable[[int], float], limits: Limits, size: int
) -> dict[str, Any]:
    target, rounds = subject.target, subject.options.rounds
    experts = [layer.mlp.experts for layer in target.layers if hasattr(layer.mlp, "experts")]
    num_experts = target.config.num_experts
    all_bytes = sum(p.numel() * p.element_size() for one in experts for p in one.parameters())
    dense_bytes = weight_bytes(subject) - all_bytes
    found: dict[str, Any] = {}
    for kind in KINDS:
        touched = passes.experts_touched(kind, size)
        least = (dense_bytes + all_bytes * touched / num_experts) / limits.bytes_per_s
        seconds = passes.seconds(kind, size, rounds)
        found |= {
            f"{kind} ms": 1e3 * seconds,
            f"{kind} experts": touched,
            f"{kind} floor_ms": 1e3 * least,
        }
    chosen = target.config.num_experts_per_tok / num_experts
    timer(size)
    return {
        **found,
        "experts if routed evenly": num_experts * (1 - (1 - chosen) ** size),
        "engine's timing ms": 1e3 * min(timer(size) for _ in range(3)),
    }


@torch.no_grad()
def main(words: Iterable[str] | None = None) -> None:
    parser = option_parser(__doc__, budget_s=60.0)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(None if words is None else list(words))
    subject = Subject.load(options, has_head=True)
    assert subject.head is not None
    limits = Limits(subject.target.device, subject.target.dtype)
    results = Results("passes of a target with experts", subject, limits=limits.as_json())
    results.document["why_plain"] = subject.target.why_plain
    sizes = numbers(options.tokens)
    passes = Passes(subject.target, options.context, max(sizes))
    timer = _PassTimer(subject.target, subject.head)
    for (size,) in results.left([(size,) for size in sizes]):
        results.add((size,), cell(subject, passes, timer.target_s, limits, size))


if __name__ == "__main__":
    main()
