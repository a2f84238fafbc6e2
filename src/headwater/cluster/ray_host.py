"""Runs instances on nodes of a Ray cluster: one placement group and one actor for each instance,
with `headwater serve` as its child.

Ray only places and watches the processes. Tokens and KV blocks never pass through Ray. An
instance that is started again keeps its group, so that no other job takes its place. When a node
is lost, its actors are gone; the supervisor then starts their instances again, in new groups on
other nodes. Groups and actors belong to this process: Ray removes them when it ends, however it
ends.
"""

import importlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from headwater.cluster.host import (
    LogFile,
    ProcessEvent,
    RunningProcess,
    Tell,
    exit_text,
    read_events,
)
from headwater.cluster.placement import (
    Placed,
    RayNode,
    choose_node,
    resources_of,
    why_it_waits,
)
from headwater.cluster.processes import ProcessSpec
from headwater.cluster.ray_node import NodeProcess
from headwater.cluster.spec import RaySpec
from headwater.errors import ConfigError, EngineDead

Actor: TypeAlias = Any
"""A handle of a Ray actor."""

Group: TypeAlias = Any
"""A handle of a placement group."""

_POLL_S = 0.5
_PLACE_S = 1
_MAX_QUIET_WAITS = 5
"""An instance that has no node after this many waits of `_PLACE_S` is reported as waiting."""

_CLOSE_S = 5.0
"""Longest time to wait at the end until the groups are removed. Only Ray's head can remove
them."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_NO_NEW_CLUSTER = "RAY_ENABLE_AUTO_CONNECT"
"""Environment variable: with "0", a call of Ray never starts a cluster by itself."""

_SHARED = ("HEADWATER_PEER_TOKEN", "HEADWATER_API_KEY", "OMP_NUM_THREADS", "PYTHONPATH")
"""Environment variables that instances get from this process."""


def _ray() -> Any:  # noqa: ANN401 -- a module that may be missing
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as exc:
        raise ConfigError("--ray needs Ray: pip install 'headwater[ray]'") from exc


class RayProcess:
    """An instance on some node, seen from the supervisor.

    A thread reserves its placement group, starts its actor there and watches it. Every call that
    needs Ray's head is made in a thread, because without a head such a call does not return.
    """

    def __init__(
        self,
        host: "RayHost",
        process: ProcessSpec,
        run: int,
        tell: Tell,
        *,
        turn: threading.Event,
        next_turn: threading.Event,
    ) -> None:
        """The thread waits for `turn`, reserves the place, and sets `next_turn`."""
        self._host, self._process, self._run, self._tell = host, process, run, tell
        self._turn, self._next_turn = turn, next_turn
        self._log = LogFile(host.logs / f"{process.name}.log")
        self.place = "being placed"
        self._actor: Actor | None = None
        self._lock = threading.Lock()
        """Held while `_actor` or `_ended` changes, so that a stop is not lost."""

        self._ended = threading.Event()
        host.run_thread(self._watch)

    def stop(self) -> None:
        with self._lock:
            if self._actor is not None:
                self._actor.send_signal.remote(int(signal.SIGTERM))
                return
        self._end("no start")

    def kill(self) -> None:
        self._end("signal 9")

    def _end(self, how: str) -> None:
        """Report the end, once. The thread gives up when it notices."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        name = self._process.name
        self._tell(ProcessEvent(name, self._run, is_exit=True, exit_text=how))

    def _watch(self) -> None:
        """Reserve, start, and watch until the process, its actor or its node has ended."""
        actor: Actor | None = None
        try:
            group = self._reserve()
            if self._ended.is_set():
                self._host.release(self._process.name)
            elif self._wait_for_place(group):
                actor = self._host.start_actor(self._process, group)
                self._follow(actor)
        except Exception as exc:  # noqa: BLE001 -- whatever it was, the start has failed
            self._log.write(f"{type(exc).__name__}: {exc}\n")
            if not self._ended.is_set():
                self._host.release(self._process.name)  # it is placed anew
            self._end("no place" if actor is None else "the loss of its node")
        if actor is not None:
            _ray().kill(actor)

    def _reserve(self) -> Group:
        """Reserve a place, when all processes that were started earlier have reserved theirs."""
        self._turn.wait()
        try:
            return self._host.reserve(self._process, self._run)
        finally:
            self._next_turn.set()

    def _wait_for_place(self, group: Group) -> bool:
        """Whether the group has a node; False when the start was cancelled. An operator learns
        what is missing."""
        why = ""
        for num_waits in count():
            if group.wait(_PLACE_S):
                break
            if self._ended.is_set():
                return False
            if num_waits == _MAX_QUIET_WAITS:
                why = self._host.why_it_waits(self._process)
            elif num_waits == _MAX_QUIET_WAITS + 1:
                self.place = "waits for room"
                self._tell(ProcessEvent(self._process.name, self._run, waits=why))
        if self.place == "waits for room":
            self.place = "being placed"
            self._tell(ProcessEvent(self._process.name, self._run, waits=""))
        self._host.note_place(self._process, group)
        return True

    def _follow(self, actor: Actor) -> None:
        """Report what the process logs, and how it ended."""
        self.place = self._result(actor.place.remote())
        with self._lock:
            self._actor = actor
        while not self._ended.is_set():
            lines, code = self._result(actor.poll.remote())
            for line in lines:
                self._log.write(line)
                event = read_events(self._process.name, self._run, line)
                if event is not None:
                    self._tell(event)
            if code is not None:
                self._end(exit_text(code))
            self._ended.wait(_POLL_S)

    def _result(self, call: object) -> Any:  # noqa: ANN401 -- what the actor's method returns
        """The result of a call of the actor; an empty one when the process was killed."""
        ray = _ray()
        while not ray.wait([call], timeout=_POLL_S)[0]:
            if self._ended.is_set():
                return [], None
        return ray.get(call)


class RayHost:
    """A Ray cluster. Ray assigns GPUs; the nodes are chosen as `placement` prefers."""

    def __init__(self, spec: RaySpec, address: str | None, logs: Path) -> None:
        """Raises ConfigError when Ray is not installed or the cluster does not answer."""
        self._spec, self.logs = spec, logs
        self.assigns_gpus = True
        self._groups: dict[str, Group] = {}
        self._placed: dict[str, Placed] = {}
        self._lock = threading.Lock()
        """Held while `_groups` or `_placed` changes, and never during a call of Ray."""

        self._threads: list[threading.Thread] = []
        self._turn = threading.Event()
        """Set when the last process that was started has chosen its node: one after the other,
        in the order of the starts."""

        self._turn.set()
        self._address, self._node_id = address or "auto", ""
        self._is_detached = False
        """The node to which this process was attached is lost."""

        self._attach()

    def _attach(self) -> None:
        """Connect to Ray, in the main thread, which alone can set signal handlers."""
        os.environ[_NO_NEW_CLUSTER] = "0"
        ray = _ray()
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        node = self._spec.node_address
        chosen = {} if node is None else {"_node_ip_address": node}
        try:
            ray.init(
                address=self._address,
                logging_level=logging.ERROR,
                log_to_driver=False,
                **chosen,
            )
        except (ConnectionError, ValueError, RuntimeError) as exc:
            raise ConfigError(
                f"cannot reach the Ray cluster {self._address}: {exc}; start one with "
                "ray start --head"
            ) from exc
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray has installed its own
        self._node_id = ray.get_runtime_context().get_node_id()

    def start(self, process: ProcessSpec, run: int, tell: Tell) -> RunningProcess:
        if self._is_detached:
            self._attach_again()
        turn, self._turn = self._turn, threading.Event()
        return RayProcess(self, process, run, tell, turn=turn, next_turn=self._turn)

    def _attach_again(self) -> None:
        """Connect to another node. If there is none, this start fails, and the next start tries
        again."""
        with self._lock:
            self._groups.clear()
            self._placed.clear()
        _ray().shutdown()
        with suppress(ConfigError):
            self._attach()
            self._is_detached = False

    def release(self, name: str) -> None:
        """Give the resources of an instance back. What still runs there is killed."""
        with self._lock:
            self._placed.pop(name, None)
            group = self._groups.pop(name, None)
        if group is not None:
            self.run_thread(lambda: _ray().util.remove_placement_group(group))

    def close(self) -> None:
        """Give everything back. Without a head, Ray does that when it has one again."""
        for name in list(self._groups):
            self.release(name)
        for thread in self._threads:
            thread.join(_CLOSE_S)
            if thread.is_alive():
                return
        _ray().shutdown()

    # For RayProcess

    def run_thread(self, work: Callable[[], None]) -> None:
        """Do something that may take as long as Ray has no head."""
        thread = threading.Thread(target=work, daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def reserve(self, process: ProcessSpec, run: int) -> Group:
        """The placement group of an instance, which it keeps when it is started again. It has
        one bundle: a bundle is never split over nodes, and all ranks run in one actor."""
        with self._lock:
            known = self._groups.get(process.name)
        if known is not None:
            return known
        nodes = self._nodes_of_cluster()
        with self._lock:
            node = choose_node(process, self._spec, nodes, self._placed.values())
            if node is not None:
                self._placed[process.name] = Placed(role=process.role, node_id=node)
        group = _ray().util.placement_group(
            [resources_of(process, self._spec)],
            strategy="STRICT_PACK",
            name=f"headwater-{process.name}-{run}",
            _soft_target_node_id=node,  # Ray has no public way to prefer a node
        )
        with self._lock:
            self._groups[process.name] = group
        return group

    def _nodes_of_cluster(self) -> list[RayNode]:
        """The nodes. When the node to which this process was attached is lost, Ray has ended
        all that this process had started, and starts nothing more for this process."""
        nodes = [] if self._is_detached else _nodes()
        if not any(node.id == self._node_id for node in nodes):
            self._is_detached = True
            raise EngineDead("the Ray node that headwater up is attached to was lost")
        return nodes

    def note_place(self, process: ProcessSpec, group: Group) -> None:
        """Remember on which node Ray has placed an instance."""
        nodes = _ray().util.placement_group_table(group)["bundles_to_node_id"]
        with self._lock:
            self._placed[process.name] = Placed(role=process.role, node_id=nodes[0])

    def why_it_waits(self, process: ProcessSpec) -> str:
        """A sentence for operators."""
        return why_it_waits(process, self._spec, _nodes())

    def start_actor(self, process: ProcessSpec, group: Group) -> Actor:
        """Start the process in its group."""
        ray = _ray()
        shared = {name: os.environ[name] for name in _SHARED if name in os.environ}
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0)
        return (
            ray.remote(NodeProcess)
            .options(
                num_cpus=self._spec.cpus_per_instance,
                num_gpus=process.num_gpus,
                scheduling_strategy=strategy,
                max_restarts=0,
            )
            .remote(list(process.arguments), shared | dict(process.environment))
        )


def _nodes() -> list[RayNode]:
    """The nodes that are alive."""
    ray = _ray()
    free = importlib.import_module("ray._private.state").available_resources_per_node()
    return [
        RayNode(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
