"""Layout: the names of everything that an appliance has on its machine: files, sockets and processes.

A driver adds what it keeps beside one of its files: a lock, the last good copy, the next version while it is written.

    process of supervisord      group          log file
    control, gateway, monitor   its own name   NAME.log
    multiplexer-0, …            multiplexer    multiplexer-0.log, …
    INSTANCE-0, …               INSTANCE       INSTANCE-0.log, …
    INSTANCE@2-0, …             INSTANCE       INSTANCE@2-0.log, … (a generation that started beside another one)
    job.N                       job.N          job.N.log
    express                     express        express.log
    cluster                     cluster        cluster.log
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from appliance.core.cachekey import FORMAT

JOB_PREFIX = "job."
CLUSTER = "cluster"  # the group and the process of Ray, where this machine is one of a cluster
EXPRESS = "express"  # the group and the process of Envoy, while an instance asks for the express lane


class ReplicaProcess(NamedTuple):
    """A process of an instance. stem: the common part of the names of one generation's processes."""

    stem: str
    replica: int


def stem_of(instance: str, series: int) -> str:
    """series: 1, or that of a generation which started beside another one. No instance has an @ in its name."""
    return instance if series == 1 else f"{instance}@{series}"


def replica_process(stem: str, replica: int) -> str:
    """The process of a replica; its group bears the name of the instance."""
    return f"{stem}-{replica}"


def replica_of(group: str, process: str) -> ReplicaProcess | None:
    """What `replica_process` made this name of; None for a process of another kind."""
    stem, _, number = process.rpartition("-")
    instance, at, series = stem.partition("@")
    is_ours = instance == group and is_number(number) and (is_number(series) if at else True)
    return ReplicaProcess(stem, int(number)) if is_ours else None


def instance_of(stem: str) -> str:
    return stem.partition("@")[0]


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def multiplexer_process(number: int) -> str:
    """As in `etc/supervisord.conf`."""
    return f"multiplexer-{number}"


def job_process(number: int) -> str:
    """The group and the process of a job. No instance has a name that begins so."""
    return f"{JOB_PREFIX}{number}"


@dataclass(frozen=True)
class Layout:
    """Absolute paths below one data folder. log_dir: where the logs are not in its folder `logs`."""

    data_dir: str
    log_dir: str = ""

    # -- state, and what is measured ---------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Where the state file is unless the setting `state_file` says otherwise."""
        return f"{self.data_dir}/state.toml"

    @property
    def listing(self) -> str:
        """The last good one of a directory that is not the state."""
        return f"{self.data_dir}/listing.toml"

    @property
    def ray(self) -> str:
        """Folder of what Ray knows of a cluster, on its head."""
        return f"{self.data_dir}/ray"

    @property
    def peers(self) -> str:
        """The last good listing of what the peers have."""
        return f"{self.data_dir}/peers.toml"

    @property
    def models(self) -> str:
        return f"{self.data_dir}/models.toml"

    @property
    def keys(self) -> str:
        return f"{self.data_dir}/keys.toml"

    @property
    def events(self) -> str:
        return f"{self.data_dir}/events.jsonl"

    @property
    def audit(self) -> str:
        return f"{self.data_dir}/audit.jsonl"

    @property
    def audit_of_strangers(self) -> str:
        """Changing calls without a known key: apart, or they would push the others out of the ring."""
        return f"{self.data_dir}/audit-401.jsonl"

    @property
    def health(self) -> str:
        return f"{self.data_dir}/health.json"

    def heartbeat(self, process: str) -> str:
        """Of a program of ours, by its name in supervisord."""
        return f"{self.data_dir}/{process}.beat"

    @property
    def gpu_needs(self) -> str:
        return f"{self.data_dir}/gpu_needs.json"

    @property
    def memory_needs(self) -> str:
        return f"{self.data_dir}/memory_needs.json"

    @property
    def load_times(self) -> str:
        return f"{self.data_dir}/load_times.json"

    @property
    def activity(self) -> str:
        """Folder of when instances were used last, a file of each multiplexer process."""
        return f"{self.data_dir}/activity"

    def activity_of(self, multiplexer: int) -> str:
        return f"{self.activity}/{multiplexer_process(multiplexer)}.json"

    @property
    def series(self) -> str:
        """Folder of what instances did in the course of time, a file for each."""
        return f"{self.data_dir}/series"

    @property
    def benchmarks(self) -> str:
        """Folder of the last measurement of each instance."""
        return f"{self.data_dir}/benchmarks"

    @property
    def console_secret(self) -> str:
        """With which the console signs its sessions."""
        return f"{self.data_dir}/console.secret"

    @property
    def golden(self) -> str:
        """Folder of the golden answers, a file for each instance."""
        return f"{self.data_dir}/golden"

    @property
    def metrics(self) -> str:
        """Folder of what our processes have counted."""
        return f"{self.data_dir}/metrics"

    @property
    def graphs(self) -> str:
        """Folder of the graphs that engines have built."""
        return f"{self.data_dir}/graphs"

    @property
    def cache(self) -> str:
        """Folder of the cached embeddings."""
        return f"{self.data_dir}/cache"

    @property
    def cached_entries(self) -> str:
        """The store's own files; of another format, in another folder."""
        return f"{self.cache}/{FORMAT}"

    @property
    def purges(self) -> str:
        """What of the cache is not used any more."""
        return f"{self.cache}/purges.json"

    @property
    def golden_times(self) -> str:
        """When the golden answers of each replica were last right."""
        return f"{self.cache}/golden.json"

    @property
    def digests(self) -> str:
        """Of the files of models and programs, by which a fingerprint is known."""
        return f"{self.data_dir}/digests.json"

    def manifest(self, model_id: str, revision: str) -> str:
        """revision: as it is pinned, or empty."""
        return f"{self.data_dir}/manifests/{hashlib.sha256(f'{model_id}@{revision}'.encode()).hexdigest()[:32]}.json"

    # -- supervisord -------------------------------------------------------------------------------------------------

    @property
    def supervisord_conf(self) -> str:
        return f"{self.data_dir}/supervisord.conf"

    @property
    def instances_conf(self) -> str:
        """The include file, written from the state file."""
        return f"{self.data_dir}/instances.conf"

    @property
    def supervisord_pid(self) -> str:
        return f"{self.data_dir}/supervisord.pid"

    @property
    def up_lock(self) -> str:
        """Held by the `appliance up` that runs."""
        return f"{self.data_dir}/up.lock"

    def group_lock(self, stripe: int) -> str:
        """Held while the processes of a group are replaced; the groups share a few locks."""
        return f"{self.data_dir}/locks/{stripe:02}.lock"

    @property
    def room_lock(self) -> str:
        """Held while it is decided who has room to start."""
        return f"{self.data_dir}/locks/room.lock"

    @property
    def model_files_lock(self) -> str:
        """Held while what the hub's cache has of a model is deleted, or an instance is created that found it there."""
        return f"{self.data_dir}/locks/model-files.lock"

    def load_lock(self, device: str) -> str:
        """Held by a job that loads a model on a GPU, or on the "cpu", to prove it."""
        return f"{self.data_dir}/locks/load-{device.replace('/', '_')}.lock"

    def core_lock(self, number: int) -> str:
        """Held by an engine while it computes a batch on that core."""
        return f"{self.data_dir}/locks/core-{number}.lock"

    # -- sockets -----------------------------------------------------------------------------------------------------

    @property
    def supervisor_socket(self) -> str:
        return f"{self.data_dir}/supervisor.sock"

    @property
    def control_socket(self) -> str:
        """Of this user and root: a process that can open it may do everything, without a key."""
        return f"{self.data_dir}/control.sock"

    def multiplexer_socket(self, number: int) -> str:
        """Of this user alone. A call through it comes from the gateway, which has authorized it. number: supervisord's
        of the multiplexer process."""
        return f"{self.data_dir}/{multiplexer_process(number)}.sock"

    def multiplexer_backend_socket(self, number: int) -> str:
        """Of this user alone: where the multiplexer forwards to grpcio what it does not answer itself."""
        return f"{self.data_dir}/{multiplexer_process(number)}.grpc.sock"

    @property
    def express(self) -> str:
        """Folder of Envoy's configuration, and of the tables that it follows."""
        return f"{self.data_dir}/express"

    @property
    def express_inside_socket(self) -> str:
        """The express lane for the gateway, of this user alone. A call through it has been authorized."""
        return f"{self.data_dir}/express-in.sock"

    @property
    def express_socket(self) -> str:
        """Envoy's administration, of this user alone."""
        return f"{self.data_dir}/express.sock"

    @property
    def express_valid(self) -> str:
        """Until when the tables are right, in seconds of the epoch. Not in their folder: Envoy reads all of them again
        when one is renamed there."""
        return f"{self.data_dir}/express.valid"

    # -- jobs and logs -----------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> str:
        return f"{self.data_dir}/jobs"

    def job_progress(self, number: int) -> str:
        return f"{self.jobs}/{number}.json"

    @property
    def logs(self) -> str:
        return self.log_dir or f"{self.data_dir}/logs"

    @property
    def deleted_logs(self) -> str:
        """The logs of deleted instances, out of the way of the next ones of their names."""
        return f"{self.logs}/deleted"

    def log(self, process: str) -> str:
        """Of a process of supervisord, or of supervisord itself."""
        return f"{self.logs}/{process}.log"

    def backend_log(self, number: int) -> str:
        """Of the server that a job starts to prove a model."""
        return f"{self.logs}/{job_process(number)}.backend.log"
