"""
The door to the rules: read packs, compile them with the user's settings, apply them to a request.
"""

from kvstack.prompt.compiling import Pack, compile_rules, parse_pack
from kvstack.prompt.ruleset import Rule, RuleSet, RuleSettings
from kvstack.prompt.stripping import Hit, Stripped, apply_rules

__all__ = [
    "Hit",
    "Pack",
    "Rule",
    "RuleSet",
    "RuleSettings",
    "Stripped",
    "apply_rules",
    "compile_rules",
    "parse_pack",
]
