"""The loopback hub does what it says, and the real `huggingface_hub` does what the registry relies on.

Every client is a process of its own, because the library reads its settings when it is imported. What the client
does not do is tested too: it checks no digests, resumes no download of another process, and has calls without a
timeout. A version that changes one of these should be noticed here.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from testing.hub import Hub, small_model
from testing.running import eventually

pytestmark = pytest.mark.processes

PRELUDE = """
import json, os, time
import huggingface_hub as hf
from huggingface_hub import constants
from huggingface_hub.file_download import http_get

def attempt(call):
    start = time.monotonic()
    try:
        told = {"result": call(), "error": None}
    except Exception as error:
        cause = error.__cause__ or error
        told = {"error": type(error).__name__, "kinds": [kind.__name__ for kind in type(error).__mro__],
                "cause": type(cause).__name__, "text": str(error)}
    print(json.dumps(told | {"secs": time.monotonic() - start}))
"""
MODEL = "org/small"
FILES = small_model()
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
CHUNK = 10 * 1024 * 1024  # what the client collects before it writes, constants.DOWNLOAD_CHUNK_SIZE
BIG = small_model(floats=3_000_000, shards=1)
BIG_SHARD = "model-00001-of-00001.safetensors"
SNAPSHOT = f'attempt(lambda: hf.snapshot_download("{MODEL}"))'
ONE_FILE = f'attempt(lambda: hf.hf_hub_download("{MODEL}", "{SHARDS[0]}"))'
IMPATIENT = {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as running:
        running.add(MODEL, FILES)
        yield running


def start(hub: Hub, home: Path, code: str, **environ: str) -> "subprocess.Popen[bytes]":
    """A client that runs ``code``, with each `attempt` a line of JSON."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code],
        env=hub.environment(home, **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def outcomes(client: "subprocess.Popen[bytes]", timeout: float = 60.0) -> list[dict[str, Any]]:
    out, err = client.communicate(timeout=timeout)
    assert client.returncode == 0, err.decode()
    return [json.loads(line) for line in out.splitlines()]


def run(hub: Hub, home: Path, code: str, **environ: str) -> list[dict[str, Any]]:
    return outcomes(start(hub, home, code, **environ))


def blobs(home: Path, model_id: str = MODEL) -> dict[str, int]:
    folder = home / "hub" / f"models--{model_id.replace('/', '--')}" / "blobs"
    return {path.name: path.stat().st_size for path in folder.glob("*")}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Slow ones first, in the background of all others.


class Background:
    """Clients that need their time; ``told`` waits for one of them."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        self.clients: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self, name: str, fault: dict[str, Any], suffix: str, code: str, **environ: str) -> None:
        self.hub.add(f"slow/{name}", FILES)
        self.hub.misbehave(f"slow/{name}/{suffix}", **fault)
        code = code.replace(MODEL, f"slow/{name}")
        self.clients[name] = start(self.hub, self.folder / name, code, **environ)

    def told(self, name: str) -> dict[str, Any]:
        return outcomes(self.clients[name])[0]

    def gets(self, name: str) -> int:
        return len([r for r in self.hub.seen("GET", SHARDS[0]) if f"slow/{name}/" in r.path])


@pytest.fixture(scope="module", autouse=True)
def background(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    with Hub() as running:
        slow = Background(running, tmp_path_factory.mktemp("slow"))
        shard = f"resolve/main/{SHARDS[0]}"
        slow.begin("truncated", {"truncated": 50_000}, shard, ONE_FILE)
        slow.begin("hanging", {"hang": 50_000}, shard, ONE_FILE, **IMPATIENT)
        slow.begin("silent", {"silent": True}, "revision/main", SNAPSHOT, **IMPATIENT)
        slow.begin("limited", {"status": 429, "retry_after": 0, "times": 2}, shard, ONE_FILE)
        yield slow
        for client in slow.clients.values():
            client.kill()
            client.communicate()


# What arrives.


def test_a_snapshot_arrives_and_blobs_are_named_by_their_digests(hub: Hub, tmp_path: Path) -> None:
    commit = hub.repos[MODEL].refs["main"]
    pinned = f'attempt(lambda: hf.snapshot_download("{MODEL}", revision="{commit}"))'
    first, again = run(hub, tmp_path, SNAPSHOT + "\n" + pinned)
    folder = Path(first["result"])
    assert folder.name == commit
    assert again["result"] == first["result"]
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    for name, file in hub.repos[MODEL].commits[commit].items():
        assert (folder / name).resolve().name == file.etag
    assert len(hub.seen("GET", SHARDS[0])) == 1
    assert [r.method for r in hub.requests].count("HEAD") == len(FILES)
    listed = json.loads((folder.parents[1] / "trees" / f"{commit}.json").read_text())["files"]
    assert listed[SHARDS[0]]["lfs_sha256"] == sha256(FILES[SHARDS[0]])


def test_listings_name_sizes_and_digests(hub: Hub, tmp_path: Path) -> None:
    code = f"""
info = hf.HfApi().model_info("{MODEL}", files_metadata=True, timeout=5)
attempt(lambda: {{s.rfilename: [s.size, s.lfs.sha256 if s.lfs else s.blob_id] for s in info.siblings}})
attempt(lambda: {{f.path: [f.size, f.lfs.sha256 if f.lfs else f.blob_id]
                 for f in hf.HfApi().list_repo_tree("{MODEL}", recursive=True) if hasattr(f, "size")}})
attempt(lambda: sorted(f.path for f in hf.HfApi().list_repo_tree("{MODEL}")))
attempt(lambda: [f.path for f in hf.HfApi().list_repo_tree("{MODEL}", "1_Pooling")])
"""
    siblings, tree, top, inside = (told["result"] for told in run(hub, tmp_path, code))
    assert siblings == tree
    assert siblings["README.md"] == [8, "913819ef3926e94fa3128ff1695af4717c51a204"]  # as `git hash-object` says
    assert siblings[SHARDS[0]] == [len(FILES[SHARDS[0]]), sha256(FILES[SHARDS[0]])]
    assert set(top) == {name.split("/")[0] for name in FILES}
    assert inside == ["1_Pooling/config.json"]


def test_commits_branches_and_tags_are_kept_apart(hub: Hub, tmp_path: Path) -> None:
    old = hub.repos[MODEL].refs["main"]
    hub.add(MODEL, FILES, revision="refs/pr/1")
    new = hub.add(MODEL, {**FILES, "config.json": b"{}"})
    hub.add(MODEL, {**FILES, "config.json": b"[]"}, revision="v2")
    code = f"""
for revision in ("{old}", "refs/pr/1", "main", "v2", "nothing"):
    attempt(lambda: open(hf.snapshot_download("{MODEL}", revision=revision) + "/config.json").read())
"""
    told = run(hub, tmp_path, code)
    before = FILES["config.json"].decode()
    assert [t.get("result") for t in told[:4]] == [before, before, "{}", "[]"]
    assert told[4]["error"] == "RevisionNotFoundError"
    assert (tmp_path / "hub/models--org--small/refs/main").read_text() == new


def test_a_renamed_model_is_found_under_its_old_name(hub: Hub, tmp_path: Path) -> None:
    hub.rename(MODEL, "org/renamed")
    assert MODEL.replace("/", "--") in run(hub, tmp_path, SNAPSHOT)[0]["result"]
    assert hub.seen("GET", f"{MODEL}/revision/main")
    assert hub.seen("GET", "org/renamed/revision/main")


def test_the_content_network_serves_files_and_never_sees_the_token(hub: Hub, tmp_path: Path) -> None:
    hub.require_token(MODEL, "hf_secret")
    hub.misbehave(".safetensors", redirect=True)
    folder = Path(run(hub, tmp_path, SNAPSHOT, HF_TOKEN="hf_secret")[0]["result"])
    assert {name: (folder / name).read_bytes() for name in SHARDS} == {name: FILES[name] for name in SHARDS}
    assert (folder / SHARDS[0]).resolve().name == sha256(FILES[SHARDS[0]])
    cdn = [request for request in hub.requests if request.cdn]
    assert len(cdn) == len(SHARDS)
    assert not any("authorization" in request.headers for request in cdn)
    assert all(r.headers["authorization"] == "Bearer hf_secret" for r in hub.requests if not r.cdn and "/org" in r.path)


# Who may not.


def test_gated_private_and_unknown(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/private", FILES)
    hub.require_token(MODEL, "hf_secret")
    hub.require_token("org/private", "hf_secret", private=True)
    code = "\n".join(
        f'attempt(lambda: hf.hf_hub_download("{model}", "config.json", token={token!r}))'
        for model in (MODEL, "org/private", "org/unknown")
        for token in (False, "hf_wrong", "hf_secret")
    )
    told = run(hub, tmp_path, code + f'\nattempt(lambda: hf.HfApi().model_info("{MODEL}").gated)')
    gated, missing = "GatedRepoError", "RepositoryNotFoundError"
    assert [t["error"] for t in told] == [gated, gated, None, missing, missing, None, missing, missing, missing, None]
    assert [t["text"][:3] for t in told[:2]] == ["401", "403"]
    assert missing in told[0]["kinds"]
    assert told[-1]["result"] == "manual"  # the listing of a gated model is public


def test_a_missing_file_is_remembered_as_missing(hub: Hub, tmp_path: Path) -> None:
    code = f"""
attempt(lambda: hf.hf_hub_download("{MODEL}", "nothing.json"))
attempt(lambda: hf.try_to_load_from_cache("{MODEL}", "nothing.json") is hf._CACHED_NO_EXIST)
"""
    missing, remembered = run(hub, tmp_path, code)
    assert missing["error"] == "RemoteEntryNotFoundError"
    assert remembered["result"] is True
    commit = hub.repos[MODEL].refs["main"]
    assert (tmp_path / f"hub/models--org--small/.no_exist/{commit}/nothing.json").exists()


def test_refusals_of_the_listing_hide_behind_a_local_error(hub: Hub, tmp_path: Path) -> None:
    """`LocalEntryNotFoundError` says where the client looked last; why it looked there is its cause."""
    for number, status in enumerate((403, 404, 429, 500, 503)):
        hub.add(f"org/m{number}", FILES)
        hub.misbehave(f"org/m{number}/revision/main", status=status, retry_after=0)
    with Hub() as gone:
        pass
    code = f"""
for number in range(5):
    attempt(lambda: hf.snapshot_download(f"org/m{{number}}"))
attempt(lambda: hf.snapshot_download("org/m0", endpoint="{gone.url}"))
"""
    told = run(hub, tmp_path, code)
    assert {t["error"] for t in told} == {"LocalEntryNotFoundError"}
    assert [t["cause"] for t in told] == ["HfHubHTTPError"] * 5 + ["ConnectError"]
    assert all(len(hub.seen("GET", f"org/m{n}/revision/main")) == 1 for n in range(5))


def test_refusals_of_bytes_are_raised_as_they_are(hub: Hub, tmp_path: Path) -> None:
    hub.misbehave(SHARDS[0], status=500, methods=("GET",))
    hub.misbehave(SHARDS[1], reset=50_000, times=1)
    second = ONE_FILE.replace(SHARDS[0], SHARDS[1])
    server_error, reset = run(hub, tmp_path, ONE_FILE + "\n" + second)
    assert server_error["error"] == "HfHubHTTPError"
    assert reset["error"] == "ReadError"  # of the HTTP library, and not tried again
    assert len(hub.seen("GET", SHARDS[1])) == 1
    assert not blobs(tmp_path)


# What is wrong with the bytes.


def test_a_file_shorter_than_announced_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.misbehave(SHARDS[0], short=50_000, methods=("GET",))
    (told,) = run(hub, tmp_path, ONE_FILE)
    assert told["error"] == "OSError"
    assert "should be of size 80112 but has size 50000" in told["text"]
    assert not blobs(tmp_path)


def test_no_digest_is_checked(hub: Hub, tmp_path: Path) -> None:
    """A flipped bit, and a size that agrees with its headers only, pass; nor does a second download repair them."""
    hub.misbehave(SHARDS[0], flipped=50_000)
    hub.misbehave(SHARDS[1], short=50_000)
    hub.misbehave(f"{hub.repos[MODEL].refs['main']}/config.json", flipped=5)
    code = f"""
{SNAPSHOT}
{SNAPSHOT}
attempt(lambda: hf.snapshot_download("{MODEL}", local_files_only=True))
attempt(lambda: [m["path"] for m in hf.HfApi().verify_repo_checksums("{MODEL}").mismatches])
"""
    first, again, offline, mismatches = run(hub, tmp_path, code)
    assert first["error"] is again["error"] is offline["error"] is None
    assert mismatches["result"] == ["config.json", *SHARDS]
    folder = Path(first["result"])
    assert (folder / SHARDS[1]).read_bytes() == FILES[SHARDS[1]][:50_000]
    wrong = (folder / SHARDS[0]).read_bytes()
    assert [n for n, (a, b) in enumerate(zip(wrong, FILES[SHARDS[0]])) if a != b] == [50_000]
    assert len(hub.seen("GET", ".safetensors")) == 2


def test_a_snapshot_counts_as_complete_when_its_names_exist(hub: Hub, tmp_path: Path) -> None:
    """With the cached listing names are checked, sizes never; a folder without a listing is returned as it is."""
    local = f'attempt(lambda: hf.snapshot_download("{MODEL}", local_files_only=True))\n'
    code = f"""
folder = hf.snapshot_download("{MODEL}")
os.truncate(folder + "/{SHARDS[0]}", 7)
{local}
os.remove(folder + "/config.json")
{local}
"""
    truncated, missing = run(hub, tmp_path / "listed", code)
    assert truncated["error"] is None
    assert missing["error"] == "IncompleteSnapshotError"
    _, partial = run(hub, tmp_path / "unlisted", ONE_FILE + "\n" + local)
    assert os.listdir(partial["result"]) == [SHARDS[0]]


# Interrupted.


def test_within_one_process_the_client_continues_from_the_last_ten_mebibytes(hub: Hub, tmp_path: Path) -> None:
    names = ("late", "early", "whole", "small")
    for name in names:
        hub.add(f"big/{name}", BIG)
        hub.misbehave(f"big/{name}", truncated=5_000_000 if name in ("early", "small") else 11_000_000, times=1)
    hub.misbehave("big/whole", ranges=False)
    code = f"""
attempt(lambda: hf.hf_hub_download("big/late", "{BIG_SHARD}"))
attempt(lambda: hf.hf_hub_download("big/early", "{BIG_SHARD}"))
attempt(lambda: hf.hf_hub_download("big/whole", "{BIG_SHARD}"))
constants.DOWNLOAD_CHUNK_SIZE = 1000
attempt(lambda: hf.hf_hub_download("big/small", "{BIG_SHARD}"))
"""
    for told in run(hub, tmp_path, code):
        assert Path(told["result"]).read_bytes() == BIG[BIG_SHARD]
    asked = {name: [r.range for r in hub.seen("GET", BIG_SHARD) if f"big/{name}/" in r.path] for name in names}
    assert asked == {
        "late": [None, f"bytes={CHUNK}-"],
        "early": [None, None],
        "whole": [None, f"bytes={CHUNK}-"],
        "small": [None, "bytes=5000000-"],
    }


def test_after_kill_9_finished_files_stay_and_the_unfinished_one_starts_over(hub: Hub, tmp_path: Path) -> None:
    files = BIG | {"other.safetensors": FILES[SHARDS[0]]}
    hub.add(MODEL, files)
    hub.misbehave(BIG_SHARD, hang=11_000_000)
    client = start(hub, tmp_path, SNAPSHOT)
    name = sha256(BIG[BIG_SHARD])

    def unfinished() -> list[str]:
        found = blobs(tmp_path)
        partial = [blob for blob in found if blob.endswith(".incomplete")]
        return partial if len(found) == len(files) and [found[blob] for blob in partial] == [CHUNK] else []

    (partial,) = eventually(unfinished)
    client.kill()
    client.communicate()
    assert partial.removeprefix(name).startswith(".")
    assert partial.endswith(".incomplete")

    hub.behave()
    before = len(hub.requests)
    code = SNAPSHOT + "\nattempt(lambda: [f.file_path.name for f in hf.scan_cache_dir().incomplete_files])"
    told, left = run(hub, tmp_path, code)
    assert (Path(told["result"]) / BIG_SHARD).read_bytes() == BIG[BIG_SHARD]
    gets = [
        (r.path.rsplit("/")[-1], r.range) for r in hub.requests[before:] if r.method == "GET" and "api" not in r.path
    ]
    assert gets == [(BIG_SHARD, None)]  # no Range: from its first byte
    assert left["result"] == [partial]  # and nobody takes the old partial away
    assert blobs(tmp_path)[partial] == CHUNK


def test_http_get_continues_the_partial_of_a_killed_process(hub: Hub, tmp_path: Path) -> None:
    """The way to resume: a partial of our own, and a blob in its place, which `hf_hub_download` then only links."""
    hub.add(MODEL, BIG)
    hub.misbehave(BIG_SHARD, hang=11_000_000)
    partial = tmp_path / "partial"
    code = f"""
constants.DOWNLOAD_CHUNK_SIZE = 65536
about = hf.get_hf_file_metadata(hf.hf_hub_url("{MODEL}", "{BIG_SHARD}"), timeout=5)
with open("{partial}", "ab") as file:
    attempt(lambda: http_get(about.location, file, resume_size=file.tell(), expected_size=about.size))
blobs = os.path.join(constants.HF_HUB_CACHE, "models--org--small", "blobs")
os.makedirs(blobs)
os.replace("{partial}", os.path.join(blobs, about.etag))
{ONE_FILE.replace(SHARDS[0], BIG_SHARD)}
"""
    client = start(hub, tmp_path, code)
    eventually(lambda: partial.exists() and partial.stat().st_size > 10_900_000)
    client.kill()
    client.communicate()
    have = partial.stat().st_size
    hub.behave()
    got, linked = run(hub, tmp_path, code)
    assert got["error"] is None
    assert Path(linked["result"]).read_bytes() == BIG[BIG_SHARD]
    assert [r.range for r in hub.seen("GET", BIG_SHARD)] == [None, f"bytes={have}-"]


def test_progress_adds_up_over_a_retry(hub: Hub, tmp_path: Path) -> None:
    hub.misbehave(SHARDS[0], truncated=50_000, times=1)
    code = f"""
class Bar:
    def __init__(self, *args, total=None, initial=0, unit=None, desc=None, **kwargs):
        self.n, self.total, self.unit, self.desc = initial, total, unit, desc
        bars.append(self)
    def update(self, n=1): self.n += n
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def nothing(self, *args, **kwargs): pass
    close = refresh = set_description = set_description_str = set_postfix_str = nothing
bars = []
constants.DOWNLOAD_CHUNK_SIZE = 1000
hf.snapshot_download("{MODEL}", tqdm_class=Bar)
attempt(lambda: [[bar.unit, bar.n, bar.total] for bar in bars])
"""
    (told,) = run(hub, tmp_path, code)
    total = sum(len(content) for content in FILES.values())
    assert told["result"] == [["B", total, total], ["B", total, total], [None, len(FILES), len(FILES)]]
    assert [r.range for r in hub.seen("GET", SHARDS[0])] == [None, "bytes=50000-"]


def test_a_slow_download_can_be_watched_from_outside(hub: Hub, tmp_path: Path) -> None:
    hub.misbehave(SHARDS[0], slow=100_000)
    client = start(hub, tmp_path, "constants.DOWNLOAD_CHUNK_SIZE = 1000\n" + ONE_FILE)
    sizes = set()
    while client.poll() is None:
        sizes |= {size for name, size in blobs(tmp_path).items() if name.endswith(".incomplete")}
        time.sleep(0.02)
    (told,) = outcomes(client)
    assert told["secs"] > len(FILES[SHARDS[0]]) / 100_000 - 0.1
    assert len(sizes - {0}) > 5
    assert list(blobs(tmp_path)) == [sha256(FILES[SHARDS[0]])]


# The hub by itself.


def test_ranges_and_errors_without_the_client(hub: Hub) -> None:
    url = f"{hub.url}/{MODEL}/resolve/main/{SHARDS[0]}"
    content = FILES[SHARDS[0]]
    part = requests.get(url, headers={"Range": "bytes=100-199"}, timeout=5)
    assert (part.status_code, part.content) == (206, content[100:200])
    assert part.headers["Content-Range"] == f"bytes 100-199/{len(content)}"
    beyond = requests.get(url, headers={"Range": f"bytes={len(content)}-"}, timeout=5)
    assert (beyond.status_code, beyond.headers["Content-Range"]) == (416, f"bytes */{len(content)}")
    head = requests.head(url, timeout=5)
    assert (head.headers["Content-Length"], head.content) == (str(len(content)), b"")
    assert requests.get(f"{hub.url}/api/models/org/unknown", timeout=5).headers["X-Error-Code"] == "RepoNotFound"
    assert hub.seen("GET", SHARDS[0])[0].range == "bytes=100-199"


def test_the_hub_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())  # of which some may end meanwhile
    with Hub() as hub:
        hub.add(MODEL, FILES)
        hub.misbehave(SHARDS[0], silent=True)
        hub.misbehave(SHARDS[1], hang=10)
        answers = [
            requests.get(f"{hub.url}/{MODEL}/resolve/main/config.json", timeout=5),
            requests.get(f"{hub.url}/{MODEL}/resolve/main/{SHARDS[1]}", timeout=5, stream=True),
        ]
        with pytest.raises(requests.ReadTimeout):
            requests.get(f"{hub.url}/{MODEL}/resolve/main/{SHARDS[0]}", timeout=0.2)
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before
    for answer in answers:
        answer.close()


# How the slow ones ended.


def test_a_truncated_file_is_refused_after_six_attempts(background: Background) -> None:
    told = background.told("truncated")
    assert told["error"] == "RemoteProtocolError"
    assert background.gets("truncated") == 6
    assert not blobs(background.folder / "truncated", "slow/truncated")


def test_a_body_that_hangs_ends_after_six_timeouts(background: Background) -> None:
    told = background.told("hanging")
    assert told["error"] == "ReadTimeout"
    assert background.gets("hanging") == 6
    assert told["secs"] > 10  # 6 timeouts and 5 pauses of a second each


def test_too_many_requests_are_repeated_after_the_time_the_hub_names(background: Background) -> None:
    told = background.told("limited")
    assert told["error"] is None
    heads = [r for r in background.hub.seen("HEAD", SHARDS[0]) if "slow/limited/" in r.path]
    assert len(heads) == 3
    assert heads[2].at - heads[1].at >= 1  # Retry-After and one second more; the first retry comes at once


def test_a_silent_listing_is_awaited_for_ever(background: Background, tmp_path: Path) -> None:
    """Neither variable bounds `model_info` and `list_repo_tree` within `snapshot_download`: callers need a deadline."""
    background.told("hanging")  # which takes more than ten seconds
    assert background.clients["silent"].poll() is None
    code = 'attempt(lambda: hf.HfApi().model_info("slow/silent", revision="main", timeout=0.5))'
    assert run(background.hub, tmp_path, code)[0]["error"] == "ReadTimeout"
