"""The examples of the documents run: every Python block, in the order of its document, on a small model.

The blocks of one document share a namespace and a folder, in which `model.gguf` is a random model. What the opening
line of a fenced block says decides what happens to it:

    ```python          runs
    ```python skip     must be valid Python, does not run
    ```cpp FILE        is written to FILE in the folder before the first block runs
    anything else      is text
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.models.synth import TINY_SHAPE, write_model

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "tiers", "planner", "hip", "engine_adapter", "tests/support")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
]
MUST_RUN = {"README.md", "docs/adapting-an-engine.md", "docs/testing-an-engine.md"}
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """One fenced block: the words after its opening fence, its text, and the line on which the text begins."""

    words: tuple[str, ...]
    text: str
    line: int

    def code(self, document: Path) -> object:
        """Compile it so that an error names the line of the document."""
        return compile("\n" * (self.line - 1) + self.text, str(document), "exec", dont_inherit=True)


def examples(document: Path) -> Iterator[Example]:
    """Yield the fenced blocks of a document."""
    text = document.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        yield Example(tuple(found["info"].split()), found["text"], line)


def name_of(document: Path) -> str:
    """The document's path as a test is called."""
    return document.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("docs") / "model.gguf", TINY_SHAPE)


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: str) -> Path:
    """Where a document's examples run: with the model, without the caller's variables."""
    (tmp_path / "model.gguf").hardlink_to(model)
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith("MOE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(CACHE_VARIABLE, cache_folder)
    return tmp_path


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_examples_run(document: Path, folder: Path) -> None:
    blocks = list(examples(document))
    for block in blocks:
        if block.words[:1] == ("cpp",) and len(block.words) == 2:
            (folder / block.words[1]).write_text(block.text, encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__example__"}
    n_run = 0
    for block in blocks:
        if block.words[:1] != ("python",):
            continue
        code = block.code(document)
        if block.words[1:] != ("skip",):
            exec(code, namespace)
            n_run += 1
    assert n_run or name_of(document) not in MUST_RUN, "its examples are no longer found"


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    plain = (re.sub(r"[^\w\- ]", "", found["text"].lower()) for found in HEADING.finditer(text))
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    broken = []
    for found in LINK.finditer(text):
        target = document.parent / found["path"] if found["path"] else document
        if not target.exists() or (found["anchor"] and found["anchor"] not in anchors(target)):
            broken.append(found[0])
    assert not broken
