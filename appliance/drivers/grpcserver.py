"""What every gRPC server of ours has: bounded threads and sizes, health, reflection."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default, DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from appliance.core.addresses import address
from appliance.core.problems import Kind, Problem

IDLE_POLL_SECS = 0.2
HANDSHAKE_SECS = 5.0  # from the connection to its first frame: anybody may hold one open
METADATA_BYTES = 32 * 1024
QUIET_POLLS = 5  # a stream between two of its messages looks idle for a moment
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


class Server:
    """A gRPC server on one port, with grpc.health.v1 and reflection (v1 and v1alpha) for its services."""

    def __init__(
        self,
        threads: int,
        max_message_bytes: int,
        shared_port: bool,
        interceptors: Sequence[grpc.ServerInterceptor] = (),
        longest_connection_secs: int = 0,
        handshake_secs: float = HANDSHAKE_SECS,
    ) -> None:
        """interceptors: what every call passes, as `drivers.grpccalls.AuthenticationInterceptor`.

        longest_connection_secs: a client is then asked to connect again, and its calls go on to their end; 0: never.
        handshake_secs: so long a client may say nothing once it has connected.
        """
        self.health = health.HealthServicer()
        self.services: list[str] = []
        self.grpc = grpc.server(
            ThreadPoolExecutor(max_workers=threads, thread_name_prefix="rpc"),
            interceptors=interceptors,
            maximum_concurrent_rpcs=threads,
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.so_reuseport", int(shared_port)),
                # Clients of ours ask every 20 s of a long call whether we still live; grpc's own limit is 300 s.
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.server_handshake_timeout_ms", round(handshake_secs * 1000)),
                # Envoy lets 16 kB through, the caller's certificate on top; over its soft limit of 8 grpc refuses by
                # chance.
                ("grpc.max_metadata_size", METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", METADATA_BYTES),
                *([("grpc.max_connection_age_ms", longest_connection_secs * 1000)] if longest_connection_secs else []),
            ],
        )

    def add(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self.services.append(service)
        self.grpc.add_registered_method_handlers(service, handlers)
        self.set_health(service, True)

    def set_health(self, service: str, serving: bool) -> None:
        """What grpc.health.v1 says of one service; the empty name, the whole server, is always SERVING."""
        status = health_pb2.HealthCheckResponse
        self.health.set(service, status.SERVING if serving else status.NOT_SERVING)

    def start(
        self,
        host: str | None,
        port: int,
        credentials: grpc.ServerCredentials | None = None,
        own_socket: Path | None = None,
    ) -> None:
        """Open the port where there is a host, with TLS where there are credentials, and a socket for this user alone.

        Raises: Problem that names the port when it is taken.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        names = [*self.services, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1]
        described = descriptions(names)
        reflection.enable_server_reflection(names, self.grpc, described)
        self.grpc.add_generic_rpc_handlers((reflection_v1(names, described),))
        where = address(host or "", port)
        try:
            if host is not None and credentials:
                self.grpc.add_secure_port(where, credentials)
            elif host is not None:
                self.grpc.add_insecure_port(where)
            if own_socket:
                # grpc deletes at its end what bears the name it was given (1.85). A process that an earlier supervisord
                # left behind would delete its successor's socket, too; so each has a name of its own at first.
                born = own_socket.with_name(f"{os.getpid()}.sock")
                before = os.umask(0o077)
                try:
                    self.grpc.add_insecure_port(f"unix:{born}")
                finally:
                    os.umask(before)
                os.replace(born, own_socket)
        except RuntimeError as error:
            raise Problem(
                Kind.UNAVAILABLE, "PORT_CONFLICT", f"Cannot listen on {where}: is the port in use?"
            ) from error
        self.grpc.start()

    def stop(self, grace_secs: float, idle: Callable[[], bool] = lambda: False) -> None:
        """Refuse new calls and let running ones end: until none runs, ``idle`` holds, or ``grace_secs`` passed.

        idle: whether no call has work in hand; calls that merely stay open (an idle stream, a health watch) are then
        ended, because they could hold the process for ever.
        """
        self.health.enter_graceful_shutdown()
        ended = self.grpc.stop(grace_secs)
        quiet = 0
        while not ended.wait(IDLE_POLL_SECS):
            quiet = quiet + 1 if idle() else 0
            if quiet == QUIET_POLLS:
                self.grpc.stop(IDLE_POLL_SECS).wait()
                return


def descriptions(services: Sequence[str]) -> DescriptorPool:
    """What reflection tells of these services: their files, with the JSON name of each field.

    protoc leaves those names out of the Python that it writes (7), and grpcurl then prints `arrow_ipc` for `arrowIpc`.
    """
    pool, known = DescriptorPool(), Default()
    for service in services:
        with suppress(KeyError):  # one without a file, as grpc.reflection.v1 is here
            describe(known.FindFileContainingSymbol(service), pool, set())
    return pool


def describe(file: FileDescriptor, pool: DescriptorPool, done: set[str]) -> None:
    """Add a file to the pool, and before it those that it imports."""
    if file.name in done:
        return
    done.add(file.name)
    for imported in file.dependencies:
        describe(imported, pool, done)
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        fill_json_names(message, file.message_types_by_name[message.name])
    pool.Add(proto)


def fill_json_names(proto: DescriptorProto, message: Descriptor) -> None:
    for field in proto.field:
        field.json_name = message.fields_by_name[field.name].json_name
    for nested in proto.nested_type:
        fill_json_names(nested, message.nested_types_by_name[nested.name])


def reflection_v1(services: Sequence[str], described: DescriptorPool) -> grpc.GenericRpcHandler:
    """grpc.reflection.v1: the messages are those of v1alpha, byte for byte, under another service name."""
    servicer = reflection.ReflectionServicer(services, described)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler})
