"""The cluster file: reading, validation and its JSON schema."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headwater.errors import ConfigError

Count = Annotated[int, Meta(ge=0, le=1024)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Role = Literal["mixed", "prefill", "decode"]
FlagValue = str | int | float | bool | list[Any] | dict[str, Any]

ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")


class RoleSpec(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Instances of one role."""

    count: Count
    flags: dict[str, FlagValue] = {}
    """Flags of `headwater serve` for this role. They override those of the cluster."""


class RouterSpec(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Several equal routers; each further one listens on the next port."""

    count: Annotated[int, Meta(ge=1, le=16)] = 1
    host: str = "127.0.0.1"
    port: Port = 8100
    policy: Literal["cache_aware", "least_load", "round_robin"] = "cache_aware"
    flags: dict[str, FlagValue] = {}
    """Further flags of `headwater route`."""


class StorageSpec(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The storage that all instances share."""

    backend: str
    config: dict[str, Any] = {}


class TlsSpec(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Certificate files that exist on every node."""

    certfile: str
    keyfile: str
    ca_certs: str | None = None


class RestartSpec(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """When a process that died is started again."""

    max_restarts: Count = 10
    """Maximum number of deaths within `within_s`; a process that dies more often stays down."""

    within_s: Seconds = 600.0
    first_delay_s: Seconds = 1.0
    """First delay; doubled with each further death, up to `max_delay_s`."""

    max_delay_s: Seconds = 30.0


class RaySpec(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Placement on a Ray cluster."""

    address: str | None = None
    """None means the cluster of the environment (`RAY_ADDRESS`) or of this machine."""

    node_address: str | None = None
    """Address of the Ray node on this machine that `headwater up` is attached to; None lets Ray
    choose, and it prefers the head."""

    cpus_per_instance: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    strategy: Literal["SPREAD", "PACK"] = "SPREAD"
    """SPREAD prefers nodes with few instances, PACK those with many. The ranks of one instance are
    always on one node."""

    prefill_near_decode: bool = False
    """Place decode instances on nodes with prefill instances, as far as these have room;
    `strategy` places the prefill instances."""


class ClusterSpec(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Everything that `headwater up -f FILE` starts."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = "default"
    model: str | None = None
    """Model directory or Hugging Face name; None means the built-in model."""

    roles: dict[Role, RoleSpec]
    flags: dict[str, FlagValue] = {}
    """Flags of `headwater serve` for every instance, without the dashes."""

    gpus_per_instance: Annotated[int, Meta(ge=0, le=64)] = 0
    """0 runs on the CPU, unless flags set another device."""

    gpus: list[int] = []
    """GPUs of this machine that may be used, in order; empty means 0, 1, 2, …"""

    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    link: Literal["auto", "shm", "tcp", "cuda", "mooncake"] | None = None
    storage: StorageSpec | None = None
    routers: RouterSpec = RouterSpec()
    api_keys_file: str | None = None
    peer_token_file: str | None = None
    """The secret of the cluster; None creates one."""

    tls: TlsSpec | None = None
    restart: RestartSpec = RestartSpec()
    ray: RaySpec = RaySpec()

    def check(self) -> None:
        """Raise ConfigError for contradictory settings."""
        counts = {role: self.count(role) for role in ROLES}
        if not sum(counts.values()):
            raise ConfigError(
                "the cluster has no instance: give roles.mixed.count, or prefill and decode"
            )
        if counts["prefill"] and not counts["decode"]:
            raise ConfigError(
                "prefill instances need decode instances: give roles.decode.count"
            )
        tp, gpus = self.tensor_parallel_size, self.gpus_per_instance
        if gpus and gpus != tp:
            raise ConfigError(
                f"gpus_per_instance is {gpus} and tensor_parallel_size is {tp}: each rank uses "
                "one GPU, so give the same number"
            )
        if self.gpus and len(self.gpus) < gpus * sum(counts.values()):
            raise ConfigError(
                f"{sum(counts.values())} instances with {gpus} GPUs each need more than the "
                f"{len(self.gpus)} GPUs listed in gpus; list more or lower the counts"
            )

    def with_roles(self, roles: dict[Role, RoleSpec]) -> "ClusterSpec":
        """The same cluster with other numbers of instances."""
        return msgspec.structs.replace(self, roles=roles)

    def free_gpus(self, taken: Collection[int]) -> tuple[int, ...]:
        """GPUs of this machine for one more instance; empty when instances use none."""
        each = self.gpus_per_instance
        known = self.gpus or range(len(taken) + each)
        free = [gpu for gpu in known if gpu not in taken]
        if len(free) < each:
            raise ConfigError(
                f"an instance needs {each} GPUs, but {len(free)} are free; stop another instance first"
            )
        return tuple(free[:each])

    def count(self, role: Role) -> int:
        """Instances of `role`."""
        return self.roles[role].count if role in self.roles else 0


def read_spec(path: Path) -> ClusterSpec:
    """The validated content of a cluster file. Raises ConfigError that names the field."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read the cluster file {path}: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the cluster file {path} is not YAML: {exc}") from exc
    try:
        spec = msgspec.convert(data, ClusterSpec)
    except msgspec.ValidationError as exc:
        raise ConfigError(
            f"the cluster file {path} is wrong: {exc}. `headwater up --schema` prints all fields"
        ) from exc
    spec.check()
    return spec


def schema() -> bytes:
    """The JSON schema of the cluster file."""
    encoded = msgspec.json.encode(msgspec.json.schema(ClusterSpec))
    return msgspec.json.format(encoded, indent=2) + b"\n"
