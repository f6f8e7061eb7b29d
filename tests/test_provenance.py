"""The commit of a source tree, its edits, and installed copies.

Does not know what a commit is recorded for.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from paceline.provenance import source_commit


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_tree_an_edited_tree_and_a_copy_inside_another_tree(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    assert source_commit(package) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "other").touch()
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-qm", "x")
    assert source_commit(package) is None, "an installed copy has no commit"
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-qm", "y")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert source_commit(package) == head
    (tmp_path / "other").write_text("not of the package")
    assert source_commit(package) == head
    (package / "new.py").touch()
    assert source_commit(package) == f"{head}-changed"
    assert source_commit(tmp_path / "nowhere") is None
