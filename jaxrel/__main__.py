"""`python -m jaxrel`: the `jaxrel` command."""

from jaxrel.cli import command

command()
