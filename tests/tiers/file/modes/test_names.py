"""The modes by name: each file in `tiers/file/modes/` is one, a new file included."""

from __future__ import annotations

from pathlib import Path

import pytest

import expertier
from expertier.tiers.config.file_mode import FileMode
from model_files.file_reads import open_source
from servers.package_copies import run_with_file


def test_the_modes_that_our_code_names_are_there() -> None:
    modes = Path(expertier.__file__).parent / "tiers" / "file" / "modes"
    assert {path.stem.replace("_", "-") for path in modes.glob("[!_]*.py")} == set(FileMode)


@pytest.mark.parametrize("mode", [mode for mode in FileMode if mode is not FileMode.AUTO])
def test_a_reader_bears_the_name_of_its_file(tmp_path: Path, mode: FileMode) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(5000))
    source = open_source(path, mode)
    assert source.mode in (mode, FileMode.PAGE_CACHE)  # where this file system has no direct reads
    source.close()


IN_HALVES = """
from expertier.tiers.config.file_mode import FileMode
from expertier.tiers.file.reader import FileReader

class Reader(FileReader):
    mode = FileMode("in-halves")
    takes_hints = False

    def __init__(self, files, terms, readers):
        self._files = files

    def read(self, number, offset, buffer):
        half = len(buffer) // 2
        self._files[number].read(offset, buffer[:half])
        self._files[number].read(offset + half, buffer[half:])
        return self
"""

TRY_IT = """
import sys
from pathlib import Path
from expertier.tiers.config.config import TierConfig
from expertier.tiers.file.source import FileSource
from expertier.tiers.model.file_identity import FileIdentity
from expertier.tiers.model.model_file import ModelFile
from expertier.tiers.model.span import Span

config = TierConfig.from_env(environ={"MOE_FILE_MODE": "in-halves"})
path = Path(sys.argv[1])
source = FileSource([ModelFile(path, 0, FileIdentity.of(path.stat()))], config.file_mode)
found = bytearray(4)
source.read_into(Span(1, 4), memoryview(found))
print(found.decode(), source.mode, source.stats().by_mode[source.mode].reads)
try:
    TierConfig.from_env(environ={"MOE_FILE_MODE": "in-thirds"})
except Exception as error:
    print(error)
"""


def test_a_mode_is_one_file(tmp_path: Path) -> None:
    """A copy of the package with one more file: its name works, and is among those that an error offers."""
    model = tmp_path / "model.gguf"
    model.write_text("abcdefgh")
    result = run_with_file(tmp_path, "tiers/file/modes/in_halves.py", IN_HALVES, TRY_IT, str(model))
    assert result.stdout.splitlines() == [
        "bcde in-halves 1",
        "MOE_FILE_MODE='in-thirds' cannot be read: give `auto`, `page-cache`, `direct` or `in-halves`",
    ], result.stderr
