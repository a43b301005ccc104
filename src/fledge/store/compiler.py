"""The C++ compiler of this machine, which makes kernels for its processor."""

import os
import shutil

COMPILERS = ("g++", "c++", "clang++")


def find_compiler() -> str | None:
    """Path of the compiler that is used: the one `$CXX` names, or the first that is there."""
    wanted = os.environ.get("CXX")
    names = (wanted,) if wanted else COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)
