"""`python -m paceline.cli` is the `paceline` command.

Knows no command.
"""

from paceline.cli import main

main()
