"""Self-written programming prompts: function heads with docstrings, and requests in words.

Does not know any benchmark: every task is put together here from small parts, nothing is copied.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

Piece = tuple[str, str, Callable[[Any], Any]]

_KEEP: list[Piece] = [
    ("even", "that are even", lambda x: x % 2 == 0),
    ("odd", "that are odd", lambda x: x % 2 == 1),
    ("positive", "that are greater than zero", lambda x: x > 0),
    ("negative", "that are below zero", lambda x: x < 0),
    ("large", "that are larger than 10", lambda x: x > 10),
    ("small", "whose absolute value is at most 5", lambda x: abs(x) <= 5),
    ("triple", "divisible by 3", lambda x: x % 3 == 0),
    ("two_digit", "that have exactly two digits", lambda x: 10 <= abs(x) <= 99),
    ("all", "of the list", lambda x: True),
    ("square", "that are perfect squares", lambda x: x >= 0 and int(x**0.5) ** 2 == x),
]
_CHANGE: list[Piece] = [
    ("squares", "squared", lambda x: x * x),
    ("doubles", "multiplied by two", lambda x: 2 * x),
    ("absolute", "replaced by their absolute value", abs),
    ("negated", "with the sign flipped", lambda x: -x),
    ("plain", "unchanged", lambda x: x),
    ("shifted", "increased by one", lambda x: x + 1),
    ("last_digits", "reduced to their last digit", lambda x: abs(x) % 10),
    ("halves", "halved with integer division", lambda x: x // 2),
]
_COMBINE: list[Piece] = [
    ("sum", "Return the sum of the numbers", sum),
    ("list", "Return a new list with the numbers", list),
    ("count", "Count the numbers", len),
    ("maximum", "Return the largest of the numbers, or None,", lambda v: max(v, default=None)),
    ("minimum", "Return the smallest of the numbers, or None,", lambda v: min(v, default=None)),
    ("sorted", "Return, in ascending order, the numbers", sorted),
    ("unique", "Return without duplicates the numbers", lambda v: list(dict.fromkeys(v))),
    ("reversed", "Return in reverse order the numbers", lambda v: list(v)[::-1]),
    ("average", "Return the mean of the numbers, or 0.0,", lambda v: sum(v) / len(v) if v else 0.0),
    ("running_sum", "Return the list of running totals of the numbers", lambda v: _running(v)),
]
_TEXT: list[Piece] = [
    ("count_vowels", "Count how many vowels the text has, upper and lower case.",
     lambda s: sum(c in "aeiouAEIOU" for c in s)),
    ("reverse_words", "Return the words of the text in reverse order, joined by one blank.",
     lambda s: " ".join(s.split()[::-1])),
    ("longest_word", "Find the longest word of the text. If there are several, return the first.",
     lambda s: max(s.split(), key=len, default="")),
    ("initials", "Return the first letter of every word as one upper-case string.",
     lambda s: "".join(w[0] for w in s.split()).upper()),
    ("swap_case", "Turn upper-case letters into lower-case letters and the other way round.",
     str.swapcase),
    ("remove_spaces", "Remove all blanks from the text.", lambda s: s.replace(" ", "")),
    ("word_lengths", "Return a list with the length of each word.",
     lambda s: [len(w) for w in s.split()]),
    ("letter_counts", "Return a dictionary that maps each letter to the number of its occurrences.",
     lambda s: {c: s.count(c) for c in sorted(set(s)) if c.isalpha()}),
    ("is_mirror", "Check whether the text reads the same from both ends, ignoring case.",
     lambda s: s.lower() == s.lower()[::-1]),
    ("compress", "Replace each run of one character by the character and the length of the run.",
     lambda s: _runs(s)),
    ("first_unique", "Return the first character that occurs only once, or an empty string.",
     lambda s: next((c for c in s if s.count(c) == 1), "")),
    ("every_second", "Keep every second character, beginning with the first.", lambda s: s[::2]),
    ("digits_only", "Return the digits found in the text as an integer, 0 if there is none.",
     lambda s: int("".join(c for c in s if c.isdigit()) or 0)),
    ("title_words", "Start every word with a capital letter and keep the rest lower-case.",
     lambda s: " ".join(w.capitalize() for w in s.split())),
    ("count_long_words", "Count the words that have more than four letters.",
     lambda s: sum(len(w) > 4 for w in s.split())),
    ("shift_letters", "Replace each lower-case letter by the next letter of the alphabet, z by a.",
     lambda s: "".join(chr((ord(c) - 96) % 26 + 97) if c.islower() else c for c in s)),
]  # fmt: skip
_NUMBER: list[Piece] = [
    ("digit_sum", "Add up the decimal digits of n.", lambda n: sum(map(int, str(n)))),
    ("divisors", "Return all positive divisors of n in ascending order.",
     lambda n: [d for d in range(1, n + 1) if n % d == 0]),
    ("is_prime_number", "Return True if n is a prime number, False otherwise.",
     lambda n: n > 1 and all(n % d for d in range(2, n))),
    ("collatz_steps", "Count the steps of the Collatz sequence from n down to 1.",
     lambda n: _collatz(n)),
    ("to_binary", "Return the binary digits of n as a string without a prefix.",
     lambda n: bin(n)[2:]),
    ("prime_factors", "Return the prime factors of n, smallest first, with repetition.",
     lambda n: _factors(n)),
    ("nth_triangle", "Return the n-th triangular number 1 + 2 + ... + n.",
     lambda n: n * (n + 1) // 2),
    ("reverse_number", "Return the number whose digits are those of n in reverse order.",
     lambda n: int(str(n)[::-1])),
    ("multiplication_row", "Return the first ten multiples of n as a list.",
     lambda n: [n * i for i in range(1, 11)]),
    ("fizz", "For 1..n, list 'Fizz' for multiples of 3, 'Buzz' for multiples of 5, else the number.",
     lambda n: ["Fizz" if i % 3 == 0 else "Buzz" if i % 5 == 0 else i for i in range(1, n + 1)]),
    ("count_down", "Return the list of numbers from n down to 0.", lambda n: list(range(n, -1, -1))),
    ("power_of_two", "Check if n is a power of two.", lambda n: n > 0 and n & (n - 1) == 0),
    ("square_sum", "Return the sum of the squares of 1..n.",
     lambda n: sum(i * i for i in range(1, n + 1))),
]  # fmt: skip
_WORDS = (
    "river Stone garden apple Window seven green Paper moon otter Table level 42 cloud bread"
    " Lantern 7 noon quick Silver pocket aaa Harbor 19 winter bike"
).split()
_ASKS = (
    "Write a Python function `{name}` that does the following: {text}",
    "Please implement `{name}` in Python. {text} Explain the code shortly.",
    "How can I do this in Python? {text}",
    "Write a Python class with a method `{name}`. {text} Add a small example.",
    "I need a short Python script. {text} Use a function called {name}.",
    "Write unit tests for a Python function `{name}`. {text}",
)


def _running(values: list[int]) -> list[int]:
    out: list[int] = []
    for value in values:
        out.append(value + (out[-1] if out else 0))
    return out


def _runs(text: str) -> str:
    out, at = "", 0
    while at < len(text):
        end = at
        while end < len(text) and text[end] == text[at]:
            end += 1
        out, at = out + text[at] + str(end - at), end
    return out


def _collatz(n: int) -> int:
    steps = 0
    while n != 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


def _factors(n: int) -> list[int]:
    out, d = [], 2
    while n > 1:
        while n % d == 0:
            out.append(d)
            n //= d
        d += 1
    return out


def _task(rng: random.Random) -> tuple[str, str, str, list[tuple[str, str]]]:
    """One task: function name, typed arguments, description, examples (call, result)."""
    kind = rng.choice(("list", "list", "text", "number"))
    if kind == "list":
        keep, change, combine = rng.choice(_KEEP), rng.choice(_CHANGE), rng.choice(_COMBINE)
        name = f"{combine[0]}_of_{keep[0]}_{change[0]}"
        text = f"{combine[1]} {keep[1]}, {change[1]}."

        def combined(values: Any) -> Any:
            return combine[2]([change[2](value) for value in values if keep[2](value)])

        run: Callable[[Any], Any] = combined

        inputs: list[Any] = [
            [rng.randint(-12, 30) for _ in range(rng.randint(3, 7))] for _ in range(3)
        ]
        arguments = rng.choice(("numbers: List[int]", "numbers", "values: list", "nums: List[int]"))
    elif kind == "text":
        name, text, run = rng.choice(_TEXT)
        inputs = [" ".join(rng.sample(_WORDS, rng.randint(1, 4))) for _ in range(3)]
        arguments = rng.choice(("text: str", "s", "sentence: str", "word: str"))
    else:
        name, text, run = rng.choice(_NUMBER)
        inputs = [rng.randint(2, 40) for _ in range(3)]
        arguments = rng.choice(("n: int", "n", "number: int"))
    examples = [(f"{name}({value!r})", repr(run(value))) for value in inputs]
    return name, arguments, text, examples


def code_prompt(rng: random.Random) -> str:
    """One user message: mostly a function head with a docstring, else a request in words."""
    name, arguments, text, examples = _task(rng)
    if rng.random() < 0.35:
        return rng.choice(_ASKS).format(name=name, text=text)
    result = rng.choice(("", " -> int", " -> list")) if ":" in arguments else ""
    quote = rng.choice(('"""', '"""', "'''"))
    shown = examples[: rng.randint(1, 3)]
    if rng.random() < 0.6:
        lines = [line for call, value in shown for line in (f"    >>> {call}", f"    {value}")]
    else:
        arrow = rng.choice((" ➞ ", " == ", " should return ", " => "))
        head = rng.choice(("Example:", "For example:", "Examples:"))
        lines = [f"    {head}"] + [f"    {call}{arrow}{value}" for call, value in shown]
    blank = rng.choice(("", " ", "\n    "))
    imports = "from typing import List\n\n\n" if "List" in arguments else ""
    top = rng.choice(("", "", "\n"))
    body = "\n".join(lines)
    return (
        f"{imports}{top}def {name}({arguments}){result}:\n"
        f"    {quote}{blank}{text}\n{body}\n    {quote}\n"
    )


def code_prompts(count: int, seed: int) -> list[str]:
    """`count` different prompts, the same for the same seed."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[code_prompt(rng)] = None
    return list(found)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) == 2 else sys.exit("usage: code_prompts COUNT")
    for text in code_prompts(count, 0):
        print(json.dumps({"prompt": text, "source": "code"}))
