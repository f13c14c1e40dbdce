"""
Which remembered conversation a request continues, and what was done to its earlier turns.
"""

from __future__ import annotations

__all__ = ["ConversationMemory"]


class ConversationMemory:
    """
    What earlier requests left behind, bounded in count and bytes.
    """
