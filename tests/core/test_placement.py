"""Placement: the GPU with the most memory left, what is on its way counted, and a refusal that says what is missing."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import placement
from appliance.core.instance import AUTO
from appliance.core.placement import UNMEASURED_BYTES, Device, Occupancy
from appliance.core.problems import Problem
from appliance.core.state import Instance
from testing.specs import LAW, instance, spec

GIB = 1024**3


def device(index: int, free: int | None = 24 * GIB, uuid: str = "") -> Device:
    total = None if free is None else 80 * GIB
    used = None if free is None else 80 * GIB - free
    return Device(index, uuid or f"GPU-{index:08x}-aaaa", "H200", total, used, free, 0.0, 40)


def refused(*arguments: object) -> Problem:
    with pytest.raises(Problem) as caught:
        placement.place(*arguments)  # type: ignore[arg-type]
    return caught.value


def test_replicas_go_where_most_memory_is_left() -> None:
    devices = [device(0, 10 * GIB), device(1, 30 * GIB), device(2, 20 * GIB)]
    assert placement.place(1, devices, {}, 8 * GIB) == (1,)
    assert placement.place(4, devices, {}, 8 * GIB) == (1, 1, 2, 1)
    assert placement.place(3, [device(0), device(1)], {}, 2 * GIB) == (0, 1, 0)


def test_what_was_never_measured_spreads_and_never_refuses() -> None:
    assert placement.place(4, [device(0, 6 * GIB), device(1, 6 * GIB)], {}, None) == (0, 1, 0, 1)
    assert placement.place(1, [device(0, 0)], {}, None) == (0,)


def test_replicas_on_their_way_have_taken_their_memory_already() -> None:
    devices = [device(0, 30 * GIB), device(1, 20 * GIB)]
    assert placement.place(1, devices, {0: 15 * GIB}, 1 * GIB) == (1,)


def test_a_refusal_says_what_is_missing() -> None:
    problem = refused(2, [device(0, 6 * GIB)], {0: 1 * GIB}, 4 * GIB)
    assert problem.code == "INSUFFICIENT_GPU_MEMORY"
    assert "Replica 1 of 2 needs 4096 MiB" in problem.message
    assert "GPU 0 has the most left, 1024 MiB: 3073 MiB are missing" in problem.message


def test_a_gpu_that_tells_nothing_gets_nothing() -> None:
    assert placement.place(1, [device(0, None), device(1, 1 * GIB)], {}, 1 * GIB) == (1,)
    assert "no GPU tells" in refused(1, [device(0, None)], {}, None).message


@LAW
@given(
    st.lists(st.integers(0, 96), min_size=1, max_size=8),
    st.integers(1, 16),
    st.one_of(st.none(), st.integers(1, 40)),
    st.dictionaries(st.integers(0, 7), st.integers(0, 20)),
)
def test_a_placement_fits_or_is_refused(
    free: list[int], replicas: int, need: int | None, taken: dict[int, int]
) -> None:
    devices = [device(index, each * GIB) for index, each in enumerate(free)]
    pending = {index: each * GIB for index, each in taken.items()}
    room = sum(max(0, each - taken.get(index, 0)) // need for index, each in enumerate(free)) if need else None
    try:
        placed = placement.place(replicas, devices, pending, need and need * GIB)
    except Problem:
        assert room is not None
        assert room < replicas
        return
    assert len(placed) == replicas
    assert room is None or room >= replicas
    for index, each in enumerate(free):
        assert need is None or placed.count(index) * need <= max(0, each - taken.get(index, 0))


VISIBLE = [
    (None, [0, 1, 2]),
    ("", []),
    ("-1", []),
    ("NoDevFiles", []),
    ("0", [0]),
    ("2,0", [0, 2]),
    ("1,9,0", [1]),
    ("GPU-00000001-aaaa", [1]),
    ("GPU-00000002", [2]),
    ("GPU-0", []),  # the beginning of three: CUDA takes none
    (" 1 , 2 ", [1, 2]),
]


@pytest.mark.parametrize(("variable", "wanted"), VISIBLE)
def test_visible_devices_are_read_as_cuda_does(variable: str | None, wanted: list[int]) -> None:
    assert [each.index for each in placement.visible([device(0), device(1), device(2)], variable)] == wanted


def test_an_unknown_gpu_is_refused_with_those_there_are() -> None:
    devices = [device(0), device(3)]
    placement.refuse_unknown(spec(gpu_ids=[0, 3, "GPU-00000003-aaaa", "GPU-00000000"]), devices)
    placement.refuse_unknown(spec(gpu_ids="auto"), devices)
    for fields in ({"gpu_id": 1}, {"gpu_ids": [0, 9]}, {"gpu_id": "GPU-5"}):
        with pytest.raises(Problem) as caught:
            placement.refuse_unknown(spec(**fields), devices)
        assert caught.value.code == "INVALID_GPU_ID"
        assert "0 (GPU-00000000-aaaa), 3 (GPU-00000003-aaaa)" in caught.value.message
    with pytest.raises(Problem, match="no NVIDIA driver"):
        placement.refuse_unknown(spec(gpu_ids="auto"), [])


def test_workloads_differ_by_model_and_limits_only() -> None:
    assert placement.workload(spec("a", gpu_id=0, port=9999)) == placement.workload(
        spec("b", gpu_ids="auto", replicas=3)
    )
    for fields in ({"max_batch_tokens": 1}, {"dtype": "float16"}, {"revision": "x"}, {"pooling": "cls"}):
        assert placement.workload(spec(**fields)) != placement.workload(spec())


def test_auto_is_a_word_and_not_a_gpu() -> None:
    assert spec(gpu_ids="auto").gpu_ids == AUTO
    assert spec(gpu_ids="auto").mapping()["gpu_ids"] == "auto"
    assert spec(gpu_ids="auto").gpus == ()
    for wrong in (["auto"], "none", "0", ["GPU 0"], [""], [-1], [True]):
        with pytest.raises(Problem, match='"gpu_ids"'):
            spec(gpu_ids=wrong)
    assert UNMEASURED_BYTES > 0


def beside(*others: Instance, need: int | None = None, answering: tuple[str, int, int] | None = None) -> Any:
    devices = (device(0, 30 * GIB), device(1, 24 * GIB))
    needs = {placement.workload(spec()): need} if need else {}
    seen = Occupancy(devices, needs, frozenset([answering] if answering else []))
    return placement.place_beside(others, spec("new", gpu_ids="auto"), seen)


def test_replicas_that_do_not_answer_yet_are_counted() -> None:
    other = instance(spec("other", gpu_ids="auto", replicas=2), placed=(0, 1))
    assert beside() == (0,)
    assert beside(other, need=10 * GIB) == (0,)
    assert beside(other, need=10 * GIB, answering=("other", 1, 1)) == (1,)
    assert beside(replace(other, launch=2), need=10 * GIB, answering=("other", 1, 1)) == (0,)  # of its last launch


def test_what_shall_not_run_takes_nothing() -> None:
    other = instance(spec("other", gpu_ids=[0]))
    assert beside(other, need=10 * GIB) == (1,)
    assert beside(replace(other, wanted="stopped"), need=10 * GIB) == (0,)
    assert beside(replace(other, quarantined={0: "why"}), need=10 * GIB) == (0,)


def test_gpus_are_chosen_only_where_that_is_asked_for() -> None:
    assert placement.place_beside((), spec("new", gpu_id=1), Occupancy()) == ()
    assert placement.place_beside((), spec("new"), Occupancy()) == ()


def test_those_that_sleep_are_spread_as_those_that_run() -> None:
    occupancy = Occupancy(tuple(device(index) for index in range(3)))
    instances: list[Instance] = []
    for number in range(6):
        wanted = spec(f"s{number}", gpu_ids="auto", start="on_demand")
        (gpu,) = placement.place_beside(instances, wanted, occupancy)
        instances.append(instance(wanted, placed=(gpu,), wanted="stopped", sleeping=True))
    assert [each.placed for each in instances] == [(0,), (1,), (2,), (0,), (1,), (2,)]


def test_one_that_sleeps_gets_a_gpu_that_could_hold_it() -> None:
    small, large = replace(device(0, 22 * GIB), memory_total=24 * GIB), device(1, 20 * GIB)
    wanted = spec("a", gpu_ids="auto", start="on_demand")
    needs = {placement.workload(wanted): 40 * GIB}
    assert placement.place_beside([], wanted, Occupancy((small, large), needs)) == (1,)
    with pytest.raises(Problem, match="40960 MiB") as caught:
        placement.place_beside([], wanted, Occupancy((small,), needs))
    assert caught.value.code == "INSUFFICIENT_GPU_MEMORY"


def test_what_leaves_makes_room_for_what_comes_in_its_place() -> None:
    wanted = spec("a", gpu_ids="auto")
    ours = instance(wanted, placed=(0,))
    needs, answering = {placement.workload(wanted): 16 * GIB}, frozenset({("a", ours.launch, 0)})
    occupancy = Occupancy((device(0, 8 * GIB), device(1, None)), needs, answering)
    left = placement.without(occupancy, [ours])
    assert [each.memory_free for each in left.devices] == [24 * GIB, None]
    assert placement.place_beside([], wanted, left) == (0,)
    assert placement.without(replace(occupancy, answering=frozenset()), [ours]) == replace(
        occupancy, answering=frozenset()
    )
    full = Occupancy((device(0, 79 * GIB),), needs, answering)
    assert placement.without(full, [ours]).devices[0].memory_free == 80 * GIB


def test_what_one_that_loads_has_by_now_is_not_counted_twice() -> None:
    """Calls were refused for good while it warmed up."""
    loading = instance(spec("l", gpu_id=0))
    needs = {placement.workload(loading.spec): 12 * GIB}
    seen = Occupancy((device(0, 13 * GIB),), needs, held={("l", loading.launch, 0): 11 * GIB})
    assert placement.pending([loading], seen) == {0: 1 * GIB}
    assert placement.pending([loading], replace(seen, held={})) == {0: 12 * GIB}
    assert placement.pending([loading], replace(seen, held={("l", loading.launch, 0): 13 * GIB})) == {0: 0}
