"""From packs to rules: read once, laid over with the user's settings, compiled once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from kvstack.config.rules import PackSpec, RulePatch, RuleSpec, merge_rule, parse_pack_spec
from kvstack.errors import ConfigError, Problem
from kvstack.prompt.pattern.pattern import Pattern, PatternError, compile_pattern
from kvstack.prompt.request.apis import Api
from kvstack.prompt.rules.leading_blocks import Block, LeadingBlockReader
from kvstack.prompt.rules.ruleset import Client, Rule, RuleSet, RuleSettings, SearchTable, Side


@dataclass(frozen=True, slots=True)
class Pack:
    """
    A rule pack that has been read.

    Attributes:
        source: Where it came from.
        spec: What it says.
    """

    source: str
    spec: PackSpec


def parse_pack(text: str, source: str) -> Pack:
    """
    Read a rule pack.

    Args:
        text: TOML.
        source: Its file name, for error messages.

    Raises:
        ConfigError: It cannot be used; holds all problems found.
    """
    return Pack(source, parse_pack_spec(text, source))


def compile_rules(packs: Sequence[Pack], settings: RuleSettings | None = None) -> RuleSet:
    """
    Compile packs and settings.

    Raises:
        ConfigError: A pattern cannot be compiled, a name is used twice, or a user's rule does not fit.
    """
    settings = settings or RuleSettings()
    own = _Problems(settings.source)
    patches: dict[str, tuple[int, RulePatch]] = {}
    for index, patch in enumerate(settings.added):
        if patch.name in patches:
            own.add(f"rules.add.{index}.name", f"{patch.name!r} was added before; say all of it in one place")
        patches.setdefault(patch.name, (index, patch))
    names: set[str] = set()
    packed: list[_Compiled] = []
    for pack in packs:
        found = _Problems(pack.source)
        blocks = _named_blocks(pack, found)
        _extend_blocks(pack, blocks, patches, own)
        rules: list[Rule] = []
        for index, base in enumerate(pack.spec.rule):
            spec, path, problems, key = base, f"rule.{index}", found, "pattern"
            if base.name in patches:
                number, patch = patches.pop(base.name)
                path, problems = f"rules.add.{number}", own
                merged, wrong = merge_rule(base, patch, path)
                own.found.extend(wrong)
                if merged is None:
                    continue
                spec = merged
                key = "also" if patch.also is not None and patch.pattern is None else "pattern"
            if spec.name in names:
                problems.add(f"{path}.name", f"{spec.name!r} is the name of another rule")
            names.add(spec.name)
            origin = f"{pack.spec.name} {pack.spec.version}" + (" + config" if problems is own else "")
            rules += _rule(spec, blocks, pack.spec.client, origin, settings, path, problems, key)
        found.raise_any()
        packed.append(_Compiled(pack, blocks, rules))
    added: list[Rule] = []
    for index, patch in patches.values():
        near = _nearest(patch.name, names)
        if patch.also is not None:
            own.add(f"rules.add.{index}.name", f"there is no packed rule {patch.name!r} to extend{near}")
            continue
        merged, wrong = merge_rule(None, patch, f"rules.add.{index}")
        if any("is missing" in problem.message or "needs either" in problem.message for problem in wrong):
            missing = f"there is no packed rule {patch.name!r}, so this must be a complete one"
            own.add(f"rules.add.{index}", missing + near)
        own.found.extend(wrong)
        if merged:
            names.add(merged.name)
            added += _rule(merged, {}, None, "config", settings, f"rules.add.{index}", own)
    for name in sorted(settings.disabled - names):
        own.add("rules.disable", f"there is no rule {name!r}{_nearest(name, names)}")
    own.raise_any()
    return _assemble(packed, added, settings)


@dataclass(frozen=True, slots=True)
class _Compiled:
    pack: Pack
    blocks: Mapping[str, Block]
    rules: Sequence[Rule]


def _nearest(name: str, names: Iterable[str]) -> str:
    found = get_close_matches(name, sorted(names), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _extend_blocks(
    pack: Pack, blocks: dict[str, Block], patches: Mapping[str, tuple[int, RulePatch]], own: _Problems
) -> None:
    """Add to named blocks what the user's rules say that they look like as well."""
    for rule in pack.spec.rule:
        number, patch = patches.get(rule.name, (0, None))
        if patch is None or patch.also is None or patch.pattern is not None:
            continue
        block = blocks.get(patch.block or rule.block or "")
        if block is not None:
            more = _compile(patch.also, f"rules.add.{number}.also", own)
            blocks[block.name] = replace(block, patterns=(*block.patterns, *more))


def _assemble(packed: Sequence[_Compiled], added: Sequence[Rule], settings: RuleSettings) -> RuleSet:
    everything = [*(rule for compiled in packed for rule in compiled.rules), *added]
    common = [rule for rule in everything if rule.spec.any_client]
    sides = [_sides(compiled.pack) for compiled in packed]
    everywhere = [side for group in sides for side in group if side.spec.any_client]
    clients = []
    for compiled, own in zip(packed, sides, strict=True):
        names = {rule.name for rule in compiled.rules}
        mine = [*compiled.rules, *(rule for rule in common if rule.name not in names)]
        clients.append(_client(compiled, mine, [*own, *(side for side in everywhere if side not in own)]))
    by_name = {rule.name: rule for rule in everything}
    signs = sorted(
        ((sign, client) for client in clients for sign in client.detect),
        key=lambda found: (found[0].header is None, not found[0].tools),
    )
    unknown = _client(None, common, everywhere)
    return RuleSet(tuple(everything), tuple(clients), unknown, settings, by_name, tuple(signs))


def _sides(pack: Pack) -> list[Side]:
    return [Side(spec, tuple(map(compile_pattern, spec.pattern or ()))) for spec in pack.spec.side]


def _client(compiled: _Compiled | None, rules: Iterable[Rule], sides: Iterable[Side]) -> Client:
    pack = compiled.pack if compiled else None
    everything = list(rules)
    active = tuple(rule for rule in everything if rule.active)
    declared: dict[str, list[Block]] = {"user head": [], "user tail": [], "message": []}
    # What the user says of a block comes before what the pack says of it.
    for rule in everything:
        if rule.spec.where not in declared or not rule.active:
            continue
        if rule.origin.endswith("config") and rule.spec.pattern is not None:
            declared[rule.spec.where].append(rule.block)
    if compiled:
        for spec in compiled.pack.spec.block:
            declared[spec.where].append(compiled.blocks[spec.name])
    # A rule that is off still tells the cursor what its block looks like: what stands behind it must stay reachable.
    for rule in everything:
        if rule.spec.where == "message" and rule.spec.has and not rule.active:
            continue  # nobody is there to tell which of such messages are meant
        if rule.spec.where in declared and rule.block not in declared[rule.spec.where]:
            declared[rule.spec.where].append(rule.block)
    positions = _positions(active)
    return Client(
        pack.spec.client if pack else "",
        pack.spec.detect if pack else (),
        active,
        LeadingBlockReader(declared["user head"]),
        tuple(declared["user tail"]),
        tuple(declared["message"]),
        tuple(sides),
        tuple(name.lower() for name in pack.spec.session_headers) if pack else (),
        pack.spec.session_keys if pack else (),
        pack.spec.warning if pack else (),
        positions,
        {key: SearchTable(group) for key, group in positions.items() if key[0] in ("system", "tools")},
        {dialect: _by_block(group) for (where, dialect), group in positions.items() if where == "user head"},
    )


def _by_block(rules: Sequence[Rule]) -> dict[str, list[Rule]]:
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        found.setdefault(rule.block.name, []).append(rule)
    return found


def _positions(rules: Iterable[Rule]) -> dict[tuple[str, str], tuple[Rule, ...]]:
    found: dict[tuple[str, str], tuple[Rule, ...]] = {}
    for rule in rules:
        for dialect in rule.spec.dialects or tuple(Api):
            key = (rule.spec.where, dialect)
            found[key] = (*found.get(key, ()), rule)
    return found


class _Problems:
    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[Problem] = []

    def add(self, path: str, message: str) -> None:
        self.found.append(Problem(path, message))

    def raise_any(self) -> None:
        if self.found:
            raise ConfigError(self.source, self.found)


def _named_blocks(pack: Pack, problems: _Problems) -> dict[str, Block]:
    blocks = {}
    for index, spec in enumerate(pack.spec.block):
        patterns = _compile(spec.pattern, f"block.{index}.pattern", problems)
        blocks[spec.name] = Block(spec.name, patterns, spec.repeat, spec.alone, frozenset(spec.not_behind))
    kinds = {*blocks, *(rule.name for rule in pack.spec.rule if rule.pattern is not None)}
    for index, spec in enumerate(pack.spec.block):
        for name in sorted({*spec.not_behind} - kinds):
            problems.add(f"block.{index}.not_behind", f"there is no block {name!r} in this pack{_nearest(name, kinds)}")
    for index, side in enumerate(pack.spec.side):
        _compile(side.pattern or (), f"side.{index}.pattern", problems)
    return blocks


def _rule(
    spec: RuleSpec,
    blocks: dict[str, Block],
    client: str | None,
    origin: str,
    settings: RuleSettings,
    path: str,
    problems: _Problems,
    key: str = "pattern",
) -> list[Rule]:
    block = _rule_block(spec, blocks, path, problems, key)
    if block is not None and spec.keys and not all(pattern.reads_json for pattern in block.patterns):
        problems.add(f"{path}.keys", "there is no JSON to have keys: its pattern needs {json} or {json-fence}")
    if block is not None and spec.has and not any(pattern.reads_json for pattern in block.patterns):
        problems.add(f"{path}.has", "there is no JSON to have keys: its pattern needs {json} or {json-fence}")
    same = _compile(spec.same, f"{path}.same", problems) if spec.same else ()
    if spec.inside is not None and spec.inside not in blocks:
        problems.add(f"{path}.inside", f"there is no block {spec.inside!r} in this pack")
    for name in set(spec.dialects).difference(Api):
        problems.add(f"{path}.dialects", f"there is no dialect {name!r}; dialects are: {', '.join(Api)}")
    return [Rule(spec, block, client, origin, _active(spec, settings), same)] if block is not None else []


def _rule_block(
    spec: RuleSpec, blocks: dict[str, Block], path: str, problems: _Problems, key: str = "pattern"
) -> Block | None:
    if spec.block is not None:
        block = blocks.get(spec.block)
        if block is None:
            known = ", ".join(blocks) or "none"
            problems.add(f"{path}.block", f"there is no block {spec.block!r} in this pack; blocks are: {known}")
        return block
    assert spec.pattern is not None
    patterns = _compile(spec.pattern, f"{path}.{key}", problems)
    if spec.action == "coarsen":
        patterns = tuple(pattern.coarsened() for pattern in patterns)
    searched = spec.where in ("system", "tools", "first user") and spec.at != "start"
    if searched and any(not pattern.head for pattern in patterns):
        problems.add(f"{path}.{key}", 'must begin with a literal or {json-fence}, or have `at = "start"`')
        return None
    return Block(spec.name, patterns) if len(patterns) == len(spec.pattern) else None


def _compile(patterns: Sequence[str], path: str, problems: _Problems) -> tuple[Pattern, ...]:
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(compile_pattern(pattern))
        except PatternError as error:
            problems.add(path, f"{pattern!r}: {error}")
    return tuple(compiled)


def _active(spec: RuleSpec, settings: RuleSettings) -> bool:
    if not spec.enabled or spec.name in settings.disabled:
        return False
    match spec.switch:
        case "strip_timestamps":
            return settings.strip_timestamps
        case "strip_message_ids":
            chosen = settings.strip_message_ids
            return spec.where == "system" if chosen == "system" else bool(chosen)
        case _:
            return True
