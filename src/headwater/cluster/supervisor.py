"""Keeps the processes of a cluster running: starts, restarts with back-off, drains, scales, stops.

One thread decides. Process events and commands arrive in one queue. `run` handles one after the
other, and starts or kills what is due when nothing arrives.
"""

from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from headwater.clock import Clock
from headwater.cluster.host import ProcessEvent, ProcessHost
from headwater.cluster.members import Member, MemberState, can_serve
from headwater.cluster.processes import (
    ProcessSpec,
    instance_names,
    instance_process,
    router_processes,
    with_port,
)
from headwater.cluster.spec import ROLES, ClusterSpec, Role, RoleSpec
from headwater.errors import ConfigError, EngineDead, RequestError

_STOP_S = 75.0
"""Longest time for a process to drain before it is killed: the drain timeout and some
seconds."""

_MAX_WAIT_S = 1.0

Answer = Callable[[dict[str, Any]], None]


class Command(NamedTuple):
    """A command that another process sent, and where its answer goes."""

    verb: str
    arguments: Mapping[str, Any]
    answer: Answer


_NOTHING = Command("", {}, lambda answer: None)
"""Returned when nothing arrived in time."""


class ClusterSupervisor:
    """The members of one cluster. `tell` and `ask` may be called from any thread."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        clock: Clock,
        routers: ProcessHost,
        instances: ProcessHost,
        say: Callable[[str], None],
        extra_flags: Callable[[int], Sequence[str]] = lambda number: (),
    ) -> None:
        """`say` prints a line for the operator. `extra_flags` returns further command line
        arguments of the instance that is added as the n-th, from 0."""
        self._spec = spec
        self._clock = clock
        self._hosts = {"router": routers} | dict.fromkeys(ROLES, instances)
        self._say = say
        self._extra_flags = extra_flags
        self._num_added = 0
        self._queue: SimpleQueue[ProcessEvent | Command | None] = SimpleQueue()
        self._members: dict[str, Member] = {}
        self._rolling: list[str] = []
        """Members that a rolling restart has not restarted yet."""
        self._is_stopping = False
        self._has_started = False

    def tell(self, event: ProcessEvent) -> None:
        """Queue an event of a process."""
        self._queue.put(event)

    def ask(self, command: Command) -> None:
        """Queue a command of another process; `command.answer` gets the result."""
        self._queue.put(command)

    def stop(self) -> None:
        """Stop all members and end `run`. May be called in a signal handler."""
        self._queue.put(None)

    @property
    def _router_urls(self) -> list[str]:
        return [m.url for m in self._members.values() if m.process.is_router and m.url]

    def run(self, on_ready: Callable[[Sequence[Member]], None]) -> None:
        """Start everything and keep it running until `stop`.

        `on_ready` is called once, when all members that have a place are ready. Raises
        EngineDead if a process dies before it was ever ready; then all other processes are
        stopped.
        """
        try:
            for process in router_processes(self._spec):
                self._start(self._add(process))
            self._run_until(self._all_ready)
            if not self._is_stopping:
                count = len(instance_names(self._spec))
                loading = "1 instance" if count == 1 else f"{count} instances"
                self._say(f"router ready at {self._router_urls[0]}; loading {loading}")
            for role, number in [] if self._is_stopping else instance_names(self._spec):
                self._start(self._add_instance(role, number))
            self._run_until(self._all_ready)
            if not self._is_stopping:
                self._has_started = True
                on_ready(list(self._members.values()))
            self._run_until(lambda: False)
        finally:
            self._stop_all()

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        while not self._is_stopping and not is_done():
            self._turn()

    def _turn(self) -> None:
        """Handle one event or command, or what is due."""
        try:
            item = self._queue.get(timeout=self._wait_s())
        except Empty:
            item = _NOTHING
        if isinstance(item, ProcessEvent):
            self._on_event(item)
        elif isinstance(item, Command):
            self._on_command(item)
        elif item is None:
            self._is_stopping = True
        self._do_due()
        self._roll()

    def _wait_s(self) -> float:
        now = self._clock.now()
        due = [t for m in self._members.values() for t in (m.due_s, m.kill_s) if t is not None]
        return min(max(min(due, default=now + _MAX_WAIT_S) - now, 0.0), _MAX_WAIT_S)

    # Members

    def _add(self, process: ProcessSpec, gpus: tuple[int, ...] = ()) -> Member:
        member = self._members[process.name] = Member(process=process, gpus=gpus)
        return member

    def _add_instance(self, role: Role, number: int) -> Member:
        gpus = self._free_gpus()
        extra = tuple(self._extra_flags(self._num_added))
        self._num_added += 1
        process = instance_process(
            self._spec, role, number, routers=self._router_urls, gpus=gpus, extra=extra
        )
        member = self._add(process, gpus)
        member.extra = extra
        return member

    def _free_gpus(self) -> tuple[int, ...]:
        """GPUs for one more instance; empty if Ray assigns them."""
        if self._hosts["mixed"].assigns_gpus:
            return ()
        return self._spec.free_gpus(
            {gpu for member in self._members.values() for gpu in member.gpus}
        )

    def _start(self, member: Member) -> None:
        member.run += 1
        member.state, member.due_s, member.url = MemberState.STARTING, None, ""
        host = self._hosts[member.process.role]
        member.running = host.start(member.process, member.run, self.tell)

    def _drain(self, member: Member) -> None:
        """Ask `member` to finish its requests; kill it if that takes too long."""
        if member.running is None:
            self._ended(member)
            return
        member.state = MemberState.DRAINING
        member.kill_s = self._clock.now() + _STOP_S
        member.running.stop()

    def _all_ready(self) -> bool:
        return can_serve(self._members.values())

    # Events

    def _on_event(self, event: ProcessEvent) -> None:
        member = self._members.get(event.name)
        if member is None or event.run != member.run:
            return  # an event of an earlier start
        if event.line:
            self._say(f"{member.name}: {event.line}")
        if event.waits is not None:
            self._say(event.waits or f"{member.name} has a place now")
            member.note_placement(waits=bool(event.waits))
        if event.url and member.state is MemberState.STARTING:
            member.state, member.url = MemberState.READY, event.url
            if member.process.is_router:
                member.process = with_port(member.process, event.url)
            if member.was_ready:
                self._say(f"{member.name} is ready again at {member.url}")
            member.was_ready = True
        if event.is_exit:
            member.running, member.kill_s = None, None
            member.last_exit = event.exit_text
            self._on_exit(member)

    def _on_exit(self, member: Member) -> None:
        if member.state is MemberState.DRAINING:
            self._ended(member)
            return
        self._say(f"{member.name} ended with {member.last_exit}")
        if not self._has_started and not member.was_ready:
            raise EngineDead(
                f"{member.name} ended with {member.last_exit} before it was ready; its log has "
                f"the reason: headwater logs {member.name}"
            )
        now = self._clock.now()
        delay_s = member.next_delay_s(self._spec.restart, now)
        if delay_s is None:
            member.state = MemberState.FAILED
            self._release(member)
            self._say(
                f"{member.name} died {len(member.deaths)} times within "
                f"{self._spec.restart.within_s:g} s and stays down; "
                f"headwater restart {member.name} starts it again"
            )
            return
        member.state, member.due_s = MemberState.RESTARTING, now + delay_s
        self._say(f"{member.name} is started again in {delay_s:g} s")

    def _ended(self, member: Member) -> None:
        """Remove, restart or stop a drained member, whose process has ended."""
        if member.starts_again and not member.leaves:
            member.starts_again = False
            self._start(member)
        else:
            member.state, member.due_s = MemberState.STOPPED, None
            self._release(member)
        if member.leaves:
            del self._members[member.name]
        self._say(f"{member.name} has drained")

    def _release(self, member: Member) -> None:
        self._hosts[member.process.role].release(member.name)

    def _do_due(self) -> None:
        now = self._clock.now()
        for member in list(self._members.values()):
            if member.due_s is not None and member.due_s <= now and not self._is_stopping:
                self._start(member)
            if member.kill_s is not None and member.kill_s <= now:
                member.kill_s = None
                if member.running is not None:
                    self._say(f"{member.name} did not end within {_STOP_S:g} s: killed")
                    member.running.kill()

    def _roll(self) -> None:
        """Restart the next member when all others are ready."""
        busy = (MemberState.STARTING, MemberState.DRAINING, MemberState.RESTARTING)
        if not self._rolling or any(m.state in busy for m in self._members.values()):
            return
        member = self._members.get(self._rolling.pop(0))
        if member is not None:
            member.starts_again = True
            self._drain(member)

    # Commands

    def _on_command(self, command: Command) -> None:
        verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "status": self._status,
            "scale": self._scale,
            "drain": self._drain_named,
            "restart": self._restart,
            "down": self._down,
        }
        if not command.verb:
            return
        verb = verbs.get(command.verb)
        if verb is None:
            command.answer({"error": f"unknown command {command.verb!r}"})
            return
        try:
            command.answer(verb(command.arguments))
        except (ConfigError, RequestError) as exc:
            command.answer({"error": str(exc)})

    def _status(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        members = [member.describe() for member in self._members.values()]
        return {"name": self._spec.name, "members": members, "rolling": list(self._rolling)}

    def _scale(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`{"decode": 4}`: start or drain instances until each role has its number."""
        wanted = dict(arguments.get("roles", {}))
        roles = dict(self._spec.roles)
        for role, count in wanted.items():
            if role not in ROLES or type(count) is not int or not 0 <= count <= 1024:
                raise ConfigError(
                    f"cannot scale {role}={count}: give a role ({', '.join(ROLES)}) and a "
                    "number from 0 to 1024"
                )
            known = roles.get(role)
            roles[role] = RoleSpec(count=count, flags={} if known is None else known.flags)
        spec = self._spec.with_roles(roles)
        spec.check()
        self._spec = spec
        names = {f"{role}-{number}": (role, number) for role, number in instance_names(spec)}
        for name, (role, number) in names.items():
            if name not in self._members:
                self._start(self._add_instance(role, number))
        for member in list(self._members.values()):
            if not member.process.is_router and member.name not in names:
                member.leaves = True
                self._drain(member)
        return self._status({})

    def _drain_named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self._drain(self._named(arguments.get("name")))
        return self._status({})

    def _restart(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Restart members one after the other, with the flags of a new file if one is given.
        Without names: all instances except those that were drained by hand."""
        running = [m for m in self._members.values() if m.state is not MemberState.STOPPED]
        instances = [m.name for m in running if not m.process.is_router]
        names = list(arguments.get("names") or ()) or instances
        members = [self._named(name) for name in names]
        spec = arguments.get("spec")
        if spec is not None:
            self._adopt(spec)
        for member in members:
            if member.state in (MemberState.STOPPED, MemberState.FAILED):
                member.deaths.clear()
                self._start(member)
            else:
                self._rolling.append(member.name)
        return self._status({})

    def _adopt(self, spec: ClusterSpec) -> None:
        """Use the flags of another file from the next start of each instance on."""
        if spec.name != self._spec.name or {r: spec.count(r) for r in ROLES} != {
            r: self._spec.count(r) for r in ROLES
        }:
            raise ConfigError(
                "the new file has another name or other counts; use headwater scale for counts"
            )
        self._spec = spec
        for role, number in instance_names(spec):
            member = self._members[f"{role}-{number}"]
            member.process = instance_process(
                spec,
                role,
                number,
                routers=self._router_urls,
                gpus=member.gpus,
                extra=member.extra,
            )

    def _down(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self._is_stopping = True
        return self._status({})

    def _named(self, name: object) -> Member:
        member = self._members.get(str(name))
        if member is None:
            raise RequestError(
                f"the cluster has no process {name!r}; it has {', '.join(self._members)}"
            )
        return member

    # End

    def _stop_all(self) -> None:
        """Stop instances first, so that routers notice them leave; then stop routers."""
        self._is_stopping = True
        if self._has_started:
            self._say("stopping")
        for is_router in (False, True):
            alive = [
                m
                for m in self._members.values()
                if m.process.is_router is is_router and m.running is not None
            ]
            for member in alive:
                member.leaves = True
                self._drain(member)
            while any(member.running is not None for member in alive):
                self._turn_while_stopping()

    def _turn_while_stopping(self) -> None:
        try:
            item = self._queue.get(timeout=self._wait_s())
        except Empty:
            item = None
        if isinstance(item, Command):
            item.answer({"error": "the cluster is stopping"})
        elif isinstance(item, ProcessEvent):
            member = self._members.get(item.name)
            if item.is_exit and member is not None and item.run == member.run:
                member.running, member.kill_s = None, None
        self._do_due()
