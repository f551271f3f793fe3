"""`python -m jaxrel.cli`."""

from jaxrel.cli import command

command()
