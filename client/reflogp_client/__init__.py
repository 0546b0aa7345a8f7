"""Talks to a scoring service, and holds the `reflogp` command."""
