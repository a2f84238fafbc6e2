"""The cluster file: what it accepts and refuses, and its command lines."""

import json
from pathlib import Path

import pytest

from headwater.cli import main
from headwater.cluster.processes import flag_words, instance_process, router_processes
from headwater.cluster.spec import FlagValue, read_spec, schema
from headwater.errors import ConfigError

ROOT = Path(__file__).parents[2]

FILE = """
name: prod
model: ./model
roles:
  prefill: {count: 1, flags: {max-num-batched-tokens: 8192}}
  decode: {count: 2}
flags: {max-model-len: 4096, save-preempted: false, exit-with-engine: true}
storage: {backend: file, config: {path: /srv/kv}}
link: tcp
routers: {count: 2, port: 8100, policy: least_load}
api_keys_file: /etc/keys.json
tls: {certfile: c.pem, keyfile: k.pem, ca_certs: ca.pem}
"""

SPREAD = "the node with the fewest instances first, if it has room"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    return path


def test_a_file_becomes_command_lines(path):
    """Flags of the cluster, the role, storage, links, keys and TLS are all passed on."""
    spec = read_spec(path)
    first, second = router_processes(spec)
    instance = instance_process(spec, "prefill", 1, routers=["https://r1", "https://r2"])
    words = " ".join(instance.arguments)

    assert (first.name, second.name) == ("router", "router-2")
    assert "--port 8101" in " ".join(second.arguments)
    assert words.startswith("serve ./model --router https://r1 --router https://r2")
    for part in (
        "--splitwise-role prefill",
        "--instance-name prefill-1",
        "--max-num-batched-tokens 8192",
        "--max-model-len 4096",
        "--no-save-preempted",
        "--exit-with-engine",
        "--kvcache-storage-backend file",
        "--cache-transfer-protocol tcp",
        "--api-keys-file /etc/keys.json",
        "--ssl-ca-certs ca.pem",
    ):
        assert part in words
    assert json.loads(words.split("--kvcache-storage-config ")[1].split(" --")[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("roles: {}", "no instance"),
        ("roles: {prefill: {count: 1}}", "need decode"),
        ("roles: {mixed: {count: -1}}", "`int` >= 0"),
        ("roles: {mixed: {cont: 1}}", "cont"),
        ("roles: {boss: {count: 1}}", "Invalid enum value 'boss'"),
        ("role: {mixed: {count: 1}}", "role"),
        ("roles: {mixed: {count: 1}}\nname: Bad Name", "name"),
        ("roles: {mixed: {count: 2}}\ngpus_per_instance: 2", "tensor_parallel_size is 1"),
        ("roles: {mixed: {count: 2}}\ngpus_per_instance: 1\ngpus: [0]", "more than the 1 GPUs"),
        ("roles: [", "is not YAML"),
        ("- a list", "Expected `object`"),
    ],
)
def test_mistakes_name_the_field(tmp_path, text, message):
    """The message says what is wrong and where."""
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cluster|instances|gpus") as error:
        read_spec(path)
    assert message in str(error.value)


def test_a_dry_run_prints_every_command_line_and_refuses_unknown_flags(path, capsys):
    """The real parser reads each command line; nothing is started."""
    assert main(["up", "-f", str(path), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *("router", "router-2", "prefill-1", "decode-1", "decode-2")
    ]

    path.write_text(FILE.replace("max-model-len", "max-modle-len"))
    assert main(["up", "-f", str(path), "--dry-run"]) == 1
    assert "--max-modle-len" in capsys.readouterr().err


def test_a_dry_run_for_ray_says_what_each_instance_asks_for(tmp_path, capsys):
    """The command needs no Ray. All ranks of an instance are one request."""
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "roles: {prefill: {count: 1}, decode: {count: 1}}\n"
        "gpus_per_instance: 2\ntensor_parallel_size: 2\n"
        "ray: {cpus_per_instance: 8, prefill_near_decode: true}\n"
    )
    assert main(["up", "-f", str(path), "--dry-run", "--ray"]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        "prefill-1 asks for 8 CPUs and 2 GPUs on one node",
        "decode-1 asks for 8 CPUs and 2 GPUs on one node",
        f"placement: decode instances on nodes with prefill instances; else {SPREAD}",
    ]


def test_the_schema_in_the_project_is_the_one_of_the_code(capsys):
    """`headwater up --schema > deploy/cluster.schema.json` updates the file."""
    assert main(["up", "--schema"]) == 0
    assert capsys.readouterr().out.encode() == schema()
    assert (ROOT / "deploy/cluster.schema.json").read_bytes() == schema()


def test_example_files_of_the_project_are_valid(capsys):
    """Each file can be started unchanged."""
    examples = sorted((ROOT / "deploy/clusters").glob("*.yaml"))
    assert examples
    for example in examples:
        assert main(["up", "-f", str(example), "--dry-run"]) == 0, example
    capsys.readouterr()


def test_values_become_command_line_flags():
    """Switches have no value; objects are JSON; lists have commas."""
    flags: dict[str, FlagValue] = {
        "a": True,
        "b_c": False,
        "d": {"e": 1},
        "f": [1, 2],
        "g": 0.5,
    }
    assert flag_words(flags) == [
        *("--a", "--no-b-c", "--d", '{"e": 1}', "--f", "1,2", "--g", "0.5")
    ]
