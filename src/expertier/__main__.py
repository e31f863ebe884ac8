"""`expertier` and `python -m expertier`: the command line, from the first instruction to the last."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # as `typing` has it, whose import would take longer than all else here
if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130
"""The status of a command that Ctrl-C ended, as shells have it."""


def main() -> NoReturn:
    """Run the command line and exit.

    Most of a short command's time goes into imports. Ctrl-C ends them at once: nothing has begun yet, and an
    exception would be raised within whatever is being imported, which may swallow it or print where it was.
    """
    _open_standard_files()
    before = signal.getsignal(signal.SIGINT)
    at_once = (
        _end_at_once if before is signal.default_int_handler else before
    )  # else it is ignored, and stays so
    signal.signal(signal.SIGINT, at_once)
    try:
        from expertier.cli import main as run

        signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, at_once)  # the interpreter's own end may be interrupted as well


def _end_at_once(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)


def _open_standard_files() -> None:
    """Open what is closed of standard input, output and error: else a model's file would get its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    main()
