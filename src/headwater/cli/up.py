"""`headwater up`: a router and its instances on this machine, started and stopped together.

Every instance is a `headwater serve` process; flags after `--` are passed to each of them. When
one dies, its exit is printed and the others continue. When the last one has died, the router
ends too. When this command itself dies, its children end (`launch.parent_watch`).
"""

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from headwater.cli.security import TLS_FLAGS, add_tls_flags, tls_of
from headwater.errors import ConfigError, EngineDead
from headwater.launch.hub import find_model
from headwater.launch.parent_watch import VARIABLE, watch_parent

_ABOUT = """\
Start a whole cluster on this machine: a router and instances that register at it. Flags of
`headwater serve` may follow after `--`.

  headwater up --mixed 2
  headwater up --prefill 1 --decode 2 --model ./Llama-3.2-1B -- --max-model-len 8192
  headwater up --prefill 2 --decode 2 --model ./Llama-3.1-8B --gpus 0,1,2,3
"""

_READY = re.compile(r"is ready at (https?://\S+)")
_STOP_TIMEOUT_S = 60.0


def add_up(commands: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """The flags of the command."""
    parser: ArgumentParser = commands.add_parser(
        "up",
        usage="headwater up [--mixed N | --prefill N --decode N] [flags] [-- serve flags]",
        description=_ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="model directory or Hugging Face name (default: built in)",
    )
    for role, what in (
        ("mixed", "instances that do everything"),
        ("prefill", "instances that compute prompts"),
        ("decode", "instances that generate"),
    ):
        parser.add_argument(f"--{role}", type=int, metavar="N", default=0, help=what)
    parser.add_argument(
        "--gpus", metavar="N,N,…", help="a GPU for each instance, in the order above, by number"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address of the router")
    parser.add_argument("--port", type=int, default=8100, help="port of the router")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="key that clients must carry, for router and instances (or HEADWATER_API_KEY)",
    )
    parser.add_argument(
        "--instance-ports",
        metavar="FIRST[-LAST]",
        help="ports of the instances, counted up from FIRST (default: any free ports)",
    )
    parser.add_argument("--policy", metavar="NAME", default="cache_aware", help="see route")
    add_tls_flags(parser)
    parser.add_argument("serve_flags", nargs="*", metavar="-- FLAGS", help="of each instance")
    parser.set_defaults(flags=[flag for a in parser._actions for flag in a.option_strings])


class Child:
    """One process of the cluster, its lines passed on with its name."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        notes: "SimpleQueue[Note]",
        gpu: str | None = None,
        lifeline: int | None = None,
    ) -> None:
        """The child sees only the GPU `gpu`. It ends when the pipe `lifeline` ends."""
        own = {} if lifeline is None else {VARIABLE: str(lifeline)}
        self.name = name
        self.url = ""
        self._notes = notes
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | own | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
            pass_fds=() if lifeline is None else (lifeline,),
            start_new_session=True,  # a terminal's Ctrl-C is for this command, which stops all
        )
        threading.Thread(target=self._read, name=name, daemon=True).start()

    def _read(self) -> None:
        """Until it ends: its address, its complaints, its exit code."""
        assert self.process.stdout is not None, "asked for a pipe"
        with self.process.stdout as lines:
            for line in lines:
                if found := _READY.search(line):
                    self.url = found.group(1)
                    self._notes.put((self, "ready"))
                elif " WARNING " in line or " ERROR " in line or "error:" in line:
                    self._notes.put((self, line.rstrip()))
        self._notes.put((self, ""))

    def stop(self) -> None:
        """Tell it to drain and end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Its exit code; one that does not end is ended."""
        try:
            return self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


Note = tuple[Child | None, str]
"""A child and its message: `ready`, a log line, or an empty one at its end. Without a child:
this command must stop."""


def run_up(options: Namespace) -> int:
    """Run the cluster until stopped; the exit code."""
    roles = {role: getattr(options, role) for role in ("mixed", "prefill", "decode")}
    _check(roles)
    tls_of(options)  # half of the files, or wrong ones, are reported before anything starts
    gpus = _gpus(options, sum(roles.values()))
    ports = _ports(options, sum(roles.values()))
    if "--revision" not in options.serve_flags:
        find_model(options.model)  # downloaded once, and not by every instance
    notes: SimpleQueue[Note] = SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: notes.put((None, "")))
    watch_parent(os.environ)
    # Children share the secret without its being on a command line.
    os.environ.setdefault("HEADWATER_PEER_TOKEN", secrets.token_hex(16))
    if options.api_key is not None:
        os.environ["HEADWATER_API_KEY"] = options.api_key
    with TokenFile(os.environ["HEADWATER_PEER_TOKEN"]) as token:
        cluster = _Cluster(notes, token.path)
        try:
            return cluster.run(options, roles, list(zip(gpus, ports, strict=True)))
        finally:
            cluster.stop()


class TokenFile:
    """The cluster's secret in a file that only this user reads, for instances started by hand."""

    def __init__(self, token: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headwater-up-")  # mode 0700
        self.path = Path(self._folder.name) / "peer-token"
        self.path.write_text(token + "\n", encoding="ascii")
        self.path.chmod(0o600)

    def __enter__(self) -> "TokenFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()


class _Cluster:
    """The children, the router first."""

    def __init__(self, notes: "SimpleQueue[Note]", token_file: Path) -> None:
        self._notes = notes
        self._token_file = token_file
        self._children: list[Child] = []
        # Never written to: when this process dies, its end closes and the children end too.
        self._lifeline, self._held = os.pipe()

    def run(
        self,
        options: Namespace,
        roles: dict[str, int],
        places: Sequence[tuple[str | None, int]],
    ) -> int:
        """`places` has the GPU and the port of each instance."""
        place = ["--host", options.host, "--port", str(options.port)]
        flags = [*place, "--policy", options.policy, *_tls_arguments(options)]
        router = self._start("router", ["route", *flags])
        if not self._until_ready([router]):
            return 0
        names = [f"{role}-{n}" for role, count in roles.items() for n in range(1, count + 1)]
        _say(f"router ready at {router.url}; loading {len(names)} instances")
        instances = [
            self._start(name, _serve_arguments(name, options, router.url, port), gpu)
            for name, (gpu, port) in zip(names, places, strict=True)
        ]
        if not self._until_ready(instances):
            return 0
        again = _serve_arguments(
            "mixed" if roles["mixed"] else "decode", options, router.url, 0
        )
        again += ["--peer-token-file", str(self._token_file)]
        _say(_banner(router, instances, ["headwater", *again], options.ssl_ca_certs))
        return self._watch(router)

    def stop(self) -> None:
        """Instances first, so that the router sees them leave; then the router."""
        for child in self._children[1:]:
            child.stop()
        for child in self._children[1:]:
            child.wait()
        for child in self._children[:1]:
            child.stop()
            child.wait()

    def _start(self, name: str, arguments: Sequence[str], gpu: str | None = None) -> Child:
        child = Child(name, arguments, self._notes, gpu, self._lifeline)
        self._children.append(child)
        return child

    def _until_ready(self, children: Sequence[Child]) -> bool:
        """Wait until all are ready; False when stopped. Raises EngineDead when one dies first."""
        while not all(child.url for child in children):
            child, line = self._notes.get()
            if child is None:
                return False
            if not line:
                raise EngineDead(f"{child.name} ended with {child.wait()} before it was ready")
            if line != "ready":
                _say(f"{child.name}: {line}")
        return True

    def _watch(self, router: Child) -> int:
        """Run until stopped, or until no process is left."""
        while True:
            child, line = self._notes.get()
            if child is None:
                _say("stopping")
                return 0
            if line and line != "ready":
                _say(f"{child.name}: {line}")
            if line:
                continue
            _say(f"{child.name} ended with {_how(child.wait())}")
            left = [other for other in self._children if other.process.poll() is None]
            if child is router or left == [router]:
                raise EngineDead(
                    f"{child.name} ended, so the cluster ends; see its last lines above"
                )


def _check(roles: dict[str, int]) -> None:
    if min(roles.values()) < 0 or not sum(roles.values()):
        raise ConfigError("say how many instances: --mixed N, or --prefill N --decode N")
    if bool(roles["prefill"]) and not roles["decode"]:
        raise ConfigError("--prefill instances need --decode instances to hand over to")


def _gpus(options: Namespace, num_instances: int) -> list[str | None]:
    """The GPU of each instance; None where none are named."""
    if options.gpus is None:
        return [None] * num_instances
    gpus: list[str | None] = list(options.gpus.split(","))
    if len(gpus) != num_instances or not all(gpu and gpu.isdigit() for gpu in gpus):
        raise ConfigError(
            f"--gpus {options.gpus}: {num_instances} instances need as many numbers, with commas "
            "between; one GPU may be named twice if --gpu-memory-utilization leaves room"
        )
    if any(flag.partition("=")[0] == "--device" for flag in options.serve_flags):
        raise ConfigError("--gpus and --device both say where instances run: leave one out")
    return gpus


def _ports(options: Namespace, num_instances: int) -> list[int]:
    """The port of each instance; 0 takes a free one."""
    if options.instance_ports is None:
        return [0] * num_instances
    first, dash, last = options.instance_ports.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise ConfigError(
            f"--instance-ports {options.instance_ports}: give one port, as 8200, or a range, as "
            "8200-8210"
        )
    ports = list(range(int(first), int(first) + num_instances))
    if ports[-1] > (int(last) if dash else 65535) or not ports[0]:
        raise ConfigError(
            f"--instance-ports {options.instance_ports} has no room for {num_instances} instances"
        )
    return ports


def _serve_arguments(name: str, options: Namespace, router: str, port: int) -> list[str]:
    role = name.partition("-")[0]
    model = [] if options.model is None else [options.model]
    place = ["--port", str(port), "--router", router, "--splitwise-role", role]
    device = [] if options.gpus is None else ["--device", "cuda"]
    return ["serve", *model, *place, *device, *_tls_arguments(options), *options.serve_flags]


def _tls_arguments(options: Namespace) -> list[str]:
    """The TLS flags for each child: they may all use one certificate, because names are not
    compared inside a cluster."""
    files = {name: getattr(options, name) for name in TLS_FLAGS}
    return [
        word
        for name, path in files.items()
        if path is not None
        for word in (f"--{name.replace('_', '-')}", path)
    ]


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _banner(
    router: Child, instances: Sequence[Child], again: Sequence[str], ca_certs: str | None
) -> str:
    curl = "curl" if ca_certs is None else f"curl --cacert {shlex.quote(ca_certs)}"
    width = max(len(child.name) for child in (router, *instances))
    lines = "".join(
        f"\n  {child.name:<{width}}  {child.url}  pid {child.process.pid}"
        for child in (router, *instances)
    )
    return f"""\
Headwater cluster is ready at {router.url}{lines}
try:
  {curl} {router.url}/v1/chat/completions -d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}'
  {curl} {router.url}/instances
  headwater top {router.url}
add or replace an instance:
  {shlex.join(again)}
stop with Ctrl-C"""


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
