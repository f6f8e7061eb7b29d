"""Which source code is running: the commit of the tree, for whatever must say what made it.

Knows nothing about what is made.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = Path(__file__).parent


def source_commit(source: Path = _SOURCE) -> str | None:
    """The commit of the source tree that runs, `-changed` if it was edited; None when installed.

    ``source`` is the package's folder: an installed copy inside some other tree is not tracked there.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--", ".")
        return git("rev-parse", "HEAD") + ("-changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
