"""
What the rules do to one request.

The order is always the same: read the body, find the client, find every block at its position, ask the memory which
conversation this continues, decide, cut.  A body that no rule touches comes back as the same object; one that cannot
be read comes back untouched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate, takewhile
from operator import itemgetter
from typing import Any

from kvstack.prompt.diff.difference import FoundDifference
from kvstack.prompt.diff.previous import FormerRequests
from kvstack.prompt.diff.segments import render, render_document
from kvstack.prompt.memory.fingerprint import digest_item, link_up
from kvstack.prompt.memory.state import Chain, ConversationState, Hints
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rawjson.scan import Edit, JsonPath, NotJson, apply_edits
from kvstack.prompt.request.apis import Api, api_of
from kvstack.prompt.request.chat_template import must_alternate, turn_markers
from kvstack.prompt.request.document import Document, read_document, spell_path
from kvstack.prompt.rules.client_detection import detect_client, side_label
from kvstack.prompt.rules.edits import ByItem, Replacement, body_edits, changed_text, number_keys, settle
from kvstack.prompt.rules.known_items import edits_of
from kvstack.prompt.rules.matcher import find_all
from kvstack.prompt.rules.matches import Hit, Matches
from kvstack.prompt.rules.planner import Plan, Planner
from kvstack.prompt.rules.ruleset import Client, Rule, RuleSet
from kvstack.prompt.rules.trace import Trace
from kvstack.prompt.rules.unchanged import Unchanged, find_unchanged
from kvstack.prompt.warmup_request import rendering_keys

UNSPLIT = "raw-prompt"
"""Counted like a rule: a raw prompt that is not split into turns, so that no rule can act in it."""

CACHE_PROMPT = "cache-prompt"
"""Counted like a rule: `cache_prompt` was false, and is sent as true."""


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """
    A request after the rules: the one value that everything behind them reads.

    Attributes:
        body: The bytes to send; the very object that came in if nothing was changed.
        document: The request as it was read; None if the path carries no prompt, or the body is no JSON object.
        api: The API, or None for a path that carries no prompt.
        client: The client, if it was recognised.
        conversation: An opaque name of the conversation that this continues or starts; None without a memory.
        former: Number of the former request of that conversation; None if this begins it, or was not compared.
        found_difference: Where it leaves the former request; of one that begins a conversation, where its head leaves
            the most similar recent one.  None if it extends it, or was not compared.
        items: Number of messages or input items.
        stream: The client wants a stream.
        side: What kind of side request this is, if it is one.
        hits: What the rules did.
        edits: The replacements in the decoded body, ascending.
        ts_removed: Timestamp prefixes removed.
        msg_ids_removed: `message_id` keys removed.
        items_modified: Number of items changed, dropped or inserted.
        warnings: What the user should know.
        starts: It starts its conversation, and continues none that is remembered.
        unchanged: Rules that matched and had nothing to do, and why; only with a trace.
    """

    body: bytes
    document: Document | None = field(default=None, repr=False, compare=False)
    api: Api | None = None
    client: str | None = None
    conversation: str | None = None
    former: int | None = None
    found_difference: FoundDifference | None = None
    items: int = 0
    stream: bool = False
    side: str | None = None
    hits: tuple[Hit, ...] = ()
    edits: tuple[Edit, ...] = ()
    ts_removed: int = 0
    msg_ids_removed: int = 0
    items_modified: int = 0
    warnings: tuple[str, ...] = ()
    starts: bool = False
    unchanged: tuple[Unchanged, ...] = ()
    _digest_head: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    @property
    def head_fingerprint(self) -> str | None:
        """
        Digest of system texts and tools after the rules, and of all else that a chat template reads beside the turns;
        None without a document.  Two requests that share it have the same prefix.  Computed when it is asked for.
        """
        return self._digest_head() if self._digest_head is not None else None


def apply_rules(
    body: bytes,
    path: str,
    rules: RuleSet,
    memory: ConversationMemory | None = None,
    headers: Sequence[tuple[str, str]] = (),
    chat_template: str | None = None,
    trace: Trace | None = None,
    number: int | None = None,
    formers: FormerRequests | None = None,
) -> RewriteResult:
    """
    Apply the rules to one request.

    Args:
        body: The request body as the client sent it, without content encoding.
        path: The request path; the query is ignored.
        rules: The compiled rules.
        memory: What earlier requests left; without it nothing is frozen, placed or appended again.
        headers: The request's header pairs.
        chat_template: The model's chat template: it tells how raw prompts split into turns, and whether roles must
            alternate.
        trace: Takes by what the request is known.  All of it is then read anew, and unchanged rules are looked for,
            which takes longer.
        number: The caller's number of the request, by which later ones refer to it.
        formers: The former requests, to compare this one with; side requests are not compared.

    Returns:
        The body to send and what was done.  Bytes that are no JSON object come back untouched.
    """
    api = api_of(path)
    if api is None:
        return RewriteResult(body)
    try:
        text = body.decode("utf-8")
        markers = turn_markers(chat_template)
        document = read_document(text, api, markers)
        result = _Request(document, rules, memory, headers, must_alternate(chat_template), trace).strip(body)
    except (UnicodeDecodeError, NotJson, RecursionError):
        return RewriteResult(body, api=api)
    if number is None or formers is None or result.side is not None:
        return result
    return _compared(result, number, path, formers)


def _compared(result: RewriteResult, number: int, path: str, formers: FormerRequests) -> RewriteResult:
    try:
        # Only what the rules have changed is read again: to derive it from the edits would mirror all their effects.
        document = None if result.edits else result.document
        segments = render(result.body, path) if document is None else render_document(document)
        compared = formers.compare(number, segments, path, result.conversation)
    except Exception as error:  # what the rules made is sent anyway: it is only an explanation that is lost
        lost = f"A request could not be compared with its former one ({type(error).__name__})"
        return replace(result, warnings=(*result.warnings, lost))
    return replace(
        result, conversation=compared.conversation, former=compared.former, found_difference=compared.found_difference
    )


class _Request:
    def __init__(
        self,
        document: Document,
        rules: RuleSet,
        memory: ConversationMemory | None,
        headers: Sequence[tuple[str, str]],
        merges: bool,
        trace: Trace | None,
    ) -> None:
        self.document = document
        self.merges = merges
        self.rules = rules
        self.memory = memory
        self.headers = headers
        self.client: Client = detect_client(document, rules, headers)
        self.trace = trace
        self.starts = False
        memo = memory.items.of(rules) if memory is not None and trace is None else None
        self.matches: Matches = find_all(document, self.client, memo)
        self.ops = settle(self.matches.ops)
        number_keys(self.matches.ops, self.ops)
        self.hits: list[Hit] = []
        # Items that count: trailing messages and reasoning come and go, the rest is the conversation.
        trailing = {message.index for message in self.matches.trailing}
        self._indices = [
            index
            for index, item in enumerate(document.items)
            if item.role != "reasoning" and not (trailing and index in trailing)
        ]
        self._counted = [document.items[index] for index in self._indices]

    def strip(self, body: bytes) -> RewriteResult:
        """Do it all."""
        document, matches = self.document, self.matches
        state, chain, current = self._recall()
        remembers = self.memory is not None
        planner = Planner(document, matches, self.ops, self.rules, self._indices, remembers, self.merges)
        plan = planner.decide(state, current)
        appends = planner.append_ops(plan)
        self._count(plan, appends)
        edits = body_edits(document, [*self.ops, *appends], plan.dropped, plan.inserted, self._by_item(plan))
        edits += self._force_cache_prompt()
        touched = {op.text.path[:2] for op in (*self.ops, *appends) if op.new is not None and op.new != op.current}
        stamps = sum(op.rule.spec.switch == "strip_timestamps" and op.new == "" for op in self.ops)
        ids = matches.message_ids
        for index, known in matches.known.items():
            if known.edits:
                path = document.items[index].path
                touched.add(path)
                edits += edits_of(document, document.items[index], known)
                stamps += known.timestamps
                ids += known.message_ids
        edits.sort(key=itemgetter(0, 1))
        self._remember(chain, state, plan, current)
        unchanged: tuple[Unchanged, ...] = ()
        if self.trace is not None:
            items, hits = document.items, self.hits
            unchanged = find_unchanged(
                matches, self.ops, state, plan, items, hits, remembers=remembers, starts=self.starts
            )
        if not document.split:
            self.hits.append(Hit(UNSPLIT, "", "untouched"))
        return RewriteResult(
            body=apply_edits(document.text, edits).encode("utf-8") if edits else body,
            document=document,
            api=document.api,
            client=self.client.name or None,
            conversation=state.conversation or None,
            items=document.count,
            hits=tuple(self.hits),
            ts_removed=stamps,
            msg_ids_removed=ids,
            items_modified=len(touched) + len(plan.dropped) + sum(map(len, plan.inserted.values())),
            stream=document.top.get("stream") is True,
            side=side_label(document, self.client, {message.index for message in matches.trailing}, matches.leading),
            warnings=self._warnings(),
            edits=tuple(edits),
            unchanged=unchanged,
            _digest_head=self._head_fingerprint,
            starts=self.starts,
        )

    def _head_fingerprint(self) -> str:
        document = self.document
        own: dict[int, list[Replacement]] = {}
        for op in self.ops:
            own.setdefault(id(op.text), []).append(op)
        system = [
            changed_text(text, own.get(id(text), ()), normalized=False)
            for item in takewhile(lambda item: item.leading, document.items)
            for text in item.texts
        ]
        kept = rendering_keys(document.top)
        for key in (document.format.items_key, *document.format.system_keys):
            kept.pop(key or "", None)
        tools = {op.text.path: op.text for op in self.ops if op.text.path[0] == "tools"}
        if tools:
            kept["tools"] = deepcopy(kept["tools"])
            for path, text in tools.items():
                holder: Any = kept
                for step in path[:-1]:
                    holder = holder[step]
                holder[path[-1]] = changed_text(text, own[id(text)], normalized=False)
        spelled = json.dumps([system, kept], sort_keys=True)
        return blake2b(spelled.encode(), digest_size=16).hexdigest()

    def _by_item(self, plan: Plan) -> ByItem:
        """Tell which rules drop and insert which list elements."""
        wanted: dict[JsonPath, list[tuple[str, JsonPath]]] = {}
        for rule, path, _ in plan.done:
            wanted.setdefault(path, []).append((rule.name, path))
        by = {path: tuple(causes) for path, causes in wanted.items()}
        document = self.document
        paths = {index: document.items[index + document.before_list].path for index in (*plan.dropped, *plan.inserted)}
        dropped, inserted = (
            {index: by.get(paths[index], ()) for index in indices} for indices in (plan.dropped, plan.inserted)
        )
        return dropped, inserted

    def _force_cache_prompt(self) -> list[Edit]:
        """Some clients of the native route say or default `cache_prompt: false`, and then never reuse anything."""
        document = self.document
        if not (self.rules.settings.force_cache_prompt and document.format.cache_prompt_forced):
            return []
        if document.top.get("cache_prompt") is not False:
            return []
        self.hits.append(Hit(CACHE_PROMPT, "cache_prompt", "constant"))
        return [Edit(*document.locate(("cache_prompt",)), "true", ((CACHE_PROMPT, ("cache_prompt",)),))]

    def _recall(self) -> tuple[ConversationState, Chain, dict[str, str]]:
        """Find out which conversation this is."""
        current = {op.key: op.current for op in self.ops if op.key}
        if self.memory is None:
            return ConversationState(""), Chain((), (), None), current
        by_text: dict[int, list[Replacement]] = {}
        for op in self.ops:
            by_text.setdefault(id(op.text), []).append(op)
        link, links = self.document.api.value.encode(), []
        known = self.matches.known
        for index, item in zip(self._indices, self._counted, strict=True):
            if index in known:
                digest = known[index].digest
            else:
                texts = [changed_text(text, by_text.get(id(text), ()), normalized=True) for text in item.texts]
                digest = digest_item(item, texts)
            link = link_up(link, digest)
            links.append(link)
            if self.trace is not None:
                self.trace.add(item, digest, [by_text.get(id(text), ()) for text in item.texts])
        users = accumulate([item.role == "user" for item in self._counted])
        answered = next((n for n, item in enumerate(self._counted) if item.role == "assistant"), None)
        chain = Chain(tuple(links), tuple(users), answered)
        hints = Hints(
            session=self._session(),
            current=current,
            trailing={self.document.items[one.index].texts[0].value.strip() for one in self.matches.trailing},
            trailing_key=next((one.trailing_key for one in self.matches.trailing if one.trailing_key), ""),
            dropped_fingerprint=self.matches.dropped_fingerprint,
        )
        if self.trace is not None:
            self.trace.hints, self.trace.answered = hints, answered is not None
        found = self.memory.find(chain, hints)
        self.starts = found is None
        return found or self.memory.begin(hints), chain, current

    def _session(self) -> str | None:
        headers = {name.lower(): value for name, value in self.headers}
        for name in self.client.session_headers:
            if headers.get(name):
                return headers[name]
        for key in self.client.session_keys:
            value = self.document.top.get(key)
            if isinstance(value, str) and value:
                return value
        return None

    def _hit(self, rule: Rule, path: JsonPath, n: int = 1) -> None:
        self.hits.append(Hit(rule.name, spell_path(path), rule.spec.action, n))

    def _count(self, plan: Plan, appends: Sequence[Replacement]) -> None:
        for rule, path, n in (*plan.done, *self.matches.done):
            self._hit(rule, path, n)
        for index, known in self.matches.known.items():
            if known.hits:
                where = spell_path(self.document.items[index].path)
                self.hits += [Hit(rule, where + end, action, n) for rule, end, action, n in known.hits]
        for op in self.ops:
            # A frozen value that has not changed is no deed of its rule.
            if op.counted and op.new is not None and (not op.key or op.new != op.current):
                self._hit(op.rule, op.text.path)
        for op in appends:
            self._hit(op.rule, op.text.path)

    def _remember(self, chain: Chain, state: ConversationState, plan: Plan, current: Mapping[str, str]) -> None:
        if self.memory is None:
            return
        self.memory.remember(
            chain,
            replace(
                state,
                frozen=plan.frozen,
                announced=plan.announced,
                appended=tuple(plan.appended),
                placed=tuple(plan.placed),
                current=dict(current),
                users=chain.users[-1] if chain.users else 0,
            ),
        )

    def _warnings(self) -> tuple[str, ...]:
        found = []
        for warning in self.client.warnings:
            if getattr(self.rules.settings, warning.switch) is not True:
                continue
            if warning.tool not in self.document.tool_names:
                continue
            if self.memory is not None and warning.text in self.memory.warned:
                continue
            tools = self.document.top.get("tools")
            for tool in tools if isinstance(tools, list) else ():
                named = tool.get("function", tool) if isinstance(tool, dict) else {}
                if isinstance(named, dict) and named.get("name") == warning.tool:
                    spelled = json.dumps(named)
                    if any(json.dumps(literal) in spelled for literal in warning.any_of):
                        found.append(warning.text)
                        if self.memory is not None:
                            self.memory.warned.add(warning.text)
                        break
        return tuple(found)
