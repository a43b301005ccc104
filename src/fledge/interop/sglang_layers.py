"""Layer ids of SGLang: what stands in `eagle_config`, and which layers its targets then hand over.

Most targets add 1 to every id. The exceptions differ by the target's class, so both directions need
to know the target.
"""

from fledge.contracts.errors import MismatchError
from fledge.interop.target_facts import TargetFacts
from fledge.models.head_config import default_taps

_ADD_ONE_IF_FIRST_IS_ONE = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite"}
)
_ADD_NONE_IF_LAST_LAYER = frozenset({"gpt_oss"})
_ADDS_ONE_TO_DEFAULT = frozenset({"minimax_m3_vl"})


def written_ids(taps: tuple[int, ...] | None, target: TargetFacts | None) -> tuple[int, ...] | None:
    """Ids under which SGLang hands over these completed layers; None: write none at all."""
    is_default = taps is None or (target is not None and taps == default_taps(target.num_layers))
    if is_default and not _changes_default(target):
        return None
    if taps is None:
        assert target is not None
        taps = default_taps(target.num_layers)
    _check_reachable(taps, target)
    less_one = tuple(tap - 1 for tap in taps)
    for ids in (less_one, taps):
        if captured_layers(ids, target) == taps:
            return ids
    raise MismatchError(
        f"SGLang's {target.model_type if target else 'targets'} cannot be told to hand over the "
        f"states after {list(taps)} completed layers: ids {list(less_one)} would give "
        f"{list(captured_layers(less_one, target) or ())}. Train the head on the default layers, "
        "or export it for vLLM."
    )


def captured_layers(
    ids: tuple[int, ...] | None, target: TargetFacts | None
) -> tuple[int, ...] | None:
    """Completed layers that a target of this kind hands over for these ids; None: its default."""
    kinds = _kinds(target)
    if ids is None:
        if target is None or not _changes_default(target):
            return None
        return tuple(tap + 1 for tap in default_taps(target.num_layers))
    is_counted = kinds & _ADD_ONE_IF_FIRST_IS_ONE and ids[0] != 1
    if kinds & _ADD_NONE_IF_LAST_LAYER and target and max(ids) == target.num_layers:
        is_counted = True
    shift = 0 if is_counted else 1
    # Taken in the order of layers, each once.
    return tuple(sorted({number + shift for number in ids}))


def _kinds(target: TargetFacts | None) -> frozenset[str]:
    return frozenset() if target is None else target.model_types


def _changes_default(target: TargetFacts | None) -> bool:
    return bool(_kinds(target) & _ADDS_ONE_TO_DEFAULT)


def _check_reachable(taps: tuple[int, ...], target: TargetFacts | None) -> None:
    is_last_allowed = bool(_kinds(target) & _ADD_NONE_IF_LAST_LAYER)
    last = None if target is None else target.num_layers - (not is_last_allowed)
    if min(taps) < 1 or (last is not None and max(taps) > last):
        allowed = "1 to n-1" if last is None else f"1 to {last}"
        raise MismatchError(
            f"the head reads the target after {list(taps)} completed layers; SGLang takes states "
            f"before a layer runs and can hand over {allowed} only. Train the head on other layers "
            "(capture.layers), or export it for vLLM, which hands over 0 to n."
        )
