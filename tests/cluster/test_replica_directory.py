"""The directory of a cluster, with handles as Serve gives them."""

import asyncio
from typing import Any

from appliance.cluster.replica_directory import ClusterDirectory, Deployed
from appliance.core.cluster import directory_answer


class Handles:
    """By application; told: what its replicas answer, or an exception."""

    def __init__(self, **told: Any) -> None:
        self.told = {f"tei-{name}": answer for name, answer in told.items()}
        self.asked: list[str] = []
        self.called: list[str] = []
        self.may_answer = asyncio.Event()

    def __call__(self, deployment: str, application: str) -> Any:
        return Handle(self, application)


class Handle:
    def __init__(self, handles: Handles, application: str) -> None:
        self.handles, self.application = handles, application
        self.address = self

    def broadcast(self, method: str) -> Any:
        assert method == "address"
        return self

    async def results_async(self) -> Any:
        self.handles.asked.append(self.application)
        told = self.handles.told[self.application]
        if isinstance(told, Exception):
            raise told
        return told

    async def remote(self) -> None:
        self.handles.called.append(self.application)
        await self.handles.may_answer.wait()


def replica(id: str, port: int) -> dict[str, Any]:
    return {"id": id, "address": f"10.0.0.1:{port}", "pid": port}


def directory(handles: Handles, running: dict[str, Deployed], *on_demand: str) -> ClusterDirectory:
    found = ClusterDirectory(lambda: running, handles)
    names = [name.removeprefix("tei-") for name in handles.told]
    found.reconfigure({"instances": [{"name": name, "model_id": "m"} for name in names], "on_demand": list(on_demand)})
    return found


def answer_of(found: ClusterDirectory) -> Any:
    return asyncio.run(found.answer())


def test_each_instance_is_told_with_the_addresses_of_its_replicas() -> None:
    handles = Handles(a=[replica("y", 2), replica("x", 1)], b=[])
    told = answer_of(directory(handles, {"tei-a": Deployed("RUNNING", 2), "tei-b": Deployed("DEPLOYING", 0)}))
    answer = directory_answer(told)
    assert [(each["name"], each["addresses"], each["arrival"]) for each in answer.tables] == [
        ("a", ["10.0.0.1:1", "10.0.0.1:2"], "starting"),
        ("b", [], "starting"),
    ]
    assert [each.id for each in answer.replicas["a"]] == ["x", "y"]
    assert answer.incomplete == frozenset()


def test_an_answer_that_lacks_a_replica_which_serve_counts_is_incomplete() -> None:
    handles = Handles(a=[replica("x", 1)], b=RuntimeError("an actor died"))
    told = answer_of(directory(handles, {"tei-a": Deployed("RUNNING", 2), "tei-b": Deployed("RUNNING", 1)}))
    assert directory_answer(told).incomplete == {"a", "b"}


def test_what_becomes_of_one_without_replicas() -> None:
    handles = Handles(a=[], b=[], c=[])
    running = {
        "tei-a": Deployed("RUNNING", 0),
        "tei-b": Deployed("DEPLOY_FAILED", 0),
        "tei-c": Deployed("DEPLOYING", 0),
    }
    told = answer_of(directory(handles, running, "a"))
    assert [each["arrival"] for each in told["instances"]] == ["sleeping", "failed", "starting"]


def test_many_who_ask_at_once_are_one_question() -> None:
    handles = Handles(a=[replica("x", 1)])
    found = directory(handles, {"tei-a": Deployed("RUNNING", 1)})

    async def ask() -> None:
        await asyncio.gather(*(found.answer() for _ in range(20)))

    asyncio.run(ask())
    assert handles.asked == ["tei-a"]


def test_a_wake_waits_for_the_replica_and_callers_share_it() -> None:
    async def run() -> None:
        handles = Handles(a=[])
        found = directory(handles, {}, "a")
        waiting = [asyncio.create_task(found.wake("a")) for _ in range(5)]
        await asyncio.sleep(0.01)
        assert handles.called == ["tei-a"]
        assert not any(each.done() for each in waiting)
        handles.may_answer.set()
        assert await asyncio.gather(*waiting) == [True] * 5
        assert await found.wake("unknown") is False

    asyncio.run(run())
