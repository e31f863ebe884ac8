from __future__ import annotations

import hashlib
from pathlib import Path

from expertier.engine_adapter.build.hashing import hash_file, hash_files, hash_text


def test_a_file_hashes_as_its_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    assert hash_file(tmp_path / "a") == hashlib.sha256(b"content").hexdigest()


def test_files_hash_whatever_their_order_and_place(tmp_path: Path) -> None:
    for root in (tmp_path / "one", tmp_path / "two"):
        root.mkdir()
        (root / "a").write_text("1")
        (root / "b").write_text("2")
    one, two = tmp_path / "one", tmp_path / "two"
    assert hash_files([one / "a", one / "b"], one) == hash_files([two / "b", two / "a"], two)


def test_names_and_contents_of_files_count(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = hash_files([tmp_path / "a"], tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    renamed = hash_files([tmp_path / "b"], tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({before, renamed, hash_files([tmp_path / "b"], tmp_path)}) == 3


def test_where_a_text_ends_counts() -> None:
    assert hash_text("ab", "c") != hash_text("a", "bc")
