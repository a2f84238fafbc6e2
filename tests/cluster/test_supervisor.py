"""The supervisor's decisions, with simulated processes and a manual clock."""

import threading
from queue import SimpleQueue
from typing import Any

import pytest

from headwater.cluster.host import ProcessEvent
from headwater.cluster.spec import ClusterSpec, RestartSpec, RoleSpec
from headwater.cluster.supervisor import ClusterSupervisor, Command
from headwater.errors import EngineDead


class SimulatedProcess:
    """A process that ends when it is told to, or when a test says so."""

    def __init__(self, host, process, run, tell):
        self.host, self.process, self.run, self.tell = host, process, run, tell
        self.place = "on paper"
        self.is_alive = True

    def ready(self):
        url = f"http://127.0.0.1:{9000 + len(self.host.started)}"
        self.tell(ProcessEvent(self.process.name, self.run, url=url))

    def waits(self, why):
        self.tell(ProcessEvent(self.process.name, self.run, waits=why))

    def end(self, how="signal 9"):
        self.is_alive = False
        self.tell(ProcessEvent(self.process.name, self.run, is_exit=True, exit_text=how))

    def stop(self):
        if not self.host.ignores_stop:
            self.end("exit code 0")

    def kill(self):
        self.end("signal 9")


class SimulatedHost:
    """Records what was started; everything is ready at once, unless named in `broken`, or in
    `unplaced`, for which there is no node."""

    assigns_gpus = False
    ignores_stop = False

    def __init__(self):
        self.started = []
        self.broken = set()
        self.unplaced = set()
        self.released = []

    def start(self, process, run, tell):
        made = SimulatedProcess(self, process, run, tell)
        self.started.append(made)
        if process.name in self.broken:
            made.end("exit code 1")
        elif process.name in self.unplaced:
            made.waits(f"{process.name} asks for much")
        else:
            made.ready()
        return made

    def release(self, name):
        self.released.append(name)

    def close(self):
        pass

    def runs(self, name):
        return [one for one in self.started if one.process.name == name]


class ManualClock:
    """A clock that the test moves; waits of the supervisor are real but short."""

    def __init__(self):
        self.now_s = 0.0

    def now(self):
        return self.now_s


class Cluster:
    """A supervisor in a thread."""

    def __init__(self, **changes):
        roles = {"prefill": RoleSpec(count=1), "decode": RoleSpec(count=2)}
        settings: dict[str, Any] = {
            "roles": roles,
            "restart": RestartSpec(max_restarts=2),
        } | changes
        self.host, self.clock = SimulatedHost(), ManualClock()
        self.lines: list[str] = []
        self.supervisor = ClusterSupervisor(
            ClusterSpec(**settings),
            clock=self.clock,
            routers=self.host,
            instances=self.host,
            say=self.lines.append,
        )
        self.ready = threading.Event()
        self.error = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self.thread.start()
        assert self.ready.wait(10), self.lines
        return self

    def _run(self):
        try:
            self.supervisor.run(lambda members: self.ready.set())
        except EngineDead as exc:
            self.error = exc
        self.ready.set()

    def ask(self, verb, **arguments):
        answers: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.supervisor.ask(Command(verb, arguments, answers.put))
        return answers.get(timeout=10)

    def states(self):
        return {m["name"]: m["state"] for m in self.ask("status")["members"]}

    def until(self, name, state):
        for _ in range(500):
            if self.states().get(name) == state:
                return
        raise AssertionError((name, state, self.states(), self.lines))

    def until_runs(self, name, count):
        """Wait until the process `name` was started `count` times and is ready."""
        for _ in range(500):
            if len(self.host.runs(name)) == count:
                break
            self.states()
        self.until(name, "ready")

    def stop(self):
        self.supervisor.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def cluster():
    cluster = Cluster().start()
    yield cluster
    cluster.stop()


def test_routers_start_first_and_instances_register_at_them(cluster):
    """The URL of the router is known before the first instance is started."""
    names = [one.process.name for one in cluster.host.started]
    assert names == ["router", "prefill-1", "decode-1", "decode-2"]
    words = " ".join(cluster.host.runs("decode-1")[0].process.arguments)
    assert "--router http://127.0.0.1:9001" in words
    assert set(cluster.states().values()) == {"ready"}


def test_a_process_that_dies_is_started_again_later_each_time_and_then_stays_down(cluster):
    """The process is started again after 1 s and 2 s; after its third death within ten minutes
    it stays down."""
    for delay_s in (1.0, 2.0):
        cluster.host.runs("decode-1")[-1].end()
        cluster.until("decode-1", "restarting")
        cluster.clock.now_s += delay_s * 0.9
        assert cluster.states()["decode-1"] == "restarting"
        cluster.clock.now_s += delay_s * 0.2
        cluster.until("decode-1", "ready")
    cluster.host.runs("decode-1")[-1].end()
    cluster.until("decode-1", "failed")

    assert "stays down" in " ".join(cluster.lines)
    cluster.ask("restart", names=["decode-1"])
    cluster.until("decode-1", "ready")


def test_a_router_that_is_started_again_keeps_its_port(cluster):
    """Clients and instances find the router at the same address."""
    cluster.host.runs("router")[-1].end()
    cluster.until("router", "restarting")
    cluster.clock.now_s += 2
    cluster.until("router", "ready")
    words = cluster.host.runs("router")[-1].process.arguments
    assert words[words.index("--port") + 1] == "9001"


def test_scaling_starts_and_drains_instances(cluster):
    """Instances with the highest numbers are drained; an unknown role is refused."""
    assert "decode-4" in {
        m["name"] for m in cluster.ask("scale", roles={"decode": 4})["members"]
    }
    cluster.until("decode-4", "ready")
    cluster.ask("scale", roles={"decode": 1})
    cluster.until("decode-2", None)
    assert set(cluster.states()) == {"router", "prefill-1", "decode-1"}
    assert "cannot scale" in cluster.ask("scale", roles={"boss": 1})["error"]
    assert "need decode" in cluster.ask("scale", roles={"decode": 0})["error"]


def test_a_drained_instance_stays_down(cluster):
    """A drained instance is not started again; its exit does not count as a death."""
    cluster.ask("drain", name="decode-2")
    cluster.until("decode-2", "stopped")
    assert len(cluster.host.runs("decode-2")) == 1
    assert "no process 'decode-9'" in cluster.ask("drain", name="decode-9")["error"]
    cluster.ask("restart")
    cluster.until("decode-1", "ready")
    assert cluster.states()["decode-2"] == "stopped"
    cluster.ask("restart", names=["decode-2"])
    cluster.until("decode-2", "ready")


def test_a_rolling_restart_restarts_one_after_the_other_with_new_flags(cluster):
    """Two instances are never down at the same time."""
    spec = ClusterSpec(
        roles={"prefill": RoleSpec(count=1), "decode": RoleSpec(count=2)},
        flags={"max-model-len": 512},
    )
    cluster.ask("restart", spec=spec)
    for name in ("prefill-1", "decode-1", "decode-2"):
        for _ in range(500):
            if len(cluster.host.runs(name)) == 2:
                break
            cluster.states()
        assert "--max-model-len" in cluster.host.runs(name)[1].process.arguments
    order = [one.process.name for one in cluster.host.started[4:]]
    assert order == ["prefill-1", "decode-1", "decode-2"]


def test_a_process_that_ignores_the_drain_is_killed():
    """The process is killed some seconds after the longest drain time."""
    cluster = Cluster().start()
    cluster.host.ignores_stop = True
    cluster.ask("drain", name="decode-1")
    assert cluster.states()["decode-1"] == "draining"
    cluster.clock.now_s += 100
    cluster.until("decode-1", "stopped")
    assert "killed" in " ".join(cluster.lines)
    cluster.host.ignores_stop = False
    cluster.stop()


def test_a_process_that_dies_before_it_was_ready_ends_the_start():
    """A wrong flag would otherwise be tried for ever; nothing is left running."""
    cluster = Cluster()
    cluster.host.broken = {"decode-2"}
    cluster.thread.start()
    cluster.thread.join(10)

    assert "decode-2 ended with exit code 1 before it was ready" in str(cluster.error)
    assert not [one for one in cluster.host.started if one.is_alive]


def test_down_stops_instances_before_routers(cluster):
    """Routers notice that instances leave."""
    cluster.ask("down")
    cluster.thread.join(10)
    assert not [one for one in cluster.host.started if one.is_alive]


def test_instances_have_gpus_of_their_own():
    """A GPU in use is not assigned twice, also after scaling."""
    roles = {"mixed": RoleSpec(count=2)}
    cluster = Cluster(roles=roles, gpus_per_instance=1, gpus=[4, 5, 6]).start()
    cluster.ask("scale", roles={"mixed": 3})
    cluster.until("mixed-3", "ready")
    seen = [one.process.environment["CUDA_VISIBLE_DEVICES"] for one in cluster.host.started[1:]]
    assert seen == ["4", "5", "6"]
    assert "need more than the 3 GPUs" in cluster.ask("scale", roles={"mixed": 4})["error"]
    cluster.stop()


def test_an_instance_without_a_node_does_not_hold_the_others():
    """The cluster is ready without this instance and restarts the others; the instance starts
    when a node has room."""
    cluster = Cluster()
    cluster.host.unplaced = {"decode-2"}
    cluster.start()
    assert cluster.states()["decode-2"] == "waiting"
    assert "decode-2 asks for much" in cluster.lines

    cluster.ask("restart", names=["decode-1"])
    cluster.until_runs("decode-1", 2)
    process = cluster.host.runs("decode-2")[0]
    process.waits("")
    cluster.until("decode-2", "starting")
    process.ready()
    cluster.until("decode-2", "ready")
    cluster.stop()


def test_a_cluster_is_not_ready_while_a_role_has_no_instance():
    """Without a prefill instance the cluster could not answer; it still stops when told to."""
    cluster = Cluster()
    cluster.host.unplaced = {"prefill-1"}
    cluster.thread.start()
    cluster.until("decode-2", "ready")
    assert not cluster.ready.is_set()
    cluster.host.runs("prefill-1")[0].waits("")
    cluster.host.runs("prefill-1")[0].ready()
    assert cluster.ready.wait(10)
    cluster.stop()


def test_an_instance_that_waits_for_a_node_can_be_scaled_away():
    """Nothing of the instance is left."""
    cluster = Cluster()
    cluster.host.unplaced = {"decode-2"}
    cluster.start()
    cluster.ask("scale", roles={"decode": 1})
    cluster.until("decode-2", None)
    cluster.stop()
    assert not [one for one in cluster.host.started if one.is_alive]


def test_a_place_is_kept_until_the_process_is_not_started_again():
    """A death or a rolling restart keeps the place; a drain, a scale down and the last death
    give it back."""
    cluster = Cluster(restart=RestartSpec(max_restarts=1)).start()
    cluster.host.runs("decode-1")[-1].end()
    cluster.until("decode-1", "restarting")
    cluster.clock.now_s += 2
    cluster.until("decode-1", "ready")
    cluster.ask("restart", names=["decode-1"])
    cluster.until_runs("decode-1", 3)
    assert cluster.host.released == []

    cluster.ask("drain", name="prefill-1")
    cluster.until("prefill-1", "stopped")
    cluster.ask("scale", roles={"decode": 1})
    cluster.until("decode-2", None)
    cluster.host.runs("decode-1")[-1].end()
    cluster.until("decode-1", "failed")
    assert cluster.host.released == ["prefill-1", "decode-2", "decode-1"]
    cluster.stop()
