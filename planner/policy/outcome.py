"""What a policy call answers when it changed nothing."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """A refusal of the policy: nothing was changed. Any value of zero or more is success."""

    BUSY = -1
    """An expert is being filled by someone else, or too few slots are unpinned now: wait, then try again."""

    TOO_MANY = -2
    """More experts than the layer has slots: ask in several parts."""

    BAD_EXPERT = -3
    """An expert outside the layer's range."""

    BAD_CALL = -4
    """A call against the contract.

    A layer, slot or count out of range, a slot released more often than it was taken, or a directory that
    another version of the policy made.
    """

    PRESENT = -5
    """An expert to prefetch that is in a slot already, or on its way into one."""

    LOOK_AGAIN = -6
    """BUSY, and one of the layer's slots is being filled: that ends without anyone's help."""


COMPLETE_AND_RELEASE = -1
"""An operation of `locked_calls.update_held` beside the directory's entries: COMPLETE, then RELEASE."""
