"""Reads appliance.toml, the environment and PATH, for `core.settings` to parse."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli

from appliance.core import settings
from appliance.core.problems import invalid, quoted
from appliance.core.settings import Settings

CONFIG_VARIABLE = "TEI_MANAGER_CONFIG"  # with it `appliance up --config` passes its file on to all programs
ROOT = Path("/")
# The configuration of the systemd unit, and the data folder that belongs to it.
SERVICE_CONFIG, SERVICE_DATA_DIR = "etc/tei-appliance/appliance.toml", "var/lib/tei-appliance"
TEI_BINARY = "text-embeddings-router"


def chosen(flag: str | None, environ: Mapping[str, str], root: Path = ROOT) -> str:
    """The configuration file: the flag's, else the environment's ("": none), else the service's if it exists."""
    if flag or CONFIG_VARIABLE in environ:
        return flag or environ[CONFIG_VARIABLE]
    service = str(root / SERVICE_CONFIG)
    return service if os.path.exists(service) else ""


def load(environ: Mapping[str, str], flags: Mapping[str, Any] | None = None, root: Path = ROOT) -> Settings:
    """The settings of this process. Raises: Problem that names the file or the key."""
    path = environ.get(CONFIG_VARIABLE)
    file = read(Path(path)) if path else {}
    if TEI_BINARY in (file.get("tei_binary_path"), environ.get("TEI_BINARY_PATH")):  # its name alone: that in PATH
        file = {key: value for key, value in file.items() if key != "tei_binary_path"}
        environ = {key: value for key, value in environ.items() if key != "TEI_BINARY_PATH"}
    installed = {} if "tei_binary_path" in file or environ.get("TEI_BINARY_PATH") else installed_binary(environ)
    has_data_dir = (flags or {}).get("data_dir") or environ.get("TEI_MANAGER_DATA_DIR") or "data_dir" in file
    data_dir = "" if has_data_dir else default_data_dir(environ, root)
    return settings.parse({**installed, **file}, environ, flags or {}, data_dir)


def read(path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(path.read_text(encoding="utf-8-sig"))  # editors of some systems put a mark at its begin
    except OSError as error:
        raise invalid(f"Cannot read the configuration file {quoted(path, 1000)}: {error.strerror}") from error
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The configuration file {quoted(path, 1000)} is not TOML: {error}") from error


def installed_binary(environ: Mapping[str, str]) -> dict[str, Any]:
    binary = shutil.which(TEI_BINARY, path=environ.get("PATH"))
    return {"tei_binary_path": binary} if binary else {}


def data_dir(environ: Mapping[str, str]) -> str:
    """The data folder alone, for the engine: its flags have everything else."""
    return environ.get("TEI_MANAGER_DATA_DIR") or default_data_dir(environ)


def default_data_dir(environ: Mapping[str, str], root: Path = ROOT) -> str:
    """The service's with the service's configuration; else `/data` if it can be written (the container image); else a
    folder of this user.

    Raises: Problem without a home folder. /tmp is no alternative: another user could have put a folder with another
    state there.
    """
    service = str(root / SERVICE_DATA_DIR)
    if environ.get(CONFIG_VARIABLE) == str(root / SERVICE_CONFIG) and os.path.isdir(service):
        return service
    if os.access("/data", os.W_OK):
        return "/data"
    if not (home := environ.get("HOME")):
        raise invalid("There is neither HOME nor a /data that can be written: set TEI_MANAGER_DATA_DIR, or data_dir")
    return str(Path(home) / ".local/share/tei-appliance")
