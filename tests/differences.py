"""Two bodies as requests of one conversation, compared as the product compares them."""

from kvstack.prompt.diff.difference import FoundDifference, find_difference
from kvstack.prompt.diff.segments import render


def difference_of_bodies(previous: bytes, current: bytes, path: str) -> FoundDifference | None:
    """Find the first difference of two bodies sent to one path."""
    return find_difference(render(previous, path), render(current, path))
