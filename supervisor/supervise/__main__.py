"""`python -m supervise`."""

from .cli import main

main()
