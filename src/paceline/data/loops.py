"""Where a text begins to repeat itself.

Knows token ids only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def loop_start(tokens: Sequence[int], gram: int = 8, times: int = 4, window: int = 128) -> int:
    """Where the text begins to repeat itself: the start of the second copy, or len(tokens).

    A loop is one `gram`-gram that occurs `times` times within `window` tokens.
    """
    seen: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for at in range(len(tokens) - gram + 1):
        places = seen[tuple(tokens[at : at + gram])]
        places.append(at)
        if len(places) >= times and at - places[-times] <= window:
            return places[-times + 1]
    return len(tokens)
