"""The TEI binary: missing, or asked for flags that it does not know."""

import sys
from pathlib import Path

import pytest

from appliance.core.problems import Problem
from appliance.node import tei_binary

pytestmark = pytest.mark.processes
HELP = "Usage: text-embeddings-router --model-id <MODEL_ID>\\n  -p, --port <PORT>\\n  --dense-path <DENSE_PATH>"


def program(folder: Path, body: str) -> str:
    binary = folder / "text-embeddings-router"
    binary.write_text(f"#!{sys.executable}\n{body}\n")
    binary.chmod(0o755)
    return str(binary)


def test_a_flag_that_its_help_does_not_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    binary = program(tmp_path, f'print("{HELP}")')
    tei_binary.refuse_unknown_flags(binary, ["--dense-path", "2_Dense", "--dense-path=x", "--hf-api-token=x", "value"])
    with pytest.raises(Problem) as caught:
        tei_binary.refuse_unknown_flags(binary, ["--dense-paht", "x"])
    assert '"--dense-paht"' in caught.value.message
    assert 'did you mean "--dense-path"' in caught.value.message


@pytest.mark.parametrize("body", ["print('something else')", "raise SystemExit(3)", "import os; os.abort()"])
def test_a_program_that_tells_no_flags_judges_none(tmp_path: Path, body: str) -> None:
    tei_binary.refuse_unknown_flags(program(tmp_path, body), ["--anything"])


def test_another_version_is_asked_anew(tmp_path: Path) -> None:
    binary = program(tmp_path, f'print("{HELP}")')
    with pytest.raises(Problem):
        tei_binary.refuse_unknown_flags(binary, ["--new"])
    Path(binary).unlink()
    tei_binary.refuse_unknown_flags(program(tmp_path, f'print("{HELP} --new")'), ["--new"])


def test_what_is_no_program_is_missing(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    for path in (tmp_path / "nothing", tmp_path / "text", tmp_path):
        with pytest.raises(Problem, match="tei_binary_path"):
            tei_binary.refuse_missing(str(path))
    tei_binary.refuse_missing(sys.executable)
