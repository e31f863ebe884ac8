"""A variable of the environment and how its text is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar

from expertier.planner.policy.kind import PolicyKind
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.config.split_mode import SplitMode
from expertier.units import MIB

T = TypeVar("T")

AutoBytes: TypeAlias = int | Literal["auto"]
"""A number of bytes, or `auto`: the number is computed when the tiers are made."""

AutoTokens: TypeAlias = int | Literal["auto"]
"""A number of tokens, or `auto`."""

AutoSwitch: TypeAlias = bool | Literal["auto"]
"""On, off, or `auto`: on where the feature is known to work."""

AutoShares: TypeAlias = tuple[float, ...] | Literal["auto"]
"""Numbers such as (3, 1): something is divided in their proportion. Or `auto`."""

AutoLayers: TypeAlias = int | Literal["auto"]
"""A number of layers, or `auto`."""

_MAX_LAYERS_AHEAD = 4
_MAX_MIB = 1 << 40
_MAX_TOKENS = 1 << 30
_MAX_SHARE = 1e6


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One variable: its name, the `TierConfig` field that it sets, and the function that reads its text.

    `accepts` describes the accepted texts, for messages; `parse` raises `ValueError` for any other text.
    """

    name: str
    field: str
    accepts: str
    parse: Callable[[str], T]

    @property
    def option(self) -> str:
        """The variable's option on the command line."""
        return option_name(self.name)


def option_name(variable: str) -> str:
    """Return the command-line option of a variable: MOE_HOST_POOL_MIB is --host-pool-mib."""
    return "--" + variable.removeprefix("MOE_").lower().replace("_", "-")


def parse_mib(text: str) -> AutoBytes:
    """Read `auto` or a number of MiB, decimals allowed; return `auto` or bytes."""
    if text == "auto":
        return "auto"
    value = _number(text)
    if value > _MAX_MIB:
        raise ValueError(text)
    return int(value * MIB)


def parse_tokens(text: str) -> AutoTokens:
    """Read `auto` or a whole number of tokens."""
    if text == "auto":
        return "auto"
    if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) > _MAX_TOKENS:
        raise ValueError(text)
    return int(text)


def parse_percent(text: str) -> float:
    """Read a number above 0 and up to 100."""
    value = _number(text)
    if not 0 < value <= 100:
        raise ValueError(text)
    return float(value)


def parse_switch(text: str) -> bool:
    """Read `0` or `1`."""
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def parse_auto_switch(text: str) -> AutoSwitch:
    """Read `auto`, `0` or `1`."""
    return "auto" if text == "auto" else parse_switch(text)


def parse_layers(text: str) -> AutoLayers:
    """Read `auto` or a small number of layers."""
    if text == "auto":
        return "auto"
    if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) > _MAX_LAYERS_AHEAD:
        raise ValueError(text)
    return int(text)


def parse_device(text: str) -> str:
    """Read a device's name, or several with commas between them, all different."""
    names = [name.strip() for name in text.split(",")]
    if not all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_.:-]*", name, re.ASCII) for name in names):
        raise ValueError(text)
    if len(set(names)) < len(names) or ("auto" in names and len(names) > 1):
        raise ValueError(text)
    return ",".join(names)


def parse_shares(text: str) -> AutoShares:
    """Read `auto`, or numbers with commas between them, not all 0; slashes work, too, as in llama.cpp."""
    if text == "auto":
        return "auto"
    shares = tuple(float(_number(number.strip())) for number in re.split("[,/]", text))
    if not any(shares) or max(shares) > _MAX_SHARE:
        raise ValueError(text)
    return shares


def parse_policy(text: str) -> PolicyKind:
    """Read a policy's name."""
    return PolicyKind(text)


def parse_path(text: str) -> Path:
    """Read a file's name; `~` stands for the user's home folder."""
    if not text or "\0" in text:
        raise ValueError(text)
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # a user who does not exist
        raise ValueError(text) from error


def parse_split_mode(text: str) -> SplitMode:
    """Read the name of a split mode."""
    return SplitMode(text)


def one_of(kind: type[StrEnum], mark: str = "") -> str:
    """Return the values of an enum as a phrase such as `a, b or c`, each value between two `mark`s."""
    *first, last = (f"{mark}{word}{mark}" for word in kind)
    return f"{', '.join(first)} or {last}"


def parse_file_mode(text: str) -> FileMode:
    """Read how the model's files are to be read."""
    return FileMode(text)


def _number(text: str) -> Decimal:
    if not re.fullmatch(r"\d+(\.\d*)?", text, re.ASCII):
        raise ValueError(text)
    return Decimal(text)
