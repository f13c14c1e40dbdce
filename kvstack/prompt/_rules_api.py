"""
The door to the rules: read packs, compile them with the user's settings, apply them to a request.
"""

from kvstack.prompt.engine import Hit, Stripped, apply_rules
from kvstack.prompt.rules.compiler import Pack, compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import Rule, RuleSet, RuleSettings

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
