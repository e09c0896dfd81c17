"""Damaged Arrow streams are read or refused, and never end the process that reads them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
READ = """
import random, sys
import pyarrow as pa
from appliance.core.problems import Problem
from appliance.wire.arrow import read_rows

words = ["a", None, "bonjour", "x" * 40, "the same", "the same", ""] * 30
plain = pa.array(words)
column = {
    "string": plain,
    "large_string": plain.cast(pa.large_string()),
    "string_view": plain.cast(pa.string_view()),
    "dictionary": plain.dictionary_encode(),
}[sys.argv[1]]
sink = pa.BufferOutputStream()
batch = pa.record_batch({"text": column})
with pa.ipc.new_stream(sink, batch.schema) as writer:
    writer.write_batch(batch)
    writer.write_batch(batch)
good, dice = sink.getvalue().to_pybytes(), random.Random(7)
assert len(read_rows(good, 10**8)) == 2 * len(words)
refused = 0
for _ in range(int(sys.argv[2])):
    bad = bytearray(good)
    for _ in range(dice.randrange(1, 6)):
        bad[dice.randrange(len(bad))] = dice.randrange(256)
    try:
        read_rows(bytes(bad), 10**8)
    except Problem:
        refused += 1
print(refused)
"""


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_a_damaged_stream_ends_no_process(kind: str) -> None:
    command = [sys.executable, "-c", READ, kind, "2500"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout) > 100
