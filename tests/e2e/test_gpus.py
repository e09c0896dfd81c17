"""GPUs as the appliance sees them, through the real NVML binding and a library with invented hardware."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from testing.background import Background
from testing.calling import over_grpc
from testing.nvml import Gpu, Machine
from testing.running import TINY, TINY_WIDTH, RunningAppliance, eventually

pytestmark = pytest.mark.processes

FIRST, SECOND, THIRD = "GPU-0000aaaa-1", "GPU-1111bbbb-2", "GPU-2222cccc-3"
GIB = 1024**3


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def node(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    """An appliance that may use the first and the third of three GPUs."""
    reset(machine)
    environ = {**machine.environ, "CUDA_VISIBLE_DEVICES": f"2,{FIRST}"}
    folder = tmp_path_factory.mktemp("gpus")
    with RunningAppliance(folder, seeds="", settings="health_check_interval_secs = 1", environ=environ) as running:
        yield running


@pytest.fixture(autouse=True)
def clean(machine: Machine, node: RunningAppliance) -> Iterator[None]:
    yield
    for entry in node.get("/instances").json():
        node.delete(f"/instances/{entry['name']}")
    (node.folder / "gpu_needs.json").unlink(missing_ok=True)
    reset(machine)


def gpus(first_used: int = 0, third_used: int = 1000) -> list[Gpu]:
    return [Gpu(FIRST, used_mib=first_used), Gpu(SECOND), Gpu(THIRD, used_mib=third_used, utilization=37)]


def reset(machine: Machine) -> None:
    machine.set(gpus())


def shown(node: RunningAppliance) -> dict[int, dict[str, Any]]:
    return {gpu["index"]: gpu for gpu in node.get("/gpus").json()}


def refused(node: RunningAppliance, **fields: Any) -> tuple[str, str]:
    answer = node.post("/instances", {"name": "a", "model_id": TINY, **fields})
    assert answer.status_code == 422, answer.text
    return answer.json()["code"], answer.json()["error"]


def environ_of(node: RunningAppliance, name: str, replica: int) -> dict[str, str]:
    (process,) = node.processes_of(name, replica)
    found: dict[str, str] = process.environ()
    return found


def test_a_form_shows_where_it_would_be_and_the_series_what_it_takes(machine: Machine, node: RunningAppliance) -> None:
    node.create("seen", gpu_id=0)
    pid = node.wait_ready("seen")["pid"]
    machine.set(gpus(first_used=3000), processes=[(FIRST, pid, 700)])
    eventually(lambda: "734003200" in (node.folder / "gpu_needs.json").read_text())
    with requests.Session() as browser:
        page = browser.get(f"{node.url}/console/create", timeout=20).text
        token = page.partition('X-CSRF-Token": "')[2][:64]
        fields = {"name": "next", "model_id": TINY, "gpu_id": "0", "token": token}
        told = browser.post(f"{node.url}/console/create/check", data=fields, timeout=20).text
    assert "It can be created" in told
    assert "700 MiB of GPU 0" in told
    assert 'value="3879731200"' in told, "used now, and what it would take"
    assert "1000 MiB in use, of 23.4 GiB" in told, "the other GPU"
    seen = eventually(lambda: node.get("/instances/seen/series", minutes=1).json()["gpu_mib"][-1], 40, every=1)
    assert seen == 700


def test_only_visible_gpus_are_shown_with_everything_about_them(node: RunningAppliance) -> None:
    found = shown(node)
    assert sorted(found) == [0, 2]
    assert found[2] == {
        "index": 2,
        "uuid": THIRD,
        "name": "Stub GPU",
        "memory_total": 24000 * 1024**2,
        "memory_used": 1000 * 1024**2,
        "memory_free": 23000 * 1024**2,
        "utilization": 0.37,
        "temperature": 40,
        "error": None,
        "replicas": [],
    }
    text = node.get("/metrics").text
    assert 'tei_manager_gpu_memory_used_bytes{gpu="2"} 1.048576e+09' in text
    assert 'tei_manager_gpu_utilization_ratio{gpu="2"} 0.37' in text


@pytest.mark.parametrize("fields", [{"gpu_id": 1}, {"gpu_ids": [0, 1]}, {"gpu_id": SECOND}, {"gpu_ids": [3]}])
def test_a_gpu_that_is_not_visible_is_refused_with_those_that_are(node: RunningAppliance, fields: Any) -> None:
    code, message = refused(node, **fields)
    assert code == "INVALID_GPU_ID"
    assert f"0 ({FIRST}), 2 ({THIRD})" in message


def test_numbers_and_uuids_reach_the_replicas(node: RunningAppliance) -> None:
    created = node.create("a", gpu_ids=[2, FIRST], replicas=3)
    assert [each["gpu_id"] for each in created["replica_list"]] == [2, FIRST, 2]
    node.wait_ready("a")
    for replica, gpu in enumerate(["2", FIRST, "2"]):
        environ = environ_of(node, "a", replica)
        assert (environ["CUDA_VISIBLE_DEVICES"], environ["CUDA_DEVICE_ORDER"]) == (gpu, "PCI_BUS_ID")
    found = shown(node)
    assert [each["replica"] for each in found[2]["replicas"]] == [0, 2]
    assert found[0]["replicas"] == [{"instance": "a", "replica": 1, "memory_used": None}]


def test_without_a_choice_a_replica_sees_what_the_appliance_sees(node: RunningAppliance) -> None:
    node.create("a")
    node.wait_ready("a")
    assert environ_of(node, "a", 0)["CUDA_VISIBLE_DEVICES"] == f"2,{FIRST}"


def test_auto_takes_the_gpu_with_most_room_and_keeps_it(node: RunningAppliance, machine: Machine) -> None:
    machine.set(gpus(first_used=9000))
    created = node.create("a", gpu_ids="auto", replicas=3)
    assert [each["gpu_id"] for each in created["replica_list"]] == [2, 2, 0]
    machine.set(gpus(first_used=0, third_used=20000))
    node.post("/instances/a/restart")
    node.wait_ready("a")
    assert [each["gpu_id"] for each in node.instance("a")["replica_list"]] == [2, 2, 0]
    assert environ_of(node, "a", 2)["CUDA_VISIBLE_DEVICES"] == "0"


def test_what_was_measured_decides_whether_it_fits(node: RunningAppliance, machine: Machine) -> None:
    node.create("a", gpu_id=0)
    node.wait_ready("a")
    (process,) = node.processes_of("a")
    machine.set(gpus(first_used=15000), [(FIRST, process.pid, 15000), (FIRST, 1, 77)])
    eventually(lambda: (node.folder / "gpu_needs.json").exists())
    assert shown(node)[0]["replicas"] == [{"instance": "a", "replica": 0, "memory_used": 15000 * 1024**2}]
    machine.set(gpus(first_used=15000))  # the peak is kept when it is gone
    fits = node.post("/instances?dry_run=true", {"name": "b", "model_id": TINY, "gpu_ids": "auto"})
    assert fits.json()["replica_list"][0]["gpu_id"] == 2
    code, message = refused(node, name="b", gpu_ids="auto", replicas=2)
    assert code == "INSUFFICIENT_GPU_MEMORY"
    assert "Replica 1 of 2 needs 15000 MiB" in message
    assert "GPU 0 has the most left, 9000 MiB: 6001 MiB are missing" in message
    assert node.post("/instances", {"name": "b", "model_id": TINY, "gpu_ids": "auto", "max_batch_tokens": 99}).ok


def test_a_dry_run_answers_the_same_and_creates_nothing(node: RunningAppliance) -> None:
    body = {"name": "a", "model_id": TINY, "replicas": 2, "gpu_ids": "auto"}
    before = (node.folder / "state.toml").read_bytes() if (node.folder / "state.toml").exists() else b""
    answer = node.post("/instances?dry_run=true", body)
    assert answer.status_code == 200
    assert "Location" not in answer.headers
    assert node.get("/instances").json() == []
    assert node.post("/instances?dry_run=perhaps", body).status_code == 422
    assert node.post("/instances?dry_run=true", {**body, "gpu_ids": [7]}).json()["code"] == "INVALID_GPU_ID"
    after = (node.folder / "state.toml").read_bytes() if (node.folder / "state.toml").exists() else b""
    assert after == before
    created = node.post("/instances?dry_run=false", body)
    assert created.status_code == 201
    same = set(body) | {"port", "prometheus_port", "status", "engine", "replicas_ready"}
    assert {key: created.json()[key] for key in same} == {key: answer.json()[key] for key in same}
    assert node.post("/instances?dry_run=true", body).json()["code"] == "INSTANCE_EXISTS"


def test_a_lost_gpu_has_a_name_and_gets_no_replica(node: RunningAppliance, machine: Machine) -> None:
    machine.set(gpus(), fails={"nvmlDeviceGetMemoryInfo": 15})
    assert shown(node)[0]["memory_used"] is None
    assert "lost" in shown(node)[0]["error"].lower()
    told = node.get("/health").json()
    assert (told["status"], "gpu_lost" in told["reason"]) == ("degraded", True)
    eventually(lambda: [each for each in node.get("/events").json() if each["event"] == "gpu_lost"])
    assert refused(node, gpu_ids="auto")[0] == "INVALID_GPU_ID"
    reset(machine)
    eventually(lambda: node.get("/health").json()["status"] == "healthy")


def test_without_a_driver_there_are_none(node: RunningAppliance, machine: Machine) -> None:
    machine.remove_driver()
    assert node.get("/gpus").json() == []
    assert node.get("/metrics").status_code == 200
    code, message = refused(node, gpu_ids="auto")
    assert (code, "no NVIDIA driver" in message) == ("INVALID_GPU_ID", True)


class Loading(Background):
    """A GPU on which each process of these instances takes its memory as soon as it is there. takes: MiB, by name."""

    def __init__(self, node: RunningAppliance, machine: Machine, takes: dict[str, int]) -> None:
        super().__init__()
        self.node, self.machine, self.takes = node, machine, takes
        self.threads = [threading.Thread(target=self.follow)]

    def follow(self) -> None:
        while not self.ended.wait(0.05):
            found = [(each.pid, mib) for name, mib in self.takes.items() for each in self.node.processes_of(name)]
            held = [(FIRST, pid, mib) for pid, mib in found]
            self.machine.set(gpus(first_used=sum(mib for _, mib in found)), held)


def needs(node: RunningAppliance) -> dict[str, int]:
    found: dict[str, int] = node.node().needs.read()
    return found


def test_two_generations_stand_beside_each_other_where_both_were_measured_to_fit(
    node: RunningAppliance, machine: Machine
) -> None:
    other = {"max_batch_tokens": 4096}

    def plan(**query: str) -> Any:
        url = f"{node.url}/instances/a"
        return requests.patch(url, json=other, params={"dry_run": "true", **query}, timeout=60).json()

    with Loading(node, machine, {"a": 9000, "full": 7000}):
        node.create("a", gpu_id=0)
        node.wait_ready("a")
        eventually(lambda: needs(node))
        assert plan()["replacement"]["strategy"] == "in_place", "nobody has measured it yet"
        assert requests.patch(f"{node.url}/instances/a", json=other, timeout=60).status_code == 200
        node.wait_ready("a")
        eventually(lambda: len(needs(node)) == 2)
        node.post("/instances/a/undo?strategy=in_place")
        node.wait_ready("a")
        known = eventually(lambda: (seen := plan())["replacement"]["strategy"] == "beside" and seen)
        assert known["replacement"]["needs"]["GPU 0"] == 9000 * 1024**2
        node.create("full", gpu_id=0)
        node.wait_ready("full")
        eventually(lambda: plan()["replacement"]["strategy"] == "in_place")
        refusal = plan(strategy="beside")
        assert refusal["code"] == "INSUFFICIENT_MEMORY"
        words = "needs 9000 MiB of GPU 0, and 1000 MiB are missing; there is, in MiB: a 9000, full 9000"  # as measured
        assert words in refusal["error"]


def test_an_idle_one_on_demand_gives_way_on_its_gpu(node: RunningAppliance, machine: Machine) -> None:
    with Loading(node, machine, {"idle": 9000, "other": 9000, "kept": 9000}):
        for name in ("idle", "other"):
            node.create(name, gpu_id=0, start="on_demand")
            assert over_grpc(node, name) == TINY_WIDTH
        eventually(lambda: needs(node))
        node.create("kept", gpu_id=0)
        node.wait_ready("kept")
        assert (node.instance("idle")["status"], node.instance("other")["status"]) == ("sleeping", "running")
        assert over_grpc(node, "idle") == TINY_WIDTH
        assert (node.instance("other")["status"], node.instance("kept")["status"]) == ("sleeping", "running")
        code, message = refused(node, gpu_id=0, replicas=2)
        assert code == "INSUFFICIENT_MEMORY"
        assert '"a" needs 18000 MiB of GPU 0' in message
        assert "kept 9000" in message
