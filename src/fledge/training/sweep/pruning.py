"""When a trial is given up: its accept length so far against that of the others.

Scores are compared measurement by measurement, each trial with the best it had reached by then: a
run makes about as many measurements whatever its settings are, and curves are noisy.
"""

import statistics
from collections.abc import Sequence

from fledge.contracts.sweep_settings import EarlyStop

_FEWEST_PEERS = 3
"""Trials that must have come as far before anyone is measured by them."""

_FACTOR = 3


def is_hopeless(
    rule: EarlyStop, own: Sequence[float], others: Sequence[Sequence[float]], *, grace: int
) -> bool:
    """Whether a trial with these scores so far should end, given those of all other trials."""
    number = len(own)
    if rule == "none" or number < grace:
        return False
    peers = [max(scores[:number]) for scores in others if len(scores) >= number]
    if len(peers) < _FEWEST_PEERS:
        return False
    reached = max(own)
    if rule == "median":
        return reached < statistics.median(peers)
    if not _is_rung(number, grace):
        return False
    num_better = sum(peer > reached for peer in peers)
    return num_better >= (len(peers) + 1) / _FACTOR


def _is_rung(number: int, grace: int) -> bool:
    """Measurements at which the field is thinned: grace, three times grace, nine times ..."""
    while number > grace and number % _FACTOR == 0:
        number //= _FACTOR
    return number == grace
