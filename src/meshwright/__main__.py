"""`python -m meshwright` is the command."""

from meshwright.cli import main

main()
