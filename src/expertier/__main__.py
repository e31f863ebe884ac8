"""`expertier` and `python -m expertier`: the command line, from the first instruction to the last.

Ctrl-C and SIGTERM end a command in the same way, at whatever moment they come: with one line, status 130 or 143, and
nothing left behind.

    imports        nothing has begun, so the process ends at once. An exception would be raised within the module that
                   is being imported, which may swallow it
    the command    KeyboardInterrupt or Terminated is raised; code that must not end half-way defers it (interrupts.py)
    the end        the command's work is done, so the process ends at once
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # type checkers know this name; importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def main() -> NoReturn:
    """Run the command line and exit."""
    _open_standard_files()
    ours = [number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
    _end_at_once_by(ours)
    status: int | str | None
    try:
        from expertier.cli.app import main as run
        from expertier.interrupts import raise_terminated

        try:
            for number in ours:
                signal.signal(
                    number, raise_terminated if number == signal.SIGTERM else signal.default_int_handler
                )
            run()
        finally:
            _end_at_once_by(ours)
    except SystemExit as end:
        interrupt = _interrupt_behind(end) if end.code else None
        status = end.code if interrupt is None else _say_ended(interrupt)
    except KeyboardInterrupt as interrupt:
        _end_at_once_by(ours)
        status = _say_ended(interrupt)
    raise SystemExit(status)  # outside of the `except`, so that the objects that the exception held are freed


def _end_at_once_by(numbers: list[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, _end_at_once)


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    os.write(2, _line(signal.Signals(number)).encode())
    os._exit(128 + number)


def _say_ended(interrupt: KeyboardInterrupt) -> int:
    """Say what has ended the command; return the status that shells expect for it."""
    from expertier.interrupts import Terminated

    number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
    os.write(2, _line(number).encode())
    return 128 + number


def _line(number: signal.Signals) -> str:
    return f"expertier: ended by {number.name}\n"


def _interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that made a command exit, which libraries such as typer turn into their own exceptions."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, KeyboardInterrupt):
        behind = behind.__cause__ or behind.__context__
    return behind


def _open_standard_files() -> None:
    """Open closed standard files, as a model's file would otherwise get the number of one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    main()
