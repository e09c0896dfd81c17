"""What each path of the console needs: the same as the REST API for what it shows or does."""

from __future__ import annotations

from falcon.routing import CompiledRouter

from appliance.core.access import Need

LOGIN, LOGOUT = "/console/login", "/console/logout"
OPEN_PATHS = (LOGIN, LOGOUT)
INSTANCE, MODEL = "/console/instances/{name}", "/console/model"
NEEDS: dict[str, Need] = {
    LOGIN: Need.OPEN,
    LOGOUT: Need.OPEN,
    "/console": Need.READ,
    "/console/fleet": Need.READ,
    "/console/stream": Need.READ,
    "/console/create": Need.OPERATE,
    "/console/create/check": Need.OPERATE,
    INSTANCE: Need.READ,
    f"{INSTANCE}/state": Need.READ,
    f"{INSTANCE}/plots": Need.READ,
    f"{INSTANCE}/log": Need.READ,
    f"{INSTANCE}/log.txt": Need.READ,
    f"{INSTANCE}/fields": Need.OPERATE,
    f"{INSTANCE}/fields/check": Need.OPERATE,
    f"{INSTANCE}/delete": Need.ADMIN,
    f"{INSTANCE}/{{verb}}": Need.OPERATE,
    "/console/models": Need.READ,
    "/console/models/table": Need.READ,
    "/console/models/add": Need.OPERATE,
    f"{MODEL}/delete": Need.ADMIN,
    f"{MODEL}/{{verb}}": Need.OPERATE,
    "/console/gpus": Need.READ,
    "/console/bench": Need.READ,
    "/console/bench/measure": Need.OPERATE,
    "/console/bench/result": Need.READ,
    "/console/doctor": Need.READ,
    "/console/events": Need.READ,
    "/console/events/table": Need.READ,
    "/console/keys": Need.ADMIN,
    "/console/keys/create": Need.ADMIN,
    "/console/keys/revoke": Need.ADMIN,
    "/console/playground": Need.INFERENCE,
    "/console/playground/{task}": Need.INFERENCE,
}


def need_of(paths: CompiledRouter, method: str, path: str) -> Need:
    """What a request needs, also one that no path answers. ``paths``: the router that dispatches."""
    match = paths.find(path)
    return NEEDS.get(match[3] or "", Need.ADMIN) if match else Need.READ
