"""The version of this package, in a room of its own so that every other room may state it."""

__version__ = "0.1.0.dev0"
