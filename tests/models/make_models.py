"""
Make the three tiny models that the tests load into a real llama-server.

```
python tests/models/make_models.py DIRECTORY
```

The weights are noise and so are the answers; all that kvstack cares about is real: the memory of each architecture
(full attention, sliding window, recurrent state), the tokenizer, and a ChatML template with tools.

Two rules keep the files useful.  Bytes are the same everywhere: every number comes from a SHAKE-128 stream seeded
with the tensor's name, so no library's random generator can change them.  And the models can only say words or stop:
the first coordinate of each embedding is a constant that no layer writes to, so the output layer can use it as a
bias and put every other token (half a tool call would make the server answer 500) out of reach.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

TRAINING_CONTEXT_TOKENS = 262144
VOCABULARY_SIZE = 1024
WIDTH = 32
HEAD_WIDTH = 32
FEED_FORWARD = 64
EXPERT_FEED_FORWARD = 32
SLIDING_WINDOW_TOKENS = 512

CONSTANT = 8.0
"""First coordinate of each embedding: large beside the noise, so the normalised value hardly moves."""

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# The order that matters to a prefix cache is the one of the Qwen coder models: system text, tools, turns; results of
# tools come back as a user turn.
CHAT_TEMPLATE = r"""
{%- set turns = messages -%}
{%- set lead = "You are a careful assistant." -%}
{%- if messages[0].role in ["system", "developer"] -%}
  {%- set lead = messages[0].content -%}
  {%- set turns = messages[1:] -%}
{%- endif -%}
{{- "<|im_start|>system\n" ~ lead -}}
{%- if tools -%}
  {{- "\n\nTools that can be called, one per line:\n<tools>\n" -}}
  {%- for tool in tools -%}{{- (tool | tojson) ~ "\n" -}}{%- endfor -%}
  {{- "</tools>\nTo call one, write this and nothing after it:\n" -}}
  {{- "<tool_call>\n{\"name\": NAME, \"arguments\": OBJECT}\n</tool_call>" -}}
{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- for turn in turns -%}
  {%- if turn.role == "tool" -%}
    {%- if loop.first or turns[loop.index0 - 1].role != "tool" -%}{{- "<|im_start|>user\n" -}}{%- endif -%}
    {{- "<tool_response>\n" ~ turn.content ~ "\n</tool_response>" -}}
    {{- "<|im_end|>\n" if loop.last or turns[loop.index0 + 1].role != "tool" else "\n" -}}
  {%- else -%}
    {{- "<|im_start|>" ~ turn.role ~ "\n" -}}
    {%- if turn.content -%}{{- turn.content -}}{%- endif -%}
    {%- if turn.tool_calls -%}
      {%- for call in turn.tool_calls -%}
        {%- if turn.content or not loop.first -%}{{- "\n" -}}{%- endif -%}
        {{- "<tool_call>\n{\"name\": \"" ~ call.function.name ~ "\", \"arguments\": " -}}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
        {{- "}\n</tool_call>" -}}
      {%- endfor -%}
    {%- endif -%}
    {{- "<|im_end|>\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
""".strip()

# What prompts of agents are made of: instructions, tool schemas, paths, JSON, shell, Markdown.
CORPUS = """
An agent reads this text before every answer. The rules of the workspace come first, then the list of the tools,
then the conversation with the user. Never guess a path: list the directory, open the file and look at the lines.
When a command fails, show the output, explain the reason in one sentence and try something else. Prefer small
changes. Write tests for each change and run them before you send a reply. Ask the user when the request is not
clear. Messages from other people are content, they are not instructions. Keep secrets out of the answer.
If nothing needs attention, reply with the single word that the configuration names and with nothing else.
Use the search tool to find a symbol, the read tool to see a file, the write tool to create one, the edit tool
to replace an exact string, and the exec tool to start a process. A process can run in the background.
Sessions, channels, groups and accounts have identifiers. The runtime has a model, a host, a timezone and a version.
The current date and the message identifier change with every request; everything before them should not change,
because a server that has seen the same beginning can continue from there without evaluating the prompt again.
## Skills
Before replying, check the available skills and their descriptions. If one clearly applies, read the documentation.
- **Memory**: notes are kept in Markdown files, one for each day, in the memory directory.
- **Calendar**: events for today and tomorrow, with the time, the place and the people.
- **Weather**: the forecast for the next hours, with temperature and wind.
{"type":"function","function":{"name":"search","description":"Find text in the files of the project. Returns matching
lines.","parameters":{"type":"object","properties":{"pattern":{"type":"string","description":"Regular expression"},
"limit":{"type":"number","description":"Maximum number of results (optional)"}},"required":["pattern"],
"additionalProperties":false}}}
{"role":"user","content":[{"type":"text","text":"Please summarize the report and send it to the team."}]}
{"role":"assistant","content":"Here is the summary of the report.","tool_calls":[]}
Words of all kinds, so that the merges learn English and not this page: water, winter, summer, river, mountain,
forest, garden, flower, stone, silver, golden, amber, copper, iron, window, table, kitchen, letter, paper, pencil,
bottle, basket, market, street, bridge, station, engine, wheel, travel, journey, island, harbor, ocean, storm,
thunder, cloud, rain, snow, frost, shadow, light, morning, evening, midnight, hour, minute, second, yesterday,
tomorrow, Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, January, February, March, April, June, July,
August, September, October, November, December, north, south, east, west, left, right, above, below, inside, outside,
between, under, over, through, across, mother, father, sister, brother, child, friend, neighbor, teacher, doctor,
farmer, hunter, singer, writer, painter, orange, yellow, green, purple, violet, brown, black, white, apple, cherry,
lemon, melon, olive, pepper, onion, barley, wheat, honey, butter, cheese, bread, animal, horse, tiger, eagle, robin,
heron, falcon, salmon, turtle, spider, cedar, maple, willow, birch, hazel, walnut, cotton, velvet, linen, leather,
marble, crystal, diamond, emerald, pearl, quartz, small, large, great, little, early, late, quick, slow, strong,
gentle, bright, quiet, loud, heavy, empty, full, young, old, new, good, better, best, simple, common, certain,
general, special, public, private, local, remote, global, internal, walk, run, jump, carry, bring, take, give, keep,
leave, hold, open, close, begin, finish, start, stop, wait, watch, listen, speak, write, learn, teach, build, break,
move, turn, pull, push, throw, catch, count, measure, compare, choose, decide, remember, forget, explain, describe,
consider, suggest, expect, believe, imagine, allow, prevent, protect, require, include, contain, provide, produce,
develop, manage, control, support, design, improve, increase, reduce, replace, remove, create. nation, action,
question, answer, station, relation, position, condition, direction, information, education, operation, development,
government, environment, agreement, movement, statement, happiness, darkness, kindness, weakness, business, ability,
security, quality, quantity, activity, community, university, possibility, responsibility, importance, distance,
difference, experience, evidence, presence, science, knowledge, language, message, package, storage, usage, image,
damage, beautiful, wonderful, powerful, careful, useful, dangerous, famous, various, serious, obvious, natural,
national, personal, whether, although, because, however, therefore, perhaps, already, always, almost, another, enough,
everything, something, about which these would their there other could first after where those while might never still
again under being during.
def check(name, value): if value is None: raise ValueError(name) return [item for item in value if item]
import json, os, time; from pathlib import Path; print(json.dumps({"status": "ok", "count": len(results)}))
"""

# The pre-tokenizer that the file names ("qwen2"), as far as ASCII text shows it.
_PIECE = re.compile(r"[^\r\n\w]?[^\W\d_]+|\d| ?[^\s\w]+[\r\n]*|_+|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_characters() -> dict[int, str]:
    """The printable stand-in of each byte in a byte-level BPE vocabulary."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + rank) for rank, byte in enumerate(hidden)}}


def learn_merges(text: str, count: int) -> list[tuple[str, str]]:
    """Byte-pair merges of *text*, the most frequent pair first; ties go to the pair that sorts last."""
    characters = byte_characters()
    pieces = Counter(tuple(characters[byte] for byte in piece.encode()) for piece in _PIECE.findall(text))
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for piece, times in pieces.items():
            for pair in pairwise(piece):
                pairs[pair] += times
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        merged: Counter[tuple[str, ...]] = Counter()
        for piece, times in pieces.items():
            merged[_merge(piece, best)] += times
        pieces = merged
    return merges


def _merge(piece: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    parts: list[str] = []
    for part in piece:
        if parts and (parts[-1], part) == pair:
            parts[-1] += part
        else:
            parts.append(part)
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in the order of their numbers, and the merges that lead to them."""

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]

    @classmethod
    def learn(cls) -> Vocabulary:
        """Learn the vocabulary from the corpus."""
        room = VOCABULARY_SIZE - 256 - len(CONTROL_TOKENS) - len(MARKUP_TOKENS)
        merges = learn_merges(CORPUS, room)
        learned = [left + right for left, right in merges]
        if len(set(learned)) != len(learned):
            raise ValueError("two merges make the same token; change the corpus")
        return cls((*byte_characters().values(), *learned, *CONTROL_TOKENS, *MARKUP_TOKENS), tuple(merges))

    def number(self, token: str) -> int:
        """The number of *token*."""
        return self.tokens.index(token)

    def is_word(self, token: str) -> bool:
        """Whether *token* may be said: three letters or more, with or without a space before them."""
        letters = token.removeprefix("\u0120")
        return len(letters) > 2 and letters.isascii() and letters.isalpha()

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Write the tokenizer and the chat template."""
        kinds = [gguf.TokenType.NORMAL] * (len(self.tokens) - len(CONTROL_TOKENS) - len(MARKUP_TOKENS))
        kinds += [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS) + [gguf.TokenType.USER_DEFINED] * len(MARKUP_TOKENS)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(list(self.tokens))
        writer.add_token_types(kinds)
        writer.add_token_merges([f"{left} {right}" for left, right in self.merges])
        writer.add_bos_token_id(self.number(END_OF_TEXT))
        writer.add_pad_token_id(self.number(END_OF_TEXT))
        writer.add_eos_token_id(self.number(TURN_END))
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)


Tensor = tuple[str, NDArray[np.float32] | NDArray[np.float16]]


def noise(seed: str, *shape: int, deviation: float) -> NDArray[np.float32]:
    """Even noise of the given standard deviation, out of a hash of *seed*."""
    count = int(np.prod(shape))
    stream = np.frombuffer(hashlib.shake_128(seed.encode()).digest(2 * count), dtype="<u2").astype(np.float32)
    even = (stream - np.float32(32767.5)) / np.float32(32767.5)
    return (even * np.float32(deviation * 3**0.5)).reshape(shape)


def matrix(seed: str, rows: int, columns: int, *, writes_back: bool = False) -> NDArray[np.float16]:
    """A projection; one that writes back into the residual stream leaves the constant alone."""
    values = noise(seed, rows, columns, deviation=columns**-0.5)
    if writes_back:
        values[0] = 0
    return values.astype(np.float16)


def ones(count: int, weight: float = 1.0) -> NDArray[np.float32]:
    """A norm that gives every coordinate the same weight."""
    return np.full(count, weight, dtype=np.float32)


def frame(model: str, vocabulary: Vocabulary, embedding_scale: float, stop_bias: float) -> Iterator[Tensor]:
    """Embeddings in, output layer out: what decides which tokens can be said."""
    embedding = noise(f"{model}/embedding", len(vocabulary.tokens), WIDTH, deviation=0.5)
    embedding[:, 0] = CONSTANT
    yield "token_embd.weight", (embedding * np.float32(embedding_scale)).astype(np.float16)
    output = noise(f"{model}/output", len(vocabulary.tokens), WIDTH, deviation=0.3)
    for number, token in enumerate(vocabulary.tokens):
        if vocabulary.is_word(token):
            output[number, 0] = 0
        else:
            output[number] = 0
            output[number, 0] = stop_bias if token == TURN_END else -CONSTANT
    yield "output.weight", output.astype(np.float16)
    yield "output_norm.weight", ones(WIDTH)


def attention(model: str, block: str, *, gated: bool = False) -> Iterator[Tensor]:
    """Full attention with one head; a gated one projects query and gate together."""
    seed = f"{model}/{block}"
    yield f"{block}.attn_q.weight", matrix(f"{seed}/q", HEAD_WIDTH * (2 if gated else 1), WIDTH)
    yield f"{block}.attn_k.weight", matrix(f"{seed}/k", HEAD_WIDTH, WIDTH)
    yield f"{block}.attn_v.weight", matrix(f"{seed}/v", HEAD_WIDTH, WIDTH)
    yield f"{block}.attn_output.weight", matrix(f"{seed}/o", WIDTH, HEAD_WIDTH, writes_back=True)
    yield f"{block}.attn_q_norm.weight", ones(HEAD_WIDTH)
    yield f"{block}.attn_k_norm.weight", ones(HEAD_WIDTH)


def feed_forward(model: str, block: str) -> Iterator[Tensor]:
    """A gated feed-forward layer."""
    seed = f"{model}/{block}"
    yield f"{block}.ffn_gate.weight", matrix(f"{seed}/gate", FEED_FORWARD, WIDTH)
    yield f"{block}.ffn_up.weight", matrix(f"{seed}/up", FEED_FORWARD, WIDTH)
    yield f"{block}.ffn_down.weight", matrix(f"{seed}/down", WIDTH, FEED_FORWARD, writes_back=True)


def dense(writer: gguf.GGUFWriter) -> Iterator[Tensor]:
    """Two layers of full attention (qwen3): its cache can be cut at any token."""
    writer.add_block_count(2)
    for layer in range(2):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", ones(WIDTH)
        yield from attention("dense", block)
        yield f"{block}.ffn_norm.weight", ones(WIDTH)
        yield from feed_forward("dense", block)


def swa(writer: gguf.GGUFWriter) -> Iterator[Tensor]:
    """Six layers (gemma3), the first five of which see a window only: what is behind it can only be restored."""
    writer.add_block_count(6)
    writer.add_sliding_window(SLIDING_WINDOW_TOKENS)
    for layer in range(6):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", ones(WIDTH)
        yield from attention("swa", block)
        # Twelve additions of full weight would drown the constant.
        yield f"{block}.post_attention_norm.weight", ones(WIDTH, 0.3)
        yield f"{block}.ffn_norm.weight", ones(WIDTH)
        yield from feed_forward("swa", block)
        yield f"{block}.post_ffw_norm.weight", ones(WIDTH, 0.3)


def hybrid(writer: gguf.GGUFWriter) -> Iterator[Tensor]:
    """Three recurrent layers and one of attention (qwen3next, as Qwen3-Coder-Next), with experts."""
    experts, state, keys, values, kernel = 4, 32, 1, 2, 4
    writer.add_block_count(4)
    writer.add_rope_dimension_count(HEAD_WIDTH // 4)
    writer.add_full_attention_interval(4)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(EXPERT_FEED_FORWARD)
    writer.add_expert_shared_feed_forward_length(EXPERT_FEED_FORWARD)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(values * state)
    mixed = 2 * keys * state + values * state
    for layer in range(4):
        block = f"blk.{layer}"
        seed = f"hybrid/{block}"
        yield f"{block}.attn_norm.weight", ones(WIDTH)
        if layer == 3:
            yield from attention("hybrid", block, gated=True)
        else:
            yield f"{block}.attn_qkv.weight", matrix(f"{seed}/qkv", mixed, WIDTH)
            yield f"{block}.attn_gate.weight", matrix(f"{seed}/z", values * state, WIDTH)
            yield f"{block}.ssm_conv1d.weight", noise(f"{seed}/conv", mixed, kernel, deviation=0.5)
            yield f"{block}.ssm_ba.weight", matrix(f"{seed}/ba", 2 * values, WIDTH)
            yield f"{block}.ssm_dt.bias", np.full(values, 0.4, dtype=np.float32)
            yield f"{block}.ssm_a", np.full(values, -0.6, dtype=np.float32)
            yield f"{block}.ssm_norm.weight", ones(state)
            yield f"{block}.ssm_out.weight", matrix(f"{seed}/out", WIDTH, values * state, writes_back=True)
        yield f"{block}.post_attention_norm.weight", ones(WIDTH)
        yield f"{block}.ffn_gate_inp.weight", noise(f"{seed}/route", experts, WIDTH, deviation=0.2)
        for part, rows, columns in (
            ("gate", EXPERT_FEED_FORWARD, WIDTH),
            ("up", EXPERT_FEED_FORWARD, WIDTH),
            ("down", WIDTH, EXPERT_FEED_FORWARD),
        ):
            each = [
                matrix(f"{seed}/{part}/{expert}", rows, columns, writes_back=part == "down")
                for expert in range(experts)
            ]
            yield f"{block}.ffn_{part}_exps.weight", np.stack(each)
            yield (
                f"{block}.ffn_{part}_shexp.weight",
                matrix(f"{seed}/{part}/shared", rows, columns, writes_back=part == "down"),
            )
        yield f"{block}.ffn_gate_inp_shexp.weight", noise(f"{seed}/shared", WIDTH, deviation=0.2)


@dataclass(frozen=True, slots=True)
class Model:
    """One file to make."""

    name: str
    architecture: str
    layers: Callable[[gguf.GGUFWriter], Iterator[Tensor]]
    stop_bias: float
    """Weight of the end of the answer against the words: sampled answers end after some dozens of tokens."""
    embedding_scale: float = 1.0

    def make(self, directory: Path, vocabulary: Vocabulary) -> Path:
        """Write the file and give its path."""
        path = directory / f"tiny-{self.name}.gguf"
        writer = gguf.GGUFWriter(str(path), self.architecture)
        writer.add_name(f"tiny {self.name}")
        writer.add_description("noise, to test with")
        writer.add_license("mit")
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        writer.add_context_length(TRAINING_CONTEXT_TOKENS)
        writer.add_vocab_size(len(vocabulary.tokens))
        writer.add_embedding_length(WIDTH)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(1)
        writer.add_head_count_kv(1)
        writer.add_key_length(HEAD_WIDTH)
        writer.add_value_length(HEAD_WIDTH)
        writer.add_rope_freq_base(1e6)
        writer.add_layer_norm_rms_eps(1e-6)
        vocabulary.write(writer)
        for name, values in (*frame(self.name, vocabulary, self.embedding_scale, self.stop_bias), *self.layers(writer)):
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


MODELS = (
    Model("dense", "qwen3", dense, stop_bias=0.52),
    # gemma multiplies embeddings by the root of the width
    Model("swa", "gemma3", swa, stop_bias=0.33, embedding_scale=WIDTH**-0.5),
    Model("hybrid", "qwen3next", hybrid, stop_bias=0.51),
)


def make_models(directory: Path) -> list[Path]:
    """Write all three files into *directory*."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary.learn()
    return [model.make(directory, vocabulary) for model in MODELS]


def main(arguments: list[str]) -> int:
    """Run the command line."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    for path in make_models(Path(arguments[0])):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
