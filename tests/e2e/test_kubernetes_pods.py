"""What `appliance export kubernetes` starts in pods, started here: commands, files and probes of a replica and a front.

No cluster is needed, and none is shown: places, ports and addresses are replaced by those of this machine.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import requests
import tomli_w
from grpc_health.v1 import health_pb2, health_pb2_grpc

from appliance.core.kubernetes import GRPC_PORT, METRICS_PORT
from appliance.export import kubernetes, kubernetes_front
from testing.manifests import Object, as_started, containers
from testing.running import MINILM, eventually, free_ports
from testing.specs import configured, spec
from tests.export.test_kubernetes import CLUSTER, the, worked

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]


class Pods(NamedTuple):
    replica: Object
    front: dict[str, Object]
    ports: dict[int, int]
    processes: dict[str, "subprocess.Popen[bytes]"]

    def probe(self, container: Object) -> bool:
        """Whether the kubelet would find it ready."""
        probe = container["readinessProbe"]
        if "httpGet" in probe:
            url = f"http://127.0.0.1:{self.ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
            return requests.get(url, timeout=5).status_code == 200
        asked = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
        with grpc.insecure_channel(f"127.0.0.1:{self.ports[probe['grpc']['port']]}") as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    room = tmp_path_factory.mktemp("pods")
    config, wanted = configured(), worked([spec("minilm", model_id=MINILM, engine="embedded")])
    texts = kubernetes_front.configuration(config, CLUSTER), kubernetes_front.directory(wanted, CLUSTER)
    found = kubernetes.objects(wanted, config, CLUSTER, *map(tomli_w.dumps, texts))
    objects = [each.content for each in found]
    known = (GRPC_PORT, METRICS_PORT, config.grpc_port, config.http_port)
    ports = dict(zip(known, free_ports(len(known)), strict=True))
    files = the(objects, "ConfigMap", "appliance-front")["data"]
    settings = f"grpc_port = {ports[9001]}\nhttp_port = {ports[9002]}\n"
    (room / "appliance.toml").write_text(settings + files["appliance.toml"])
    here = files["directory.toml"].replace(f"tei-minilm.models.svc:{GRPC_PORT}", f"localhost:{ports[GRPC_PORT]}")
    (room / "directory.toml").write_text(here)
    replica = list(containers(the(objects, "Deployment", "tei-minilm")))[-1]
    front = {each["name"]: each for each in containers(the(objects, "Deployment", "appliance-front"))}
    with ExitStack() as stack:
        processes = {}
        for each in (replica, *front.values()):
            process = started(each, room, ports)
            stack.callback(process.wait, 60)
            stack.callback(process.kill)
            processes[each["name"]] = process
        yield Pods(replica, front, ports, processes)


def started(container: Object, room: Path, ports: dict[int, int]) -> "subprocess.Popen[bytes]":
    places = {
        "/etc/tei-appliance": room,
        "/data": room / f"data-{'replica' in container['name']}",
        "0.0.0.0": "127.0.0.1",
    }

    def here(text: str) -> str:
        for place, own in places.items():
            text = text.replace(place, str(own))
        return str(ports.get(int(text), text)) if text.isdigit() else text

    assert container["command"][:3] == ["tini", "--", "python"]
    argv = [
        sys.executable,
        *(here(as_started(part)) for part in (*container["command"][3:], *container.get("args", ()))),
    ]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TEI_", "HF_"))}
    variables = {each["name"]: here(each["value"]) for each in container["env"] if each["name"].startswith("TEI_")}
    with (room / f"{container['name']}.log").open("wb") as log:
        return subprocess.Popen(argv, env={**kept, **variables}, stdout=log, stderr=log)


def test_pods_become_ready_answer_and_end(pods: Pods) -> None:
    for container in (pods.replica, *pods.front.values()):
        eventually(lambda container=container: pods.probe(container), 120)
    url = f"http://127.0.0.1:{pods.ports[9002]}"
    body = {"model": "minilm", "input": "hello"}

    def vector() -> Any:
        answer = requests.post(f"{url}/v1/embeddings", json=body, timeout=30)
        return answer.status_code == 200 and answer.json()["data"][0]["embedding"]

    assert len(eventually(vector, 60)) == 384
    page = requests.get(f"{url}/metrics", timeout=10).text
    assert 'tei_manager_grpc_requests_total{code="OK",instance="minilm"' in page
    assert "# TYPE tei_manager_queue_size gauge" in page
    for process in reversed(pods.processes.values()):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
