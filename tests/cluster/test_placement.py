"""Which node an instance should have, and what an operator reads when none has room."""

from headwater.cluster.placement import (
    Placed,
    RayNode,
    choose_node,
    describe_policy,
    resources_of,
    why_it_waits,
)
from headwater.cluster.processes import ProcessSpec
from headwater.cluster.spec import RaySpec


def node(name, *, cpus=8.0, free=None, gpus=0.0):
    total = {"CPU": cpus, "GPU": gpus}
    return RayNode(
        id=name, address=name, total=total, free=total if free is None else {"CPU": free}
    )


def instance(role, number=1, gpus=0):
    return ProcessSpec(name=f"{role}-{number}", role=role, arguments=(), num_gpus=gpus)


def place(roles, nodes, spec):
    """The nodes of instances with these roles, placed one after the other."""
    placed: list[Placed] = []
    for number, role in enumerate(roles):
        found = choose_node(instance(role, number), spec, nodes, placed)
        assert found is not None
        placed.append(Placed(role=role, node_id=found))
    return [one.node_id for one in placed]


def test_instances_are_spread_over_nodes_also_of_unequal_size():
    """The node with the fewest instances comes first, and the larger one of two equals."""
    nodes = [node("small", cpus=4), node("large", cpus=64), node("medium", cpus=16)]

    found = place(["mixed"] * 4, nodes, RaySpec())

    assert found == ["large", "medium", "small", "large"]


def test_instances_are_packed_when_asked():
    """The second instance goes where the first one is."""
    nodes = [node("a"), node("b", cpus=16)]
    assert set(place(["mixed"] * 3, nodes, RaySpec(strategy="PACK"))) == {"b"}


def test_prefill_and_decode_share_nodes_when_asked():
    """Prefill instances are spread, and decode instances follow in equal numbers. A prefill
    instance goes where a decode instance was placed before."""
    nodes = [node(name) for name in "abc"]
    spec = RaySpec(prefill_near_decode=True)

    pairs = place(["prefill", "prefill", "decode", "decode"], nodes, spec)
    in_turn = place(["prefill", "decode", "prefill", "decode"], nodes, spec)
    one_for_all = place(["prefill", "decode", "decode", "decode"], nodes, spec)
    decode_first = place(["decode", "prefill"], nodes, spec)
    packed = place(
        ["prefill", "prefill", "decode"],
        nodes,
        RaySpec(prefill_near_decode=True, strategy="PACK"),
    )
    apart = place(["prefill", "decode"], nodes, RaySpec())

    assert pairs[0] != pairs[1]
    assert sorted(pairs[:2]) == sorted(pairs[2:])
    assert in_turn[0] == in_turn[1] != in_turn[2] == in_turn[3]
    assert len(set(one_for_all)) == 1
    assert decode_first[0] == decode_first[1]
    assert len(set(packed)) == 1
    assert apart[0] != apart[1]


def test_a_node_without_room_is_not_chosen():
    """An instance goes to another node instead of waiting, also if it should be near others."""
    nodes = [node("a", free=0.0), node("b")]
    spec, placed = RaySpec(prefill_near_decode=True), [Placed(role="prefill", node_id="a")]

    assert choose_node(instance("decode"), spec, nodes, placed) == "b"
    assert choose_node(instance("decode"), spec, nodes[:1], placed) is None


def test_all_ranks_of_an_instance_are_one_request():
    """Two GPUs on two nodes are no place for an instance with two ranks."""
    spec = RaySpec(cpus_per_instance=4)
    two = instance("mixed", gpus=2)

    assert resources_of(two, spec) == {"CPU": 4.0, "GPU": 2.0}
    assert resources_of(instance("mixed"), spec) == {"CPU": 4.0}
    assert choose_node(two, spec, [node("a", gpus=1), node("b", gpus=1)], []) is None
    assert choose_node(two, spec, [node("a", gpus=1), node("b", gpus=2)], []) == "b"


def test_one_sentence_says_why_an_instance_waits():
    """The sentence has what the instance asks for, what the nodes have, and what can be done."""
    spec = RaySpec(cpus_per_instance=4)
    nodes = [node("10.0.0.1", cpus=2), node("10.0.0.2", cpus=1, free=0.0)]

    never = why_it_waits(instance("decode", 2, gpus=1), spec, nodes)
    later = why_it_waits(instance("decode", 2), spec, [node("10.0.0.3", free=0.5)])
    many = why_it_waits(instance("decode", 2), spec, [node("n", free=0.5)] * 9)

    assert never == (
        "decode-2 asks for 4 CPUs and 1 GPU on one node, and no node of the Ray cluster is that "
        "large (10.0.0.1 has 2 of 2 CPUs free and 0 of 0 GPUs free, 10.0.0.2 has 0 of 1 CPU free "
        "and 0 of 0 GPUs free): add such a node, or ask for less in the cluster file; the other "
        "instances do not wait for it"
    )
    assert later == (
        "decode-2 asks for 4 CPUs on one node, and no node has that much free (10.0.0.3 has 0.5 "
        "of 8 CPUs free): it starts when there is room"
    )
    assert many.count("n has") == 4
    assert "5 more have less free" in many
    assert "it has no node" in why_it_waits(instance("decode"), spec, [])


def test_the_policy_is_a_sentence():
    """A dry run prints the policy as one sentence."""
    assert describe_policy(RaySpec()) == (
        "placement: the node with the fewest instances first, if it has room"
    )
    assert "with prefill instances" in describe_policy(RaySpec(prefill_near_decode=True))
