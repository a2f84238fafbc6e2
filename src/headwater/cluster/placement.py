"""Chooses the node of a Ray cluster for an instance, and says why an instance waits. Pure.

The choice is a preference: Ray places the instance elsewhere when the node has no room any more.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headwater.cluster.processes import ProcessSpec
from headwater.cluster.spec import RaySpec

_MAX_NAMED = 4
"""Nodes that a sentence for operators lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node of the cluster and its resources, by Ray's names (`CPU`, `GPU`)."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An instance of this cluster that is on a node, or will be."""

    role: str
    node_id: str


def resources_of(process: ProcessSpec, spec: RaySpec) -> dict[str, float]:
    """What an instance asks for, with all its ranks."""
    gpus = {"GPU": float(process.num_gpus)} if process.num_gpus else {}
    return {"CPU": spec.cpus_per_instance, **gpus}


def choose_node(
    process: ProcessSpec, spec: RaySpec, nodes: Sequence[RayNode], placed: Collection[Placed]
) -> str | None:
    """The node on which the instance should be; None if no node has room now."""
    wanted = resources_of(process, spec)
    free = [node for node in nodes if _has(node.free, wanted)]
    if not free:
        return None

    def order(node: RayNode) -> tuple[float, ...]:
        here = [one.role for one in placed if one.node_id == node.id]
        crowd = len(here) if spec.strategy == "SPREAD" else -len(here)
        near = _nearness(process.role, here) if spec.prefill_near_decode else ()
        return (*near, crowd, -node.free["CPU"])

    return min(free, key=order).id


def describe_request(process: ProcessSpec, spec: RaySpec) -> str:
    """`prefill-1 asks for 4 CPUs and 2 GPUs on one node`."""
    amounts = [_amount(value, name) for name, value in resources_of(process, spec).items()]
    return f"{process.name} asks for {' and '.join(amounts)} on one node"


def describe_policy(spec: RaySpec) -> str:
    """How nodes are chosen, as a text for operators."""
    spread = "fewest" if spec.strategy == "SPREAD" else "most"
    near = (
        "decode instances on nodes with prefill instances; else "
        if spec.prefill_near_decode
        else ""
    )
    return f"placement: {near}the node with the {spread} instances first, if it has room"


def why_it_waits(process: ProcessSpec, spec: RaySpec, nodes: Sequence[RayNode]) -> str:
    """One sentence for operators: what the instance asks for and what the nodes have."""
    wanted = resources_of(process, spec)
    asks, there = describe_request(process, spec), _list_nodes(nodes, wanted)
    if not any(_has(node.total, wanted) for node in nodes):
        return (
            f"{asks}, and no node of the Ray cluster is that large ({there}): add such a node, "
            "or ask for less in the cluster file; the other instances do not wait for it"
        )
    return f"{asks}, and no node has that much free ({there}): it starts when there is room"


def _nearness(role: str, here: Sequence[str]) -> tuple[float, ...]:
    """Lower is nearer, for an instance of this role beside those of the roles `here`.

    A decode instance goes where prefill instances are, first where most of them have no decode
    instance. A prefill instance goes where there are more decode than prefill instances. All
    other nodes are equally near to it: `strategy` chooses among them, and decode instances
    follow.
    """
    num_prefill, num_decode = here.count("prefill"), here.count("decode")
    if role == "decode":
        return (float(not num_prefill), float(num_decode - num_prefill))
    if role == "prefill":
        return (float(min(num_prefill - num_decode, 0)),)
    return ()


def _has(resources: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= value for name, value in wanted.items())


def _list_nodes(nodes: Sequence[RayNode], wanted: Mapping[str, float]) -> str:
    """`10.0.0.1 has 1 of 4 CPUs free, …`, the nodes with the most free resources first."""

    def most(node: RayNode) -> tuple[float, ...]:
        return tuple(-node.free.get(name, 0.0) for name in sorted(wanted, reverse=True))

    texts = [
        f"{node.address} has "
        + " and ".join(
            f"{node.free.get(name, 0.0):g} of {_amount(node.total.get(name, 0.0), name)} free"
            for name in wanted
        )
        for node in sorted(nodes, key=most)
    ]
    more = len(texts) - _MAX_NAMED
    shown = texts[:_MAX_NAMED] + ([f"{more} more have less free"] if more > 0 else [])
    return ", ".join(shown) or "it has no node"


def _amount(value: float, name: str) -> str:
    return f"{value:g} {name}{'' if value == 1 else 's'}"
