"""Settings: every knob of the appliance as one frozen value, parsed once from file, environment and flags.

Precedence is flag > environment > file > default. An unknown key, a wrong type or an out-of-range value is a Problem
that names the dotted key, says what is allowed and suggests the nearest known key. Nothing else reads configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from appliance.core import access, moving_in
from appliance.core import fields as check
from appliance.core.access import Key
from appliance.core.addresses import Address, host_and_port, origin, url_host
from appliance.core.instance import InstanceSpec
from appliance.core.knobs import knob, values_of
from appliance.core.layout import Layout
from appliance.core.model_names import registered_id
from appliance.core.problems import Problem, invalid, quoted
from appliance.core.tls_settings import RemoteTlsSettings, TlsSettings

PORT = check.whole(1024, 65535)
SUPERVISORS_OWN = frozenset("%;#\"'*?[]")  # in its files they expand, cut lines off, quote, or stand for other letters


@dataclass(frozen=True)
class QueueSettings:
    """`[queue]`: what waits in the multiplexer when the replicas of an instance are full, or on their way."""

    max_size: int = knob(512, check.whole(0, 1_000_000))
    max_wait_ms: int = knob(30_000, check.whole(0, 3_600_000))
    interactive_share: float = knob(0.25, check.number(0.0, 0.9))
    wait_for_start: bool = knob(True, check.boolean)

    @classmethod
    def parse(cls, table: Any) -> QueueSettings:
        return cls(**values_of(cls, "queue", table))


@dataclass(frozen=True)
class CacheSettings:
    """`[cache]`: embeddings that were computed before. url: of a store that is not a file of ours."""

    enabled: bool = knob(True, check.boolean)
    store: str = knob("sqlite", check.one_of("sqlite", "redis", "qdrant", "none"))
    url: str = knob("", check.text(shortest=0))
    max_mb: int = knob(1024, check.whole(0, 100_000_000))
    ttl_secs: int = knob(0, check.whole(0, 10**9))
    scope: str = knob("all", check.one_of("all", "key"))

    @classmethod
    def parse(cls, table: Any) -> CacheSettings:
        cache = cls(**values_of(cls, "cache", table))
        if cache.store in ("redis", "qdrant") and not cache.url:
            raise invalid(f'"cache.store" is "{cache.store}", which needs "cache.url": say where it is')
        if cache.store not in ("redis", "qdrant") and cache.url:
            raise invalid(f'"cache.url" means nothing with the store "{cache.store}": leave it out')
        return cache

    @property
    def on(self) -> bool:
        return self.enabled and self.store != "none" and self.max_mb > 0


STATE_DIRECTORY = "state"
LISTING_KINDS = ("static", "dns")
RAY = "ray"


@check.with_schema(
    {"type": "string", "pattern": f"^({STATE_DIRECTORY}|({'|'.join(LISTING_KINDS)}):/.+|{RAY}:.+:[0-9]+)$"}
)
def directory(value: Any) -> str:
    """Where the table of replicas comes from."""
    kind, _, place = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind == RAY:
        host_and_port(place)
    elif value != STATE_DIRECTORY and not (kind in LISTING_KINDS and place.startswith("/")):
        raise ValueError(f'must be "state", "static:/FILE", "dns:/FILE" or "ray:HOST:PORT", not {check.shown(value)}')
    return str(value)


seed_tables = check.sequence_of(check.anything, 10_000)


def seeds(value: Any) -> tuple[InstanceSpec, ...]:
    """`[[instances]]`; an error names the entry by its place."""
    specs = []
    for place, entry in enumerate(seed_tables(value)):
        try:
            specs.append(InstanceSpec.parse(entry))
        except Problem as problem:
            name = quoted(entry["name"]) if isinstance(entry, Mapping) and "name" in entry else "without a name"
            raise invalid(f"instances[{place}] ({name}): {problem.message}") from None
    return tuple(specs)


DEFAULT_QUEUE = QueueSettings()
DEFAULT_TLS = TlsSettings()
DEFAULT_CACHE = CacheSettings()
DEFAULT_REMOTE_TLS = RemoteTlsSettings()


@dataclass(frozen=True)
class Settings:
    """Every key of the configuration file (etc/appliance.toml). Times are seconds.

    ``data_dir`` and what follows from it are absolute paths.
    """

    bind: str = knob("127.0.0.1", check.text(255), "TEI_MANAGER_BIND")
    api_port: int = knob(9000, PORT, "TEI_MANAGER_API_PORT")
    grpc_port: int = knob(9001, PORT, "TEI_MANAGER_GRPC_PORT")
    http_port: int = knob(9002, PORT, "TEI_MANAGER_HTTP_PORT")
    data_dir: str = knob("", check.text(), "TEI_MANAGER_DATA_DIR")
    state_file: str = knob("", check.text(), "TEI_MANAGER_STATE_FILE")
    log_dir: str = knob("", check.text(), "TEI_MANAGER_LOG_DIR")
    log_to: str = knob("files", check.one_of("files", "stdout", "both"), "TEI_APPLIANCE_LOG_TO")
    tei_binary_path: str = knob("", check.text(shortest=0), "TEI_BINARY_PATH")
    health_check_interval_secs: int = knob(10, check.whole(1, 3600), "TEI_MANAGER_HEALTH_CHECK_INTERVAL")
    startup_timeout_secs: int = knob(300, check.whole(1, 86400))
    max_failures_before_restart: int = knob(3, check.whole(0, 1000))
    graceful_shutdown_timeout_secs: int = knob(30, check.whole(1, 3600))
    auto_restore_on_restart: bool = knob(True, check.boolean)
    max_instances: int | None = knob(None, check.whole(1, 100_000))
    instance_port_start: int = knob(8080, PORT, "TEI_MANAGER_INSTANCE_PORT_START")
    instance_port_end: int = knob(8180, check.whole(1024, 65536), "TEI_MANAGER_INSTANCE_PORT_END")
    prometheus_port_start: int = knob(8700, PORT, "TEI_MANAGER_PROMETHEUS_PORT_START")
    allow_pickle: bool = knob(False, check.boolean)
    models: tuple[str, ...] = knob((), check.sequence_of(registered_id, 10_000))
    instances: tuple[InstanceSpec, ...] = knob((), check.Check(seeds))
    grpc_request_timeout_secs: int = knob(30, check.whole(0, 86400))
    grpc_max_message_size_mb: int = knob(40, check.whole(1, 2047))
    grpc_max_parallel_streams: int = knob(1024, check.whole(1, 100_000))
    memory_budget_mb: int = knob(1024, check.whole(16, 1_000_000))
    memory_limit_mb: int = knob(0, check.whole(0, 100_000_000), "TEI_APPLIANCE_MEMORY_LIMIT")
    prometheus_url: str = knob("", check.text(shortest=0), "TEI_APPLIANCE_PROMETHEUS_URL")
    prometheus_labels: str = knob("", check.text(500, shortest=0))
    engine_cores: str = knob("shared", check.one_of("shared", "divided"), "TEI_APPLIANCE_ENGINE_CORES")
    multiplexer_workers: int | None = knob(None, check.whole(1, 64))
    queue: QueueSettings = knob(DEFAULT_QUEUE, check.Check(QueueSettings.parse))
    directory: str = knob(STATE_DIRECTORY, directory, "TEI_MANAGER_DIRECTORY")
    peers: tuple[Address, ...] = knob((), check.sequence_of(host_and_port, 1000))
    peer_key_file: str = knob("", check.text(shortest=0))
    ray_role: str = knob("", check.one_of("", "head", "node"), "TEI_APPLIANCE_RAY_ROLE")
    ray_head: str = knob("", check.text(255, shortest=0), "TEI_APPLIANCE_RAY_HEAD")
    ray_address: str = knob("", check.text(255, shortest=0), "TEI_APPLIANCE_RAY_ADDRESS")
    ray_port: int = knob(6379, PORT)
    ray_dashboard_port: int = knob(8265, PORT)
    ray_directory_port: int = knob(8266, PORT)
    ray_token_file: str = knob("", check.text(shortest=0))
    ray_start_args: tuple[str, ...] = knob((), check.sequence_of(check.text(), 100))
    remote_tls: RemoteTlsSettings = knob(DEFAULT_REMOTE_TLS, check.Check(RemoteTlsSettings.parse))
    tls: TlsSettings = knob(DEFAULT_TLS, check.Check(TlsSettings.parse))
    cache: CacheSettings = knob(DEFAULT_CACHE, check.Check(CacheSettings.parse))
    keys: tuple[Key, ...] = knob((), check.Check(access.keys))
    open_health: bool = knob(False, check.boolean)
    cors_allow_origins: tuple[str, ...] = knob((), check.sequence_of(origin, 1000))
    image_url_hosts: tuple[str, ...] = knob((), check.sequence_of(url_host, 1000))

    @property
    def layout(self) -> Layout:
        return Layout(self.data_dir, self.log_dir)

    @property
    def has_state_directory(self) -> bool:
        """Whether calls go to the instances that this machine runs."""
        return self.directory == STATE_DIRECTORY

    @property
    def is_cluster_head(self) -> bool:
        """Whether the instances of the state file run on a cluster of Ray Serve, whose head this machine is."""
        return self.ray_role == "head"

    @property
    def cluster_directory(self) -> Address | None:
        """Where the directory of a cluster answers; None where the table of replicas comes from elsewhere."""
        kind, _, place = self.directory.partition(":")
        return host_and_port(place) if kind == RAY else None

    @property
    def has_own_instances(self) -> bool:
        """Whether the state file says which instances there are."""
        return self.has_state_directory or self.is_cluster_head

    @property
    def log_bytes(self) -> int:
        """Of one log file. Also where standard output has the logs: status and `logs` read the files."""
        return (1 if self.log_to == "stdout" else 10) * 1024 * 1024

    @property
    def log_backups(self) -> int:
        """Files of that size that are kept beside it."""
        return 1 if self.log_to == "stdout" else 3

    @property
    def grpc_max_message_bytes(self) -> int:
        return self.grpc_max_message_size_mb * 1024 * 1024

    @property
    def memory_budget_bytes(self) -> int:
        return self.memory_budget_mb * 1024 * 1024

    @property
    def memory_limit_bytes(self) -> int:
        return self.memory_limit_mb * 1024 * 1024

    def workers(self, cores: int) -> int:
        """Multiplexer processes that share the port: as set, else half the cores, at least 1 and at most 8."""
        return self.multiplexer_workers or min(8, max(1, cores // 2))

    def multiplexer_sockets(self, cores: int) -> list[str]:
        """The sockets of all multiplexer processes."""
        return [self.layout.multiplexer_socket(number) for number in range(self.workers(cores))]

    @property
    def own_ports(self) -> dict[int, str]:
        """Ports that no instance may take, and the key that claims each."""
        return {self.api_port: "api_port", self.grpc_port: "grpc_port", self.http_port: "http_port"}


KNOBS = {knob.name: knob for knob in fields(Settings)}
FILE = check.Fields(
    {name: knob.metadata["check"] for name, knob in KNOBS.items()},
    name='Configuration key "{}"',
    unknown='Unknown key "{}" in the configuration file',
    shown=str,
)
ENVIRONMENT = {knob.metadata["env"]: name for name, knob in KNOBS.items() if knob.metadata["env"]}


def parse(file: Mapping[str, Any], environ: Mapping[str, str], flags: Mapping[str, Any], data_dir: str) -> Settings:
    """Settings from the three sources; ``data_dir`` is the default for the key of that name.

    Raises: Problem (invalid), whose message names the key as its source spells it.
    """
    values: dict[str, Any] = {"data_dir": data_dir, **FILE.values(moving_in.own_keys(file, environ))}
    for variable, name in ENVIRONMENT.items():
        if environ.get(variable):
            values[name] = FILE.value(name, spelled(KNOBS[name], environ[variable]), f"Environment variable {variable}")
    for key, value in flags.items():
        if value is not None:
            values[key] = FILE.value(key, value, f"Flag --{key.replace('_', '-')}")
    return complete(values)


def spelled(knob: Any, value: str) -> Any:
    """An environment variable has only text: numbers become numbers here, so that the checks stay strict."""
    if isinstance(knob.default, bool):
        return {"true": True, "false": False}.get(value.lower(), value)
    if isinstance(knob.default, int):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else value
    return value


def is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def on_ray(values: dict[str, Any]) -> None:
    """A machine of a cluster gets the table of replicas from its head. Raises: Problem."""
    role, head = values.get("ray_role", ""), values.get("ray_head", "")
    if head and not role:
        raise invalid('Configuration key "ray_head" needs "ray_role", which says what this machine is in a cluster')
    if not role:  # the others say how it will be, when `appliance cluster` is asked for
        return
    if (role == "node") != bool(head):
        raise invalid('Configuration key "ray_head" is the address of the head: a node needs it, a head has none')
    token_file = values.get("ray_token_file", "")
    if token_file and not token_file.startswith("/"):
        raise invalid(f'Configuration key "ray_token_file" must be an absolute path, not {quoted(token_file)}')
    port = values.get("ray_directory_port", KNOBS["ray_directory_port"].default)
    asked, table = values.get("directory", STATE_DIRECTORY), f"{RAY}:{Address(head or '127.0.0.1', port)}"
    if asked not in (STATE_DIRECTORY, table):  # our own programs have it from the environment
        raise invalid('Configuration keys "ray_role" and "directory" exclude each other: the head has the directory')
    values["directory"] = table


def complete(values: dict[str, Any]) -> Settings:
    """Fill in what follows from other keys, and refuse what contradicts itself."""
    data_dir = values["data_dir"]
    values.setdefault("state_file", Layout(data_dir).state)
    values.setdefault("log_dir", Layout(data_dir).logs)
    on_ray(values)
    settings = Settings(**values)
    for key in ("data_dir", "log_dir"):
        if hostile := sorted(SUPERVISORS_OWN.intersection(getattr(settings, key))):
            raise invalid(
                f'Configuration key "{key}" must not contain {" ".join(hostile)}: supervisor reads these itself'
            )
    for key in ("data_dir", "state_file", "log_dir"):
        if not getattr(settings, key).startswith("/"):
            raise invalid(f'Configuration key "{key}" must be an absolute path, not {quoted(getattr(settings, key))}')
    if len(settings.own_ports) < 3:
        raise invalid(
            f"api_port ({settings.api_port}), grpc_port ({settings.grpc_port}) and http_port ({settings.http_port}) "
            "must differ: give each its own port"
        )
    if settings.instance_port_end < settings.instance_port_start:
        raise invalid(
            f"instance_port_end ({settings.instance_port_end}) must not be below instance_port_start "
            f"({settings.instance_port_start}); equal turns automatic ports off"
        )
    if settings.prometheus_url and not is_http_url(settings.prometheus_url):
        raise invalid('Configuration key "prometheus_url" must be a URL with http:// or https://, and a host')
    if settings.peers and not settings.has_state_directory:
        raise invalid(f'Configuration key "peers" means nothing with the directory {quoted(settings.directory)}')
    if settings.peer_key_file and not (settings.peers and settings.peer_key_file.startswith("/")):
        raise invalid('Configuration key "peer_key_file" must be an absolute path, and needs "peers"')
    if settings.instances and not settings.has_own_instances:
        raise invalid(
            f'Configuration key "instances" means nothing with the directory {quoted(settings.directory)}, which lists '
            "them: leave one of both out"
        )
    names = [spec.name for spec in settings.instances]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise invalid(f'Configuration key "instances" has two instances named "{twice}": rename one')
    return settings
