"""The results of policy calls that were refused."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """A refusal of the policy: nothing was changed. Any value of zero or more is success."""

    BUSY = -1
    """Another thread is filling an expert, or too few slots are unpinned now: wait, then try again."""

    TOO_MANY = -2
    """The call asks for more experts than the layer has slots: ask for them in several groups."""

    BAD_EXPERT = -3
    """The layer has no expert of that number."""

    BAD_CALL = -4
    """A call against the contract.

    A layer, slot or count out of range, a slot released more often than it was taken, or a directory that
    another version of the policy made.
    """

    PRESENT = -5
    """The expert to prefetch is in a slot already, or is being filled into one."""

    LOOK_AGAIN = -6
    """BUSY, and one of the layer's slots is being filled, so the call may succeed when that fill ends."""


COMPLETE_AND_RELEASE = -1
"""An operation of `locked_calls.update_held` beside the directory's entries: COMPLETE, then RELEASE."""
