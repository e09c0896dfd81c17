"""Many HTTP callers with single texts: each gets what it gets alone, whether its text travelled alone or not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests

from testing.engines import FAMILIES
from testing.running import RunningAppliance

pytestmark = pytest.mark.processes

CALLERS, TURNS = 24, 6
TEXTS = [f"{word} number {number}" for number in range(CALLERS) for word in ("a", "the other", "yet one more")]
LONG = "long " * 400
STABLE = ("X-Compute-Characters", "X-Compute-Tokens", "X-TEI-Instance", "X-TEI-Token-Ids")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("combined"), seeds="", cache=True) as box:
        box.create("small", model_id=str(FAMILIES / "bert-cls"))
        box.wait_ready("small")
        yield box


def ask(session: requests.Session, box: RunningAppliance, text: str, **headers: str) -> requests.Response:
    body = {"inputs": text, "truncate": True}
    url = f"http://127.0.0.1:{box.http_port}/embed"
    return session.post(url, json=body, headers={"X-TEI-Instance": "small", **headers}, timeout=60)


def test_each_gets_what_it_gets_alone(running: RunningAppliance) -> None:
    with requests.Session() as session:
        alone = {text: ask(session, running, text, **{"X-TEI-Cache": "bypass"}) for text in [*TEXTS, LONG]}
        refused = ask(session, running, "")
        fingerprint = ask(session, running, "any").headers["X-TEI-Fingerprint"]
    before = calls(running, "EmbedArrow")

    def caller(number: int) -> list[tuple[str, requests.Response]]:
        own = [TEXTS[(number * 5 + turn * 7) % len(TEXTS)] for turn in range(TURNS)]
        with requests.Session() as session:
            texts = [*own, "" if number % 5 == 0 else LONG]
            return [(text, ask(session, running, text)) for text in texts]

    with ThreadPoolExecutor(CALLERS) as threads:
        answers = [answer for answers in threads.map(caller, range(CALLERS)) for answer in answers]
    assert calls(running, "EmbedArrow") > before, "some travelled together"
    outcomes: dict[str, list[str]] = {}
    for text, answer in answers:
        if not text:
            assert (answer.status_code, answer.json()) == (refused.status_code, refused.json())
            continue
        assert answer.status_code == 200, answer.text
        np.testing.assert_allclose(answer.json(), alone[text].json(), atol=1e-5)
        assert [answer.headers.get(key) for key in STABLE] == [alone[text].headers.get(key) for key in STABLE]
        assert answer.headers["X-TEI-Fingerprint"] == fingerprint
        outcomes.setdefault(text, []).append(answer.headers["X-TEI-Cache"])
    assert {outcome for each in outcomes.values() for outcome in each} == {"hit", "miss"}
    with requests.Session() as session:
        assert [ask(session, running, text).headers["X-TEI-Cache"] for text in outcomes] == ["hit"] * len(outcomes)


def test_what_a_request_says_about_the_cache_holds_for_it_alone(running: RunningAppliance) -> None:
    def caller(number: int) -> list[str | None]:
        headers = {"X-TEI-Cache": "bypass"} if number % 2 else {}
        with requests.Session() as session:
            return [
                ask(session, running, f"kept {turn}", **headers).headers.get("X-TEI-Cache") for turn in range(TURNS)
            ]

    with ThreadPoolExecutor(CALLERS) as threads:
        for number, told in enumerate(threads.map(caller, range(CALLERS))):
            assert set(told) <= ({"bypass"} if number % 2 else {"hit", "miss"})


def calls(box: RunningAppliance, method: str) -> float:
    text = box.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("tei_manager_grpc_requests_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'"{method}"' in line)
