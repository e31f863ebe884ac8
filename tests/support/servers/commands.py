"""The command line in this process, and how any command ended."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from typing import IO, Any

import pytest

from expertier.cli.app import main


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object on the last line of standard output."""
        assert self.status == 0, self.err
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    def must_refuse(self, *words: object) -> None:
        """Assert that the command failed before it printed anything on standard output."""
        self.must_fail(*words)
        assert self.out == "", self

    def must_fail(self, *words: object) -> None:
        """Assert status 2 and one message of ours on standard error, with `words` in it."""
        assert self.status == 2, self
        assert "Traceback" not in self.err
        assert self.err.count("error:") == 1, self.err
        for word in words:
            assert str(word) in self.err, self.err


def command(*arguments: object, stdout: IO[str] | None = None, stderr: IO[str] | None = None) -> Ended:
    """Run `expertier ARGUMENTS` in this process, its streams in memory unless they are given."""
    out, err = stdout or io.StringIO(), stderr or io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["expertier", *map(str, arguments)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as ended:
            main()
    said = [stream.getvalue() if isinstance(stream, io.StringIO) else "" for stream in (out, err)]
    return Ended(int(ended.value.code or 0), *said)
