"""The configuration file: errors name the file, and the binary, the environment and PATH count in their order."""

from pathlib import Path

import pytest

from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.drivers import configfile


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "PATH": str(tmp_path / "bin"), "TEI_MANAGER_DATA_DIR": "/data"}


def loaded(environ: dict[str, str], folder: Path, content: str | bytes, **flags: object) -> Settings:
    (folder / "appliance.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    return configfile.load({**environ, "TEI_MANAGER_CONFIG": str(folder / "appliance.toml")}, flags)


def install_tei(tmp_path: Path) -> str:
    (tmp_path / "bin").mkdir()
    binary = tmp_path / "bin" / "text-embeddings-router"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    return str(binary)


def test_without_a_file_there_are_defaults(environ: dict[str, str]) -> None:
    assert configfile.load(environ).api_port == 9000


def test_flag_beats_environment_beats_file(environ: dict[str, str], tmp_path: Path) -> None:
    file = "api_port = 7001\ngrpc_port = 7002\nhttp_port = 7003\n"
    environ |= {"TEI_MANAGER_GRPC_PORT": "7012", "TEI_MANAGER_HTTP_PORT": "7013"}
    settings = loaded(environ, tmp_path, file, http_port=7023)
    assert (settings.api_port, settings.grpc_port, settings.http_port) == (7001, 7012, 7023)


def test_a_file_that_is_missing_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(Problem, match=str(path)) as caught:
            configfile.load({**environ, "TEI_MANAGER_CONFIG": str(path)})
        assert caught.value.kind == Kind.INVALID


NOT_TOML = ["api_port", "api_port = ", "= 1", "a = 1\na = 2", b"\xff\xfe", "\0", "[[instances]"]


@pytest.mark.parametrize("content", NOT_TOML)
def test_a_file_that_is_not_toml_is_named(environ: dict[str, str], tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(Problem, match=r"appliance\.toml") as caught:
        loaded(environ, tmp_path, content)
    assert caught.value.kind == Kind.INVALID


def test_a_wrong_key_in_the_file_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r'"api_prot".*did you mean "api_port"'):
        loaded(environ, tmp_path, "api_prot = 1")


def test_tei_is_found_on_the_path_unless_somebody_says_where_it_is(environ: dict[str, str], tmp_path: Path) -> None:
    assert configfile.load(environ).tei_binary_path == ""
    binary = install_tei(tmp_path)
    assert configfile.load(environ).tei_binary_path == binary
    assert loaded(environ, tmp_path, 'tei_binary_path = "/file"').tei_binary_path == "/file"
    environ["TEI_BINARY_PATH"] = "/env"
    assert loaded(environ, tmp_path, 'tei_binary_path = "/file"').tei_binary_path == "/env"


def test_an_empty_path_in_the_file_asks_for_the_embedded_engine(environ: dict[str, str], tmp_path: Path) -> None:
    install_tei(tmp_path)
    assert loaded(environ, tmp_path, 'tei_binary_path = ""').tei_binary_path == ""


def test_what_is_not_executable_is_not_installed(environ: dict[str, str], tmp_path: Path) -> None:
    Path(install_tei(tmp_path)).chmod(0o644)
    assert configfile.load(environ).tei_binary_path == ""


@pytest.mark.skipif(Path("/data").exists(), reason="this machine has /data")
def test_without_a_home_the_data_folder_must_be_named(environ: dict[str, str], tmp_path: Path) -> None:
    """Below /tmp somebody else could have made it first."""
    del environ["HOME"]
    assert configfile.load(environ).data_dir == "/data"
    named = environ.pop("TEI_MANAGER_DATA_DIR")
    for use in (configfile.load, configfile.data_dir):
        with pytest.raises(Problem, match="TEI_MANAGER_DATA_DIR"):
            use(environ)
    assert configfile.load(environ, {"data_dir": named}).data_dir == named
    assert loaded(environ, tmp_path, f'data_dir = "{named}"').data_dir == named


@pytest.mark.skipif(Path("/data").exists(), reason="this machine has /data")
def test_the_data_folder_is_the_user_s_where_there_is_no_data(environ: dict[str, str], tmp_path: Path) -> None:
    del environ["TEI_MANAGER_DATA_DIR"]
    settings = configfile.load(environ)
    assert settings.data_dir == configfile.data_dir(environ) == f"{tmp_path}/.local/share/tei-appliance"
    assert settings.state_file == f"{settings.data_dir}/state.toml"


def test_the_binarys_name_alone_is_that_in_path_or_none(environ: dict[str, str], tmp_path: Path) -> None:
    """So tei-manager's configuration has it where nothing is installed."""
    environ["PATH"] = str(tmp_path / "bin")
    written = 'tei_binary_path = "text-embeddings-router"'
    assert loaded(environ, tmp_path, written).tei_binary_path == ""
    (tmp_path / "bin").mkdir()
    binary = tmp_path / "bin" / "text-embeddings-router"
    binary.touch(mode=0o755)
    assert loaded(environ, tmp_path, written).tei_binary_path == str(binary)
    assert configfile.load({**environ, "TEI_BINARY_PATH": "text-embeddings-router"}).tei_binary_path == str(binary)
