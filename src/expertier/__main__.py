"""`python -m expertier`: the command line."""

from __future__ import annotations

from expertier.cli import main

main()
