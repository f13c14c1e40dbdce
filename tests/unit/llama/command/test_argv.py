"""The command that starts a llama-server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstack.config.model import Config
from kvstack.config.parse import parse_config
from kvstack.errors import ConfigError, ExitCode, StartFailed
from kvstack.llama.command import reserved_flags
from kvstack.llama.command.argv import Command, child_environment, display_environment, server_argv
from kvstack.llama.command.capabilities import Capabilities, parse_capabilities
from kvstack.llama.command.reserved_flags import effective_arguments, masked

HELP = Path(__file__).parents[3] / "golden" / "help"
VULKAN = "Available devices:\n  Vulkan0: Radeon 8060S (RADV STRIX_HALO) (131584 MiB, 129920 MiB free)\n"
BUILDS = ("b10068", "b11434")


def capabilities_of(build: str, *, devices: str | None = None, has_tls: bool | None = None) -> Capabilities:
    """What a build can do, from its help text."""
    return parse_capabilities("version: 1 (571d0d5)", (HELP / f"{build}.txt").read_text(), devices, has_tls=has_tls)


def without(build: str, *options: str) -> Capabilities:
    """A build whose help text does not have some options."""
    complete = capabilities_of(build)
    kept = tuple(option for option in complete.options if not set(options) & set(option.names))
    return Capabilities(build="b1-old", options=kept)


def config_of(server: str = "", *, model: str = 'model = "m.gguf"') -> Config:
    """A config with some more keys in its server section."""
    return parse_config(f"[server]\n{model}\n{server}\n", Path("/etc/box.toml"), Path("/home/me"))


def command(server: str = "", build: str = "b10068", **arguments: Any) -> Command:
    """The command for a config with some more keys in its server section."""
    return server_argv(config_of(server), capabilities_of(build, **arguments), "/bin/llama-server", "/etc/m.gguf")


def follows(argv: tuple[str, ...], flag: str) -> str:
    """The item behind a flag that must be there once."""
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


@pytest.mark.parametrize("build", BUILDS)
def test_flags_that_are_always_there(build: str) -> None:
    """Address, model, context, layers, slots, prompt cache, metrics and log level are explicit on each build."""
    argv = command(build=build).argv
    assert argv[0] == "/bin/llama-server"
    assert follows(argv, "--host") == "127.0.0.1"
    assert follows(argv, "--port") == "12345"
    assert follows(argv, "-m") == "/etc/m.gguf"
    assert follows(argv, "-ngl") == "99"
    assert follows(argv, "--ctx-size") == "131072"
    assert follows(argv, "--parallel") == "1"
    assert follows(argv, "-lv") == "4"
    assert {"--cache-prompt", "--metrics"} < set(argv)
    assert "--device" not in argv


@pytest.mark.parametrize("build", BUILDS)
def test_every_flag_is_known_to_the_build(build: str) -> None:
    """With all keys set, no flag is passed that the build's help text does not have, and nothing is lost."""
    made = command(
        'threads = 4\nbatch_size = 2048\nubatch_size = 512\nflash_attn = "on"\nno_mmap = true\ncache_type_k = "f16"\n'
        'cache_type_v = "f16"\ncache_ram_mib = 8192\nctx_checkpoints = 32\ncheckpoint_min_step = 8192\nfit = false\n'
        'slot_save_path = "slots"\nparallel = 2\nkv_unified = true\nslot_prompt_similarity = 0.5\n'
        'device = "none"\napi_key = "k"\n'
        'extra_args = ["--no-warmup"]',
        build,
    )
    flags = [item for item in made.argv[1:] if item.startswith("-")]
    assert [flag for flag in flags if flag not in capabilities_of(build).flags] == []
    assert len(set(flags)) == len(flags)
    assert made.notices == ()
    assert made.argv[-1] == "--no-warmup"
    assert follows(made.argv, "--slot-save-path") == "/etc/slots"
    assert follows(made.argv, "--fit") == "off"


@pytest.mark.parametrize(
    ("build", "no_mmap", "expected"),
    [
        ("b10068", "true", ("--no-mmap",)),
        ("b10068", "false", ("--mmap",)),
        ("b11434", "true", ("--load-mode", "none")),
        ("b11434", "false", ("--load-mode", "mmap")),
    ],
)
def test_mapping_has_the_name_that_the_build_uses(build: str, no_mmap: str, expected: tuple[str, ...]) -> None:
    """`no_mmap` becomes --no-mmap on builds to b10798 and --load-mode on later ones."""
    argv = " ".join(command(f"no_mmap = {no_mmap}", build).argv)
    assert f" {' '.join(expected)}" in argv
    assert "mmap" not in command(build=build).argv


def test_checkpoint_spacing_on_an_older_build() -> None:
    """Builds to b9295 name the distance of checkpoints differently."""
    help_text = "--host H\n--port N\n-c, --ctx-size N\n-ngl, --gpu-layers N\n-cpent, --checkpoint-every-n-tokens N\n"
    made = server_argv(config_of("checkpoint_min_step = 4096"), parse_capabilities("", help_text, None), "x", "m")
    assert follows(made.argv, "--checkpoint-every-n-tokens") == "4096"


def test_flash_attention_as_a_switch() -> None:
    """On builds of 2025 -fa is a switch without a value."""
    help_text = "--host H\n--port N\n-c, --ctx-size N\n-ngl, --gpu-layers N\n-fa,   --flash-attn      enable it\n"
    old = parse_capabilities("", help_text, None)
    on = server_argv(config_of('flash_attn = "on"'), old, "x", "m").argv
    assert on[-1] == "--flash-attn"
    off = server_argv(config_of('flash_attn = "off"'), old, "x", "m").argv
    assert "--flash-attn" not in off


def test_missing_flags_are_said() -> None:
    """A setting that the build does not have is left out, and a notice names it."""
    old = without("b10068", "--cache-ram", "--cache-prompt", "--metrics", "-lv")
    made = server_argv(config_of("cache_ram_mib = 4096"), old, "x", "m")
    assert "--cache-ram" not in made.argv
    text = "\n".join(made.notices)
    for name in ("--cache-ram", "--cache-prompt", "--metrics", "-lv"):
        assert f"no {name}" in text


@pytest.mark.parametrize("build", BUILDS)
def test_several_slots_share_one_cache(build: str) -> None:
    """With more than one slot the cache is unified, so that each conversation may use the whole context."""
    made = command("parallel = 4", build)
    assert "--kv-unified" in made.argv
    assert made.notices == ()
    assert "--kv-unified" not in command(build=build).argv


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("", "0.95"),
        ("cache_ram_mib = 2048", "0.95"),
        ("cache_ram_mib = -1", "0.95"),
        ('extra_args = ["-cram", "512"]', "0.95"),
        ("slot_prompt_similarity = 0.3", "0.3"),
        ("slot_prompt_similarity = 0.0", "0.0"),
        ("slot_prompt_similarity = 0.3\nparallel = 2", "0.3"),
        ("slot_prompt_similarity = 0.3\ncache_ram_mib = 0", "0.3"),
        ("parallel = 2", None),
        ("cache_ram_mib = 0", None),
        ('extra_args = ["-cram", "0"]', None),
        ('extra_args = ["--cache_ram", "0"]', None),
        ('env = { LLAMA_ARG_CACHE_RAM = "0" }', None),
    ],
)
def test_how_alike_a_slot_must_be(build: str, server: str, expected: str | None) -> None:
    """One slot and a host prompt cache: kvstack's threshold; otherwise the person's own or llama-server's."""
    argv = command(server, build).argv
    if expected is None:
        assert "--slot-prompt-similarity" not in argv
    else:
        assert follows(argv, "--slot-prompt-similarity") == expected


@pytest.mark.parametrize("flag", ["-sps", "--slot-prompt-similarity", "--slot_prompt_similarity"])
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_threshold_among_the_extra_arguments_wins(flag: str, parallel: int) -> None:
    """It is the only one in the command; beside the key it would be given twice."""
    argv = command(f'parallel = {parallel}\nextra_args = ["{flag}", "0.2"]').argv
    assert argv[-2:] == (flag, "0.2")
    assert not {"-sps", "--slot-prompt-similarity"} & set(argv[:-2])
    with pytest.raises(ConfigError) as caught:
        command(f'slot_prompt_similarity = 0.5\nextra_args = ["{flag}", "0.2"]')
    assert "set server.slot_prompt_similarity instead" in caught.value.problems[0].message


def test_a_build_without_the_threshold() -> None:
    """It is told of a value that it cannot follow; kvstack's own is left out without a word."""
    old = without("b10068", "--slot-prompt-similarity")
    assert server_argv(config_of(), old, "x", "m").notices == ()
    made = server_argv(config_of("slot_prompt_similarity = 0.5"), old, "x", "m")
    assert "0.5" not in made.argv
    assert made.notices == ("This llama-server has no --slot-prompt-similarity: the setting has no effect.",)
    without_cache = without("b10068", "--cache-ram")
    assert "--slot-prompt-similarity" not in server_argv(config_of(), without_cache, "x", "m").argv


def test_split_context_is_said_loudly() -> None:
    """Where slots split the context, by choice or because the build cannot share, the loss is named in tokens."""
    chosen = command("parallel = 4\nkv_unified = false")
    assert "--no-kv-unified" in chosen.argv
    old = server_argv(config_of("parallel = 4"), without("b10068", "--kv-unified"), "x", "m")
    for made in (chosen, old):
        assert [notice for notice in made.notices if "LOSS OF CONTEXT" in notice and "32,768 tokens" in notice]


def test_a_chosen_log_level_wins() -> None:
    """`log_verbosity` replaces the level that kvstack would choose."""
    assert follows(command("log_verbosity = 3").argv, "-lv") == "3"


def test_missing_device_is_refused_with_the_list() -> None:
    """A device that the binary does not list is refused up front, and the message lists those that exist."""
    with pytest.raises(StartFailed) as caught:
        command('device = "Vulkan7"', devices=VULKAN)
    assert caught.value.exit_code == ExitCode.START_FAILED
    assert "Vulkan7" in caught.value.what
    assert "Vulkan0: Radeon 8060S (RADV STRIX_HALO)" in caught.value.fact
    assert "server.device" in caught.value.next_step


@pytest.mark.parametrize("device", ["Vulkan0", "vulkan0", "none"])
def test_known_devices_pass(device: str) -> None:
    """A listed device passes in any case, and so does `none`."""
    assert follows(command(f'device = "{device}"', devices=VULKAN).argv, "--device") == device


def test_no_device_list_decides_nothing() -> None:
    """Where devices could not be listed, llama-server itself decides."""
    assert follows(command('device = "Vulkan0"', devices=None).argv, "--device") == "Vulkan0"
    with pytest.raises(StartFailed, match="no device Vulkan0"):
        command('device = "Vulkan0"', devices="Available devices:\n  (none)\n")


def test_download_needs_tls() -> None:
    """`hf` with a build that surely has no TLS is refused with the reason; else it is passed on."""
    config = config_of(model='hf = "org/repo:Q4_K_M"')
    with pytest.raises(StartFailed, match="cannot download org/repo:Q4_K_M") as caught:
        server_argv(config, capabilities_of("b10068", has_tls=False), "x", None)
    assert "TLS" in caught.value.fact
    argv = server_argv(config, capabilities_of("b10068"), "x", None).argv
    assert follows(argv, "-hf") == "org/repo:Q4_K_M"
    assert "-m" not in argv


def test_other_program_is_refused() -> None:
    """A binary whose help text has no --port is no llama-server."""
    with pytest.raises(StartFailed, match="does not look like a llama-server"):
        server_argv(config_of(), parse_capabilities("", "-m, --model FILE\n", None), "/bin/llama-cli", "m")


REFUSED = [
    ["--no-cache-prompt"],
    ["--no_cache_prompt"],
    ["--cache-prompt"],
    ["-c", "4096"],
    ["--ctx-size", "4096"],
    ["--ctx_size", "4096"],
    ["--ctx-size=4096"],
    ["-np", "4"],
    ["--parallel", "4"],
    ["-kvu"],
    ["--no-kv-unified"],
    ["--host", "0.0.0.0"],
    ["--port", "8080"],
    ["--port=8080"],
    ["-m", "other.gguf"],
    ["--model", "other.gguf"],
    ["-hf", "org/repo"],
    ["--hf_repo", "org/repo"],
    ["--model-url", "https://example.org/m.gguf"],
    ["-ngl", "0"],
    ["--gpu-layers", "0"],
    ["--n_gpu_layers", "0"],
    ["--metrics"],
    ["--no-metrics"],
    ["--no-slots"],
    ["-lv", "1"],
    ["--log_verbosity", "5"],
    ["--verbose"],
    ["-v"],
    ["--log-disable"],
    ["--embeddings"],
    ["--reranking"],
    ["--api-prefix", "/x"],
    ["--api-key", "k"],
    ["--api_key", "k"],
    ["--ssl-key-file", "k.pem"],
    ["--models-dir", "d"],
    ["--reuse-port"],
    ["--help"],
    ["--version"],
    ["--gpt-oss-20b-default"],
    ["--threads", "--no-cache-prompt"],
]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_extra_args_that_undo_are_refused(build: str, arguments: list[str]) -> None:
    """Each spelling of a flag that kvstack relies on is refused, with a reason, before anything is started."""
    with pytest.raises(ConfigError) as caught:
        command(f"extra_args = {arguments!r}", build)
    assert caught.value.exit_code == ExitCode.USAGE
    assert [problem.path for problem in caught.value.problems] == ["server.extra_args"]
    flag = arguments[-1] if arguments[0] == "--threads" else arguments[0].partition("=")[0]
    assert flag.replace("_", "-") in caught.value.problems[0].message


def test_all_problems_are_reported_at_once() -> None:
    """Arguments and variables are judged together."""
    with pytest.raises(ConfigError) as caught:
        command('extra_args = ["--no-slots", "-c", "1"]\nenv = { LLAMA_ARG_N_PARALLEL = "4" }')
    assert [problem.path for problem in caught.value.problems] == [
        "server.extra_args",
        "server.extra_args",
        "server.env.LLAMA_ARG_N_PARALLEL",
    ]
    assert "server.ctx_size" in caught.value.problems[1].message
    assert "server.parallel" in caught.value.problems[2].message


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-warmup"],
        ["--swa-full"],
        ["--threads", "4"],
        ["--device", "none"],
        ["--temp", "-1"],
        ["--seed", "-1", "--no-webui"],
        ["--chat-template-kwargs", '{"a": 1}'],
        ["--reverse-prompt", "-stop"],
        ["--cache-ram", "4096"],
    ],
    ids=" ".join,
)
def test_harmless_extra_args_pass(build: str, arguments: list[str]) -> None:
    """What undoes nothing passes unchanged, at the end of the command."""
    assert command(f"extra_args = {arguments!r}", build).argv[-len(arguments) :] == tuple(arguments)


def test_duplicates_of_set_keys_are_refused() -> None:
    """A flag whose key is set in the config would be given twice."""
    with pytest.raises(ConfigError, match="1 problem") as caught:
        command('cache_ram_mib = 8192\nextra_args = ["-cram", "0"]')
    assert "server.cache_ram_mib" in caught.value.problems[0].message


def test_unknown_flags_are_refused_before_they_kill_the_server() -> None:
    """A flag that the build does not have would end it, so it is refused with what is meant."""
    with pytest.raises(ConfigError) as caught:
        command('extra_args = ["--no-mmap", "--no-warmupp"]', "b11434")
    messages = [problem.message for problem in caught.value.problems]
    assert "it has --load-mode" in messages[0]
    assert "did you mean --no-warmup?" in messages[1]


def test_value_in_one_item_is_refused() -> None:
    """llama-server does not understand --flag=value, whatever the flag."""
    with pytest.raises(ConfigError) as caught:
        command('extra_args = ["--threads-batch=4"]')
    assert "two items" in caught.value.problems[0].message


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("LLAMA_ARG_CTX_SIZE", "ctx_size"),
        ("LLAMA_ARG_PORT", "port"),
        ("LLAMA_ARG_CACHE_PROMPT", ""),
        ("LLAMA_ARG_NO_CACHE_PROMPT", ""),
        ("LLAMA_ARG_ENDPOINT_SLOTS", ""),
        ("LLAMA_ARG_KV_UNIFIED", "kv_unified"),
        ("LLAMA_ARG_EMBEDDINGS", ""),
        ("LLAMA_ARG_LOG_VERBOSITY", "log_verbosity"),
    ],
)
def test_variables_that_undo_are_refused(name: str, key: str) -> None:
    """The environment twin of a guarded flag is refused in [server.env], with the key to use."""
    with pytest.raises(ConfigError) as caught:
        command(f'env = {{ {name} = "0" }}')
    assert caught.value.problems[0].path == f"server.env.{name}"
    assert (f"server.{key}" in caught.value.problems[0].message) if key else True


def test_other_variables_pass() -> None:
    """Variables of drivers, and twins of flags that undo nothing, pass."""
    config = config_of('env = { GGML_VK_VISIBLE_DEVICES = "0", LLAMA_ARG_THREADS_HTTP = "2" }')
    server_argv(config, capabilities_of("b10068"), "x", "m")
    env, notices = child_environment(config, {"PATH": "/bin"})
    assert env == {"PATH": "/bin", "GGML_VK_VISIBLE_DEVICES": "0", "LLAMA_ARG_THREADS_HTTP": "2"}
    assert notices == ()


def test_inherited_flags_are_dropped_with_a_notice() -> None:
    """What a shell exports as llama-server flags is dropped and named, its values are not shown."""
    inherited: Mapping[str, str] = {
        "LLAMA_ARG_N_PARALLEL": "4",
        "LLAMA_API_KEY": "s3cret",
        "HF_TOKEN": "t",
        "HOME": "/",
    }
    env, notices = child_environment(config_of('env = { LLAMA_ARG_THREADS = "2" }'), inherited)
    assert env == {"HF_TOKEN": "t", "HOME": "/", "LLAMA_ARG_THREADS": "2"}
    assert len(notices) == 1
    assert "LLAMA_API_KEY, LLAMA_ARG_N_PARALLEL" in notices[0]
    assert "s3cret" not in notices[0]


@pytest.mark.parametrize(
    "server",
    [
        'extra_args = ["--hf-token", "s3cret"]',
        'extra_args = ["--hf_token", "s3cret"]',
    ],
)
def test_secrets_are_masked_in_the_display_form(server: str) -> None:
    """The key is in the command and not in what people see of it."""
    made = command(server)
    assert "s3cret" in made.argv
    assert "s3cret" not in " ".join(made.display)
    assert "****" in made.display
    assert len(made.display) == len(made.argv)


@pytest.mark.parametrize("build", BUILDS)
def test_the_key_is_in_the_environment_alone(build: str) -> None:
    """Nobody finds it in the list of processes, or in what a program prints of its objects."""
    made = command('api_key = "s3cret"', build)
    assert made.env == {"LLAMA_API_KEY": "s3cret"}
    assert "--api-key" not in made.argv
    assert "s3cret" not in repr(made)
    assert made.notices == ()
    assert command(build=build).env == {}


def test_a_build_without_the_variable_gets_the_key_in_its_command() -> None:
    """The stack works and stays closed; that others can read the key is said, and people are not shown it."""
    capabilities = parse_capabilities("", "--host H\n--port N\n-c, --ctx-size N\n-ngl N\n--api-key KEY\n", None)
    made = server_argv(config_of('api_key = "s3cret"'), capabilities, "x", "m")
    assert made.env == {}
    assert follows(made.argv, "--api-key") == "s3cret"
    assert follows(made.display, "--api-key") == "****"
    assert [notice for notice in made.notices if "every user of this machine" in notice]
    assert "s3cret" not in " ".join(made.notices)


def test_a_key_that_kvstack_does_not_know_is_refused_in_the_variables() -> None:
    """The proxy could ask the server nothing."""
    with pytest.raises(ConfigError) as caught:
        command('env = { LLAMA_API_KEY = "s3cret" }')
    assert caught.value.problems[0].path == "server.env.LLAMA_API_KEY"
    assert "server.api_key" in caught.value.problems[0].message
    assert "s3cret" not in str(caught.value)


def test_masking_reaches_every_form() -> None:
    """Values in the same item, and values that look like a flag, are masked too."""
    assert masked(["x", "--api-key=abc", "--api-key", "--api-key", "-c", "1"]) == (
        "x",
        "--api-key=****",
        "--api-key",
        "****",
        "-c",
        "1",
    )


def test_variables_that_look_secret_are_masked() -> None:
    """[server.env] is shown without the values of keys and tokens."""
    shown = display_environment({"HF_TOKEN": "a", "My_Api_Key": "b", "GGML_VK_VISIBLE_DEVICES": "0"})
    assert shown == {"HF_TOKEN": "****", "My_Api_Key": "****", "GGML_VK_VISIBLE_DEVICES": "0"}


def test_last_of_several_flags_counts() -> None:
    """What a command says in the end is read as llama-server reads it."""
    argv = ["x", "--cache-ram", "0", "-cram", "4096", "--context-shift", "--no-context-shift", "--warmup", "--bad"]
    assert effective_arguments(argv, capabilities_of("b10068")) == {
        "-cram": "4096",
        "--no-context-shift": None,
        "--warmup": None,
    }


def spellings_of_guarded_options(build: str) -> list[str]:
    """Every spelling, as far as the build's help text knows, of every option that is never to be given by hand."""
    capabilities = capabilities_of(build)
    names: set[str] = set()
    for guard in reserved_flags._GUARDS:
        if guard.when == "always":
            for name in guard.names:
                option = capabilities.option(name)
                names.update(option.names if option is not None else (name,))
    variants = {name.replace("-", "_").replace("__", "--", 1) for name in names if name.startswith("--")}
    return sorted(names | variants)


@pytest.mark.parametrize("build", BUILDS)
def test_no_spelling_of_a_guarded_option_passes(build: str) -> None:
    """All aliases of the help text, with dashes and underscores, alone and with a value, are refused on each build."""
    spellings = spellings_of_guarded_options(build)
    assert len(spellings) > 60
    passed = []
    for name in spellings:
        for arguments in ([name], [f"{name}=1"], ["--no-warmup", name, "1"]):
            try:
                command(f"extra_args = {arguments!r}", build)
            except ConfigError:
                continue
            passed.append(arguments)
    assert passed == []


@pytest.mark.parametrize("build", BUILDS)
def test_no_variable_of_a_guarded_option_passes(build: str) -> None:
    """The environment twin of every guarded option, as the build's help text names it, is refused in [server.env]."""
    capabilities = capabilities_of(build)
    options = filter(None, (capabilities.option(name) for name in spellings_of_guarded_options(build)))
    twins = sorted({option.env for option in options if option.env is not None})
    assert len(twins) > 15
    passed = []
    for twin in twins:
        try:
            command(f'env = {{ {twin} = "0" }}', build)
        except ConfigError:
            continue
        passed.append(twin)
    assert passed == []


@pytest.mark.parametrize("build", BUILDS)
def test_snapshots_have_the_directory_that_the_config_names_or_ours(build: str) -> None:
    """One flag, whoever chose it."""

    def made(server: str) -> tuple[str, ...]:
        config, capabilities = config_of(server), capabilities_of(build)
        return server_argv(config, capabilities, "/bin/llama-server", "/etc/m.gguf", snapshot_dir="/cache").argv

    assert follows(made(""), "--slot-save-path") == "/cache"
    assert follows(made('slot_save_path = "slots"'), "--slot-save-path") == "/etc/slots"
    assert "--slot-save-path" not in command(build=build).argv
    with pytest.raises(ConfigError, match=r"--slot-save-path would take .* set server.slot_save_path"):
        made('extra_args = ["--slot-save-path", "/x"]')
