"""What every measurement is given, and what it is compared by with an earlier one."""

from __future__ import annotations

import argparse
import os
from typing import Any


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the engine that each measurement takes under the same names."""
    return {
        "n_threads": options.threads,
        "flash_attention": options.flash_attention,
        "llama_cpp": str(options.llama_cpp) if options.llama_cpp else None,
    }


def environment() -> dict[str, str]:
    """Return the variables that the tiers go by."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("MOE_")}
