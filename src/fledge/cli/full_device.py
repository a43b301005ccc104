"""What is said when a GPU's memory ends where nobody reckoned with it.

The engine sizes its memory by what is free when it begins. Another program that begins later takes
from what the first one left for its passes.
"""

import re

_ASKED = re.compile(
    r"Tried to allocate (?P<asked>[\d.]+ \w+)\. (?P<device>GPU \d+) has a total capacity of "
    r"(?P<all>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free"
)
_BESIDE_TORCH = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What libraries say that ask the driver for memory themselves."""


def explain_full_device(error: Exception) -> str | None:
    """None for other errors. Torch's is known by its name: torch need not be loaded for it."""
    named = f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}"
    is_said = any(text in str(error) for text in _BESIDE_TORCH)
    if named != "torch.OutOfMemoryError" and not is_said:
        return None
    found = _ASKED.search(str(error))
    what = "the GPU's memory is used up"
    if found:
        what = (
            f"{found['device']} has {found['free']} of its {found['all']} left, and "
            f"{found['asked']} more were asked for"
        )
    return (
        f"{what}; `nvidia-smi` shows who has the rest. End other programs on it, or lower what "
        "this one takes: --cache-tokens of serve, regenerate.cache_tokens of prepare and "
        "regenerate, train.micro_tokens, capture.pass_tokens."
    )
