"""Flags that a variable adds to every compilation of our own C and C++: -Werror in our tests, a sanitizer.

Builds of the plugin and of the fake GPU libraries read these variables; third-party code does not, as it would with
CFLAGS. Where the variables are not set, a build has only our own flags, so that a new warning of a newer compiler is no
error for a user.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

C_VARIABLE = "EXPERTIER_CFLAGS"
CPP_VARIABLE = "EXPERTIER_CXXFLAGS"


def added_flags(variable: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the flags that the variable holds, split as a shell does; the compiler and the linker both get them."""
    return tuple(shlex.split(environ.get(variable, "")))
