"""Turns a cluster file into command lines. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from headwater.cluster.spec import ROLES, ClusterSpec, FlagValue, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process: a router or an instance."""

    name: str
    role: str
    """`router`, or the role of an instance."""

    arguments: tuple[str, ...]
    """Command line arguments of `headwater`."""

    environment: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 0

    @property
    def is_router(self) -> bool:
        return self.role == "router"


def router_processes(spec: ClusterSpec) -> list[ProcessSpec]:
    """The routers. With port 0, each takes a free port."""
    routers = spec.routers
    made = []
    for number in range(1, routers.count + 1):
        port = routers.port + number - 1 if routers.port else 0
        flags: dict[str, FlagValue] = {
            "host": routers.host,
            "port": port,
            "policy": routers.policy,
            **_security(spec),
            **routers.flags,
        }
        made.append(
            ProcessSpec(
                name="router" if number == 1 else f"router-{number}",
                role="router",
                arguments=("route", *flag_words(flags)),
            )
        )
    return made


def instance_process(
    spec: ClusterSpec,
    role: Role,
    number: int,
    *,
    routers: Sequence[str],
    gpus: Sequence[int] = (),
    extra: Sequence[str] = (),
) -> ProcessSpec:
    """The instance `number`, from 1, of `role`. `routers` are the URLs to register at.

    `gpus` are the only GPUs that it sees; empty if another system, such as Ray, assigns them.
    `extra` are further command line arguments.
    """
    name = f"{role}-{number}"
    flags: dict[str, FlagValue] = {
        "port": 0,
        "instance-name": name,
        "splitwise-role": role,
        **_security(spec),
    }
    if spec.gpus_per_instance:
        flags["device"] = "cuda"
    if spec.tensor_parallel_size > 1:
        flags["tensor-parallel-size"] = spec.tensor_parallel_size
    if spec.link is not None:
        flags["cache-transfer-protocol"] = spec.link
    if spec.storage is not None:
        flags["kvcache-storage-backend"] = spec.storage.backend
        flags["kvcache-storage-config"] = spec.storage.config
    flags |= spec.flags | spec.roles[role].flags
    model = [] if spec.model is None else [spec.model]
    registered = [word for url in routers for word in ("--router", url)]
    return ProcessSpec(
        name=name,
        role=role,
        arguments=("serve", *model, *registered, *flag_words(flags), *extra),
        environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {},
        num_gpus=spec.gpus_per_instance,
    )


def instance_names(spec: ClusterSpec) -> list[tuple[Role, int]]:
    """Role and number of every instance, prefill first."""
    return [(role, number) for role in ROLES for number in range(1, spec.count(role) + 1)]


def flag_words(flags: Mapping[str, FlagValue]) -> list[str]:
    """`{"max-model-len": 8192, "save-preempted": False}` as command line arguments."""
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.removeprefix("--").replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif isinstance(value, list):
            words += [flag, ",".join(str(one) for one in value)]
        else:
            words += [flag, str(value)]
    return words


def _security(spec: ClusterSpec) -> dict[str, FlagValue]:
    flags: dict[str, FlagValue] = {}
    if spec.api_keys_file is not None:
        flags["api-keys-file"] = spec.api_keys_file
    if spec.peer_token_file is not None:
        flags["peer-token-file"] = spec.peer_token_file
    if spec.tls is not None:
        flags |= {"ssl-certfile": spec.tls.certfile, "ssl-keyfile": spec.tls.keyfile}
        if spec.tls.ca_certs is not None:
            flags["ssl-ca-certs"] = spec.tls.ca_certs
    return flags


def with_port(process: ProcessSpec, url: str) -> ProcessSpec:
    """`process` on the port of `url`. A router that is started again keeps its address."""
    words = list(process.arguments)
    words[words.index("--port") + 1] = str(urlsplit(url).port)
    return replace(process, arguments=tuple(words))
