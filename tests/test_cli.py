"""The command line: helpful texts, suggestions for errors, no heavy imports before they are
needed."""

import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headwater import __version__, bench
from headwater.cli import main
from headwater.cli.foreign_flags import FOREIGN_FLAGS
from headwater.cli.idle_flags import idle_settings
from headwater.cli.parser import build_parser
from headwater.cli.security import commands_to_try
from headwater.cli.serve import engine_config, server_config
from headwater.config import EngineConfig, KvEventsConfig
from headwater.errors import ConfigError
from headwater.server.config import LimitsConfig, ServerConfig


def parse(*flags):
    return build_parser().parse_args(["serve", *flags])


@pytest.mark.slow
def test_the_command_imports_no_torch_and_no_server_library():
    """`headwater --help` is quick: neither model nor server is imported for it."""
    script = (
        "import sys\n"
        "from headwater.cli import main\n"
        "main(['version'])\n"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'zmq', 'msgspec', 'rich'}\n"
        "assert heavy.isdisjoint(sys.modules), heavy & set(sys.modules)\n"
    )

    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)

    assert found.stdout.decode() == f"headwater {__version__}\n"


def test_without_a_command_it_says_what_there_is(capsys):
    """`headwater` alone, which a new user types first, lists the commands."""
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in ("serve", "demo", "bench", "version"):
        assert command in out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serv"], "did you mean 'serve'?"),
        (
            ["banana"],
            "known: bench, certs, check, demo, doctor, down, drain, logs, plan, replay",
        ),
        (["serve", "--max-num-seq", "3"], "did you mean '--max-num-seqs'?"),
        (["serve", "--prot=3"], "did you mean '--port'?"),
        (["serve", "--completely-else"], "see --help"),
        (["bench", "nonsense"], "unknown benchmark 'nonsense'"),
        (["bench", "serv"], "did you mean 'serve'?"),
        (["route", "--polisy", "x"], "did you mean '--policy'?"),
        (["up", "--mixd", "3"], "did you mean '--mixed'?"),
        (["top", "--intervall", "1"], "did you mean '--interval'?"),
        (["demo", "--halp"], "did you mean '--help'?"),
        (["version", "--vershon"], "did you mean '--version'?"),
        (["storage", "ls", "folder", "--jsn"], "did you mean '--json'?"),
        (["replay", "trace.jsonl", "--jsn"], "did you mean '--json'?"),
        (["plan", "trace.jsonl", "--jsn"], "did you mean '--json'?"),
    ],
)
def test_an_unknown_command_gets_a_suggestion(arguments, hint, capsys):
    """A typing error gets a suggestion and exit code 2."""
    assert main(arguments) == 2
    assert hint in capsys.readouterr().err


BENCHMARKS = sorted(
    entry.name for entry in pkgutil.iter_modules(bench.__path__) if entry.name[0] != "_"
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_suggests_a_flag_too(name, capsys):
    """A flag with a typing error gets a suggestion; nothing is measured."""
    with pytest.raises(SystemExit, match="2"):
        main(["bench", name, "--jsom"])

    assert "unknown flag '--jsom'; did you mean '--json'?" in capsys.readouterr().err


def test_every_flag_has_its_default_in_one_place():
    """The command line without flags gives the default settings."""
    options = parse()

    assert engine_config(options) == EngineConfig()
    assert server_config(options) == ServerConfig()


def test_flags_reach_the_settings():
    """Known spellings of flags and their aliases reach the settings."""
    options = parse(
        "folder",
        *("--port", "0", "--block-size", "32", "--max-model-len", "1000", "--threads", "2"),
        *("--max-num-seqs", "9", "--max-num-batched-tokens", "99", "--api-key", "k"),
        *("--num-gpu-blocks-override", "7", "--no-enable-prefix-caching"),
        *(
            "--scheduling-policy",
            "priority",
            "--max-queued-requests",
            "5",
            "--max-body-mib",
            "1",
        ),
    )

    engine, server = engine_config(options), server_config(options)

    assert engine == EngineConfig(
        model="folder",
        block_tokens=32,
        max_model_len=1000,
        num_threads=2,
        max_num_seqs=9,
        max_batched_tokens=99,
        num_blocks_override=7,
        prefix_caching=False,
        scheduling_policy="priority",
    )
    assert server == ServerConfig(
        port=0, api_key="k", limits=LimitsConfig(max_queued=5, max_body_bytes=1 << 20)
    )


def test_kv_events_are_settings_in_json():
    """The settings have the names that users of routers know; unknown names and invalid values
    are errors."""
    config = engine_config(parse("--kv-events-config", '{"topic": "kv", "buffer_steps": 5}'))

    assert config.kv_events == KvEventsConfig(topic="kv", buffer_steps=5)
    assert engine_config(parse()).kv_events is None
    for text, word in [
        ('{"tpoic": 1}', "did you mean 'topic'"),
        ('{"hwm": 0}', "at least 1"),
        ('{"hwm": "x"}', "Expected `int`"),
        ("[]", "JSON object"),
        ("{", "not JSON"),
    ]:
        with pytest.raises(ConfigError, match=word):
            engine_config(parse("--kv-events-config", text))


def test_values_that_ask_for_nothing_are_accepted():
    """Scripts that spell out the defaults still work."""
    flags = ("--swap-space", "0", "--splitwise-role", "mixed", "--tensor-parallel-size", "1")

    assert engine_config(parse(*flags)).tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("flags", "settings", "word"),
    [
        (["--gpu-memory-utilization"], {"num_blocks_override": 3}, "--num-gpu-blocks-override"),
        (["--enable-output-caching"], {"prefix_caching": False}, "prefix caching is off"),
        (["--write-policy"], {}, "no host tier"),
        (["--no-save-preempted"], {}, "no host tier"),
        (["--load-policy"], {}, "no host tier"),
        (["--swap-space"], {"swap_space_gib": 1.0, "prefix_caching": False}, "caching is off"),
        (
            ["--swap-space"],
            {"swap_space_gib": 1.0, "write_policy": "none", "save_preempted": False},
            "nothing that would fill",
        ),
        (
            ["--load-timeout"],
            {"swap_space_gib": 1.0, "load_policy": "wait"},
            "has no timeout",
        ),
        (["--cache-transfer-protocol"], {}, "no hand-offs"),
    ],
)
def test_a_flag_without_effect_prints_a_note(flags, settings, word):
    """Lesson 34: the note comes at start, with the reason, and only for a given flag."""
    config = EngineConfig(**settings)

    (sentence,) = idle_settings(config, frozenset(flags))

    assert sentence.startswith(f"{flags[0]} does nothing here")
    assert word in sentence
    assert idle_settings(config, frozenset()) == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--block-size", "0"], "--block-size must be at least 1"),
        (["--max-num-seqs", "-1"], "--max-num-seqs must be at least 1"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--threads", "0"], "--threads"),
        (["--gpu-memory-utilization", "1.5"], "above 0 and at most 1"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "cannot hold one token"),
        (["--port", "70000"], "--port"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", "a b"], "printable ASCII"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
        (["--max-queued-requests", "-1"], "--max-queued-requests"),
        (["--max-body-mib", "0"], "--max-body-mib"),
    ],
)
def test_impossible_settings_are_refused_by_their_flag(flags, sentence, capsys):
    """Nothing is started; there is a message that names the flag, and the exit code is 1."""
    assert main(["serve", *flags]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("a.b", False),
    ],
)
def test_loopback_is_recognised(host, expected):
    """Lesson 66: the default binds to loopback; every other address counts as open."""
    assert ServerConfig(host=host).is_loopback is expected
    assert ServerConfig().is_loopback


def test_the_key_may_come_from_the_environment(monkeypatch):
    """A key on a command line can be read by every user of the machine."""
    monkeypatch.setenv("HEADWATER_API_KEY", "secret")

    assert server_config(parse()).api_key == "secret"
    assert server_config(parse("--api-key", "other")).api_key == "other"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "many"])
@pytest.mark.parametrize(
    "flag", ["--drain-timeout", "--max-body-mib", "--gpu-memory-utilization"]
)
def test_a_number_flag_refuses_nan_and_infinity(flag, value, capsys):
    """Python accepts `nan` as a number; operators do not mean it."""
    with pytest.raises(SystemExit, match="2"):
        main(["serve", f"{flag}={value}"])
    assert flag in capsys.readouterr().err


def test_the_version_can_be_asked_for_either_way(capsys):
    """`headwater version` and `headwater --version` say the same."""
    assert main(["version"]) == 0
    printed = capsys.readouterr().out

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == printed == f"headwater {__version__}\n"


def test_the_version_is_that_of_the_package():
    """There is one number: packages are built with the version in config.py, which the program
    prints."""
    root = Path(__file__).parent.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    place = settings["tool"]["hatch"]["version"]

    assert settings["project"]["dynamic"] == ["version"]
    found = re.search(place["pattern"], (root / place["path"]).read_text(), re.MULTILINE)
    assert found is not None
    assert found["version"] == __version__


def test_tier_flags_become_settings():
    """Every spelling of the host tier's flag, and a backend's settings as JSON, become
    settings."""
    options = parse(
        *("--kv-offloading-size", "2.5", "--write-policy", "write_back", "--no-save-preempted"),
        *("--load-policy", "deadline", "--load-timeout", "0.5"),
        *("--kvcache-storage-backend", "file", "--kvcache-storage-config", '{"path": "/x"}'),
    )

    assert engine_config(options) == EngineConfig(
        swap_space_gib=2.5,
        write_policy="write_back",
        save_preempted=False,
        load_policy="deadline",
        load_timeout_s=0.5,
        storage_backend="file",
        storage_config={"path": "/x"},
    )


STORED = ["--swap-space", "1", "--kvcache-storage-backend", "file"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--swap-space", "-1"], "--swap-space must be a size"),
        (["--swap-space", "0", "--kvcache-storage-backend", "file"], "needs a host tier"),
        (
            ["--swap-space", "1", "--kvcache-storage-config", '{"a": 1}'],
            "needs --kvcache-storage-backend",
        ),
        ([*STORED, "--kvcache-storage-config", "{"], "is not JSON"),
        ([*STORED, "--kvcache-storage-config", "[]"], "must be a JSON object"),
        (["--swap-space", "1", "--load-timeout", "-1"], "cannot be negative"),
    ],
)
def test_impossible_tiers_are_refused(flags, sentence):
    """Impossible tiers are refused before anything is loaded, with a message to act on."""
    with pytest.raises(ConfigError, match=sentence):
        engine_config(parse(*flags))


@pytest.mark.parametrize("flag", sorted(FOREIGN_FLAGS))
def test_a_flag_of_another_server_gets_a_message(flag, capsys):
    """The message does not suggest a similar name: it says what the flag would do here, or
    which flag does it."""
    assert main(["serve", flag, "value"]) == 2
    assert f"{flag}: {FOREIGN_FLAGS[flag]}" in capsys.readouterr().err


def test_a_flag_that_is_explained_is_not_one_of_ours_and_names_only_ours():
    """The messages stay true when flags are added or renamed."""
    ours = set(parse().flags)
    named = {
        word
        for sentence in FOREIGN_FLAGS.values()
        for word in re.findall(r"--[a-z-]+", sentence)
    }

    assert not ours & set(FOREIGN_FLAGS)
    assert named - ours == {"--mixed"}  # of `headwater up`


def test_bench_help_has_a_line_for_each_benchmark(capsys):
    """A user who does not know the names can choose one."""
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    for name in BENCHMARKS:
        assert re.search(rf"^  {name} +\w.{{20,}}$", out, re.MULTILINE), name


@pytest.mark.parametrize("words", [["storage", "verify"], ["demo"], ["status"]])
def test_help_begins_with_the_command_to_type_and_says_what_it_does(words, capsys):
    """The usage line has the command and no placeholder; a sentence follows it."""
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    usage, _, sentence = capsys.readouterr().out.partition("\n\n")

    assert usage.startswith(f"usage: headwater {' '.join(words)} [-h]")
    assert re.match(r"[A-Z].*\.$", sentence.partition("\n\n")[0], re.DOTALL)


def test_a_closed_pipe_prints_no_traceback():
    """`headwater … | head` ends silently when its reader has gone."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headwater", "version"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate()

    assert process.returncode == 0
    assert errors == b""


@pytest.mark.parametrize("missing", ["torch", "msgspec"])
def test_the_library_without_extras_says_what_to_install(missing):
    """`headwater.LLM()` names the package and the extra, whichever package is missing."""
    script = f"import sys\nsys.modules[{missing!r}] = None\nimport headwater\nheadwater.LLM()"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert f"needs the package '{missing}'" in found.stderr
    assert "pip install 'headwater[engine]'" in found.stderr


def test_the_commands_to_try_have_the_flags_that_the_server_needs():
    """The key comes from the variable that every client reads; what the reader has to supply is
    said above the commands."""
    plain = commands_to_try("http://here", needs_key=False, ca_certs=None)
    closed = commands_to_try("https://here", needs_key=True, ca_certs=None)
    wanted = (
        "your CA's certificate for CA.pem and an API key of this server in HEADWATER_API_KEY"
    )
    own_ca = commands_to_try("https://here", needs_key=False, ca_certs="my ca.pem")

    assert plain == ("curl", "headwater top http://here", "try:")
    assert closed == (
        'curl --cacert CA.pem -H "Authorization: Bearer $HEADWATER_API_KEY"',
        "headwater top https://here --ssl-ca-certs CA.pem",
        f"try, with {wanted}:",
    )
    assert own_ca[0] == "curl --cacert 'my ca.pem'"
    assert own_ca[2] == "try:"
