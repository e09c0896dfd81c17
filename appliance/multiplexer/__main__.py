"""`python -m appliance.multiplexer [NUMBER]`: the gRPC data path on grpc_port. Any number of these share the port.

NUMBER is supervisord's for this process, 0 if it is left out; the gateway looks for the socket that bears it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partial
from pathlib import Path

import grpc

from appliance.core.cachekey import Purge
from appliance.core.events import Event
from appliance.core.layout import multiplexer_process
from appliance.core.problems import Problem
from appliance.core.program import default_engine
from appliance.core.settings import Settings
from appliance.drivers import configfile, envoy, memory, output
from appliance.drivers.ending import leave
from appliance.drivers.grpccalls import AuthenticationInterceptor
from appliance.drivers.grpcserver import HANDSHAKE_SECS, Server
from appliance.drivers.metrics import Meters
from appliance.drivers.purgefile import PurgeFile
from appliance.drivers.signals import ShutdownSignals
from appliance.files.heartbeat import Heartbeat
from appliance.files.sockets import most_descriptors
from appliance.multiplexer import rerank
from appliance.multiplexer.addressing import Addressing, ByMetadata, Wrapped
from appliance.multiplexer.arrow import ArrowHandlers
from appliance.multiplexer.batch import BatchRunner
from appliance.multiplexer.cluster_keeper import ClusterKeeper
from appliance.multiplexer.embedding_cache import EmbeddingCache
from appliance.multiplexer.fingerprint_watch import FingerprintWatch
from appliance.multiplexer.hybrid import HybridHandler
from appliance.multiplexer.listing_keeper import ListingKeeper
from appliance.multiplexer.metering import Metering
from appliance.multiplexer.node_link import NodeLink
from appliance.multiplexer.own_directory import DIRECTORY, OwnDirectory
from appliance.multiplexer.peers_keeper import PeersKeeper
from appliance.multiplexer.relay import Relay
from appliance.multiplexer.remote_replicas import RemoteReplicas
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.multiplexer.unary_calls import UnaryCalls
from appliance.multiplexer.unary_server import UnaryServer
from appliance.node import cachestores
from appliance.node.authentication import Authenticator
from appliance.node.directory import Directory
from appliance.node.fingerprints import Fingerprints
from appliance.wire.methods import HYBRID, IMAGES, METHODS, MULTIPLEXER, SERVICES, Method, Shape

log = logging.getLogger("appliance.multiplexer")
EXPRESS_RENEW_SECS = 300
OTHERS_MS = 2000  # within which the other multiplexer processes have noticed, too
LAST_WORDS_SECS = 1.0  # for the ends of calls to go out
# Where only our own process connects to grpcio's server: on a busy machine it may stand still before its first frame,
# and a connection that is ended then is a failed call.
OWN_HANDSHAKE_SECS = 60.0
UNARY_THREADS = 1024  # calls in work, and waiting for a permit, on top of one thread for each stream that may be open


def main(number: int) -> int:
    memory.limit_malloc()
    output.configure()
    shutdown = ShutdownSignals()
    try:
        settings = configfile.load(os.environ)
        meters = Meters(Path(settings.layout.metrics), "multiplexer")
        remote = RemoteReplicas(settings)
        pool = ReplicaPool(
            Directory.of(settings),
            NodeLink(settings, meters),
            remote,
            meters,
            queue_settings=settings.queue,
            workers=settings.workers(os.cpu_count() or 1),
            retire_secs=settings.graceful_shutdown_timeout_secs,
            number=number,
        )
        authenticator = Authenticator.of(settings)
        cache = caching(settings, pool, meters, authenticator)
        server, unary = serving(settings, pool, meters, authenticator, cache, number)
        if number == 0:  # for all processes
            keep_listings(settings, remote)
        pool.start()
        credentials = authenticator.certificates.grpc_credentials() if authenticator.certificates else None
        memory.freeze_startup_objects()
        memory.disable_automatic_collection()
        # With TLS the port is grpcio's own; what comes through our socket is answered here all the same.
        plain_host, secure_host = (None, settings.bind) if credentials else (settings.bind, None)
        server.start(secure_host, settings.grpc_port, credentials, unary.behind)
        unary.start(Path(settings.layout.multiplexer_socket(number)), plain_host, settings.grpc_port)
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    log.info("Listening on %s:%s", settings.bind, settings.grpc_port)
    shutdown.wait(tick=memory.collect_young, tidy=memory.collect_and_trim)
    log.info("Stopping: calls in progress may end within %s s", settings.graceful_shutdown_timeout_secs)
    until = time.monotonic() + settings.graceful_shutdown_timeout_secs
    unary.stop(until)
    server.stop(max(0.0, until - time.monotonic()))
    unary.wait_for_ends(time.monotonic() + LAST_WORDS_SECS)
    pool.stop()
    cache.stop()
    return 0


def keep_listings(settings: Settings, remote: RemoteReplicas) -> None:
    """Of the replicas that others run, and of what the peers have."""
    if directory := settings.cluster_directory:
        ClusterKeeper(settings, directory).start()
    elif not settings.has_state_directory:
        ListingKeeper(settings).start()
    if settings.peers:
        PeersKeeper(settings, remote, default_engine(settings)).start()


def caching(settings: Settings, pool: ReplicaPool, meters: Meters, authenticator: Authenticator) -> EmbeddingCache:
    """The cache of this process. Its store is not looked at yet: one that is away costs misses."""
    record = partial(pool.node_link.node.journal.record, instance=None)
    counted = meters.cache()

    def note_damage(words: str) -> None:
        record(Event.CACHE_DAMAGED, message=f"A file of the cache was damaged, and is begun anew: {words}")

    purges = PurgeFile(Path(settings.layout.purges))

    def forget(fingerprint: str, since_ms: int) -> None:
        """What was computed while files changed; the monitor deletes it in the store."""
        until_ms = time.time_ns() // 1_000_000 + OTHERS_MS
        purges.add(Purge(fingerprint, since_ms, until_ms, "files of its model have changed"))

    watch = FingerprintWatch(pool, Fingerprints(settings), forget)
    watch.start()
    return EmbeddingCache(
        watch,
        cachestores.opened(settings, note_damage),
        purges,
        counted,
        lambda event, words: record(event, message=words),
        settings.cache.ttl_secs,
        authenticator.caller_name if settings.cache.scope == "key" else lambda context: "",
        store_is_remote=settings.cache.store in ("redis", "qdrant"),
    )


def serving(
    settings: Settings,
    pool: ReplicaPool,
    meters: Meters,
    authenticator: Authenticator,
    cache: EmbeddingCache,
    number: int,
) -> tuple[Server, UnaryServer]:
    """A server with every service of the multiplexer, and what answers plain calls before it."""
    threads = settings.grpc_max_parallel_streams + UNARY_THREADS + settings.queue.max_size
    timeout_secs = settings.grpc_request_timeout_secs
    reserve = memory.Reserve(settings.memory_budget_bytes)
    largest = settings.grpc_max_message_bytes
    authentication = AuthenticationInterceptor(authenticator.admit_call, largest, timeout_secs, reserve.reservation)
    # Callers who came while Envoy was away find back to the express lane.
    renew_secs = EXPRESS_RENEW_SECS if envoy.binary() else 0
    server = Server(
        threads,
        largest,
        shared_port=True,
        interceptors=[authentication],
        longest_connection_secs=renew_secs,
        handshake_secs=HANDSHAKE_SECS if authenticator.certificates else OWN_HANDSHAKE_SECS,
    )
    metering = Metering(meters, pool.directory)
    relay = Relay(pool, metering, timeout_secs, settings.grpc_max_parallel_streams, reserve, cache)
    runner = BatchRunner(pool, timeout_secs, settings.queue.max_wait_ms / 1000)

    def handlers(methods: list[Method], addressing: Addressing) -> dict[str, grpc.RpcMethodHandler]:
        return {
            method.name: rerank.handler(relay, method, addressing)
            if method.shape is Shape.CLIENT_STREAMING
            else relay.handler(method, addressing)
            for method in methods
        }

    relayed = {
        MULTIPLEXER: handlers([*METHODS, *IMAGES], Wrapped()),
        **{f"tei.v1.{service}": handlers(methods_of(service), ByMetadata(pool.directory)) for service in SERVICES},
        # For an appliance whose peer this is.
        **{own[0].service_name: handlers([*own], ByMetadata(pool.directory)) for own in (IMAGES, (HYBRID,))},
    }
    arrow = ArrowHandlers(runner, metering, settings.grpc_max_message_bytes, relay.stream_permit, reserve, cache)
    hybrid = {"Hybrid": HybridHandler(relay, largest).handler()}
    server.add(MULTIPLEXER, {**relayed[MULTIPLEXER], **hybrid, **arrow.handlers()})
    server.add(DIRECTORY, OwnDirectory(settings, cache.watch).handlers())
    for service, its in relayed.items():
        if service != MULTIPLEXER:
            server.add(service, its)
    plain = {
        f"/{service}/{name}": handler.unary_unary
        for service, its in relayed.items()
        for name, handler in its.items()
        if handler.unary_unary
    } | {f"/{MULTIPLEXER}/{name}": answer for name, answer in arrow.inline().items()}
    calls = UnaryCalls(plain, authenticator.admit_call, reserve, largest)
    behind = Path(settings.layout.multiplexer_backend_socket(number))
    heart = Heartbeat(Path(settings.layout.heartbeat(multiplexer_process(number))))
    # Each call that is forwarded has two descriptors; half of all are for connections of others.
    most_forwarded = min(threads, most_descriptors() // 4)
    return server, UnaryServer(calls, behind, timeout_secs, most_forwarded, renew_secs, heart.beat)


def methods_of(service: str) -> list[Method]:
    return [method for method in METHODS if method.service == service]


if __name__ == "__main__":
    leave(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
