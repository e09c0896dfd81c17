"""A process that changes the state is killed before, within and after every system call on the files of the state.

A shim in C, preloaded, counts the calls and ends the process at the n-th point. It can also take back what was not
synced at that moment, as a power cut may: the bytes of files, or the names that renames gave. One warm interpreter
forks a process for each point, and every process begins with what the one before left behind.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.core import state_toml
from appliance.core.instance import InstanceSpec
from appliance.core.problems import Problem
from appliance.core.state import Instance, State, with_instance
from appliance.drivers.statefile import StateFile

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")  # what a sync would cost on a disk is not the question here
UPDATES = 2  # of one process, so that points of a second update are among those tried
MOST_INSTANCES = 5
SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOST 8

static long passed;
static int unsynced[MOST], files;  /* descriptors of files with bytes that were not synced */
static struct { char from[512], to[512], before[65536]; long size; } renamed[MOST];  /* size -1: there was none */
static int names;

static int raw_open(const char *path, int flags, int mode) {
    return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static void cut(const char *call) {
    const char *loses = getenv("CRASH_LOSES");
    if (!strcmp(loses, "bytes"))
        while (files) if (ftruncate(unsynced[--files], 0)) abort();
    if (!strcmp(loses, "names"))
        while (names--) {
            syscall(SYS_renameat2, AT_FDCWD, renamed[names].to, AT_FDCWD, renamed[names].from, 0);
            if (renamed[names].size >= 0) {
                int fd = raw_open(renamed[names].to, O_WRONLY | O_CREAT, 0644);
                if (syscall(SYS_write, fd, renamed[names].before, renamed[names].size) < 0) abort();
            }
        }
    syscall(SYS_write, atoi(getenv("CRASH_TELL")), call, strlen(call));
    kill(getpid(), SIGKILL);
}

static int here(void) { return ++passed == atol(getenv("CRASH_AT")); }

static int ours(const char *path) {
    return getenv("CRASH_AT") && !strncmp(path, getenv("CRASH_FOLDER"), strlen(getenv("CRASH_FOLDER")));
}

static int ours_fd(int fd) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return getenv("CRASH_AT") && readlink(link, path, sizeof path - 1) > 0 && ours(path);
}

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = flags & O_CREAT ? va_arg(more, int) : 0, counted = ours(path);
    va_end(more);
    if (counted && here()) cut("open");
    int found = raw_open(path, flags, mode);
    if (counted && here()) cut("open");
    return found;
}

int open(const char *path, int flags, ...) __attribute__((alias("open64")));

ssize_t write(int fd, const void *bytes, size_t size) {
    if (!ours_fd(fd)) return syscall(SYS_write, fd, bytes, size);
    if (here()) cut("write");
    if (files == MOST) abort();
    unsynced[files++] = dup(fd);
    if (here()) { syscall(SYS_write, fd, bytes, size / 2); cut("write"); }
    ssize_t found = syscall(SYS_write, fd, bytes, size);
    if (here()) cut("write");
    return found;
}

int fsync(int fd) {
    struct stat synced, other;
    int counted = ours_fd(fd);
    if (counted && here()) cut("fsync");
    int found = syscall(SYS_fsync, fd);
    if (!counted || fstat(fd, &synced)) return found;
    if (S_ISDIR(synced.st_mode)) names = 0;
    for (int each = files - 1; each >= 0; each--)
        if (!fstat(unsynced[each], &other) && other.st_ino == synced.st_ino) {
            syscall(SYS_close, unsynced[each]);
            unsynced[each] = unsynced[--files];
        }
    if (here()) cut("fsync");
    return found;
}

int rename(const char *from, const char *to) {
    if (!ours(to)) return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (here()) cut("rename");
    if (names == MOST) abort();
    int fd = raw_open(to, O_RDONLY, 0);
    renamed[names].size = fd < 0 ? -1 : syscall(SYS_read, fd, renamed[names].before, sizeof renamed[names].before);
    if (fd >= 0) syscall(SYS_close, fd);
    snprintf(renamed[names].from, sizeof renamed[names].from, "%s", from);
    snprintf(renamed[names++].to, sizeof renamed[0].to, "%s", to);
    int found = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (here()) cut("rename");
    return found;
}

int close(int fd) {
    int counted = ours_fd(fd);
    if (counted && here()) cut("close");
    int found = syscall(SYS_close, fd);
    if (counted && here()) cut("close");
    return found;
}
"""


# -- in the crashing process -------------------------------------------------------------------------------------------


def grown(before: State) -> State:
    """One instance more; none when there are enough."""
    if len(before.instances) == MOST_INSTANCES:
        return replace(before, instances={})
    first = 10_000 + 2 * len(before.instances)
    spec = InstanceSpec(f"i{before.generation}", "sentence-transformers/some-model", extra_args=("x" * 100,))
    return with_instance(before, Instance(spec, (first,), (first + 1,), created_at="2030-01-01T00:00:00.000Z"))


def after_update(before: State) -> State:
    return replace(grown(before), generation=before.generation + 1)


def crashed(path: Path, point: int, loses: str) -> tuple[int, str]:
    """Updates in a process that ends at that point: how many returned, and the call, or nothing if it came through."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.environ |= {"CRASH_FOLDER": str(path.parent), "CRASH_LOSES": loses, "CRASH_TELL": str(writer)}
            os.environ["CRASH_AT"] = str(point)
            for _ in range(UPDATES):
                opened(path).update(grown)
                os.write(writer, b"+")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    assert ended == (-signal.SIGKILL if told.strip("+") else 0), (point, ended, told)
    return told.count("+"), told.strip("+")


def opened(path: Path) -> StateFile:
    return StateFile(path, now=lambda: "then", on_repair=lambda _: None)


def wrong_after(path: Path, point: int, loses: str, damaged: bool) -> tuple[str, list[str]]:
    """The call at that point, and what was wrong after a crash there."""
    before = opened(path).read()
    if damaged:
        path.write_bytes(b"\x00not a state")
    returned, call = crashed(path, point, loses)
    may_be = [before]
    for _ in range(UPDATES):
        may_be.append(after_update(may_be[-1]))
    wrong = []
    found = opened(path).read()
    if found not in may_be[returned : returned + 2]:
        wrong.append(f"generation {before.generation} + {returned} became {found.generation}")
    if not damaged and before.generation and not holds(path, found):
        wrong.append("the state file itself is damaged")
    if opened(path).update(grown).after != after_update(found) or opened(path).read() != after_update(found):
        wrong.append("the next update did not work")
    if path.read_bytes() != path.with_name("state.toml.good").read_bytes():
        wrong.append("the next update left another good copy")
    if left := list(path.parent.glob("*.new")):
        wrong.append(f"the next update left {left}")
    return call, wrong


def holds(path: Path, state: State) -> bool:
    try:
        return state_toml.load(tomllib.loads(path.read_text())) == state
    except (OSError, ValueError, Problem):
        return False


def crash_everywhere(path: Path, count: int, step: int, loses: str) -> None:
    """Every step-th point to the end of the updates, and again from the first; every other time of a damaged file."""
    calls: Counter[str] = Counter()
    violations: list[str] = []
    point, damaged = 1 - step, False
    while calls.total() < count:
        point += step
        call, wrong = wrong_after(path, point, loses, damaged)
        violations += [f"point {point}, {call}, damaged {damaged}: {each}" for each in wrong]
        if call:
            calls[call] += 1
        else:
            point, damaged = 1 - step, not damaged
            for aside in path.parent.glob("*.bad-*"):
                aside.unlink()
    print(json.dumps({"calls": calls, "violations": violations}))


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("There is no C compiler for the shim that ends processes at a system call")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", f"{folder}/shim.so", f"{folder}/shim.c"]
    subprocess.run(command, check=True, timeout=60)
    return folder / "shim.so"


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loses", ["nothing", "bytes", "names"])
@pytest.mark.parametrize(("count", "step"), [(110, 2), pytest.param(3500, 1, marks=pytest.mark.long)])
def test_after_a_crash_at_any_call_the_state_is_the_old_or_the_new_one(
    shim: Path, count: int, step: int, loses: str
) -> None:
    """Never neither, never older than what was acknowledged, and the next update works."""
    environ = {**os.environ, "LD_PRELOAD": str(shim)}
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        command = [sys.executable, "-m", "tests.faults.test_crash_points", f"{folder}/state.toml"]
        command += [str(count), str(step), loses]
        ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    print(found["calls"])
    assert found["violations"] == []
    assert found["calls"].keys() == {"open", "write", "fsync", "rename", "close"}


if __name__ == "__main__":
    crash_everywhere(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
