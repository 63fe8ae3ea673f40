"""Verbs of the command line that are more than a few lines; openforge/cli.py parses and calls them."""


class VerbError(ValueError):
    """What a person asked for cannot be done; one sentence."""
