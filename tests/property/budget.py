"""How many examples a property test takes: its own number, scaled by HYPOTHESIS_PROFILE."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """The whole number in the profile `deep`, a share of it in `ci`; the profile's max_examples is the per cent."""
    return max(10, count * settings.default.max_examples // 100)
