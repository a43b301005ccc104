"""Kernels that are launched while the kernel before them still runs.

    one by one    [ product  ]  wait  [ rotate     ]  wait  [ attend   ]
    chained       [ product  ]
                             [ waits | rotate     ]
                                        [ lengths | waits | attend   ]

The next kernel takes its place on the device early, and waits there until all that was written
before it can be seen. Before that it may read only what was there before the kernel ahead of it
began: that one calls the next when it has waited itself. Devices from Hopper on can do that.
"""

from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def chained(device: torch.device) -> dict[str, bool]:
    """What a launch of such a kernel is told, besides its own arguments."""
    if device.type != "cuda" or torch.version.hip is not None:
        return {"IS_CHAINED": False}
    can_chain = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"IS_CHAINED": True, "launch_pdl": True} if can_chain else {"IS_CHAINED": False}


@triton.jit
def wait_for_inputs():
    """Every program of a chained kernel does; what the kernel before wrote is there then."""
    gdc_wait()


@triton.jit
def call_next():
    """Let the next kernel take its place, if it is chained; only after waiting."""
    gdc_launch_dependents()
