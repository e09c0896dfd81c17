"""The files of tei-manager, the Rust program that people come from, in our own terms (its release 0.12).

Its configuration keys that we do not have are taken where they mean the same, and refused with the name of ours where
they do not: a switch that does nothing would be taken for one that works. Of its state file each instance is taken as
it is. Its flags may set what is a field here; then they become the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from appliance.core import fields as check
from appliance.core.instance import InstanceSpec, argument
from appliance.core.problems import Problem, invalid, quoted

DEFAULT_STATE = "tei-manager-state.toml"  # in /data, where its image keeps it
VARIABLE = re.compile(
    r"TEI_MANAGER_(?:(?:GRPC_TLS|AUTH)_\w+|GRPC_MAX_STREAMS)"
)  # in its documents; it does not read them either

# -- configuration ----------------------------------------------------------------------------------------------------

AUTH = check.Fields(
    {
        "enabled": check.boolean,
        "providers": check.sequence_of(check.one_of("mtls"), 1),
        "require_cert_headers": check.boolean,
        "mtls": check.table,
    },
    name='"auth.{}"',
    unknown='Unknown key "auth.{}"',
    shown=str,
)
paths, texts = check.text(), check.sequence_of(check.text(1024), 10_000)
MTLS = check.Fields(
    {
        "ca_cert": paths,
        "server_cert": paths,
        "server_key": paths,
        "allow_self_signed": check.boolean,
        "verify_subject": check.boolean,
        "allowed_subjects": texts,
        "verify_san": check.boolean,
        "allowed_sans": texts,
    },
    required=("ca_cert", "server_cert", "server_key"),
    name='"auth.mtls.{}"',
    unknown='Unknown key "auth.mtls.{}"',
    shown=str,
)
GRPC_KEYS = {
    "tls": "[tls], which is for all three listeners: cert_path is cert_file, key_path is key_file, ca_path is "
    "client_ca_file",
    "multiplexer_port": "grpc_port",
    "max_parallel_streams": "grpc_max_parallel_streams",
}


def own_keys(file: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """A configuration file with its keys replaced by ours. Raises: Problem for one that means something else here."""
    own = {key: value for key, value in file.items() if key not in ("grpc_enabled", "auth", "grpc")}
    for variable in sorted(filter(VARIABLE.fullmatch, environ)):
        raise invalid(
            f"Environment variable {variable} sets nothing here: use [tls] or grpc_max_parallel_streams of the "
            "configuration file"
        )
    enabled = environ.get("TEI_MANAGER_GRPC_ENABLED") or file.get("grpc_enabled", True)
    if enabled not in (True, "true"):
        raise invalid(
            f'"grpc_enabled" (TEI_MANAGER_GRPC_ENABLED) is {check.shown(enabled)}: the gRPC port is always on here. '
            "Leave it out, or say true; `bind` says who can reach it"
        )
    for key in table_of(file, "grpc"):
        meant = GRPC_KEYS.get(key, "a key at the top of the file that begins with grpc_")
        raise invalid(f'"grpc.{key}" is spelled in another way here: use {meant}')
    if tls := tls_of(AUTH.values(table_of(file, "auth"))):
        if "tls" in own:
            raise invalid('"auth.mtls" and "tls" set the same: leave one of them out')
        own["tls"] = tls
    return own


def table_of(file: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    try:
        table: Mapping[str, Any] = check.table(file.get(key, {}))
    except ValueError as error:
        raise invalid(f'Configuration key "{key}" {error}') from None
    return table


def tls_of(auth: Mapping[str, Any]) -> dict[str, Any]:
    """`[tls]` for its `[auth]`; empty where that is off. Raises: Problem."""
    if not auth.get("enabled"):
        return {}
    if auth.get("providers") != ("mtls",) or "mtls" not in auth:
        raise invalid('"auth.enabled" needs "auth.providers" = ["mtls"] and [auth.mtls]; or use [tls] and keys instead')
    if auth.get("require_cert_headers"):
        raise invalid('"auth.require_cert_headers": a header proves nothing here. Use [tls] with client certificates')
    mtls = MTLS.values(auth["mtls"])
    if mtls.get("allow_self_signed"):
        raise invalid('"auth.mtls.allow_self_signed": put such certificates into the file of "auth.mtls.ca_cert"')
    if mtls.get("verify_subject", True) and mtls.get("allowed_subjects"):
        raise invalid(
            '"auth.mtls.allowed_subjects" takes parts of subjects, "tls.allowed_subjects" takes whole ones: use [tls]'
        )
    sans = mtls.get("allowed_sans") if mtls.get("verify_san") else None
    return {
        "cert_file": mtls["server_cert"],
        "key_file": mtls["server_key"],
        "client_ca_file": mtls["ca_cert"],
        "require_client_cert": True,
        **({"allowed_sans": list(sans)} if sans else {}),
    }


# -- state file -------------------------------------------------------------------------------------------------------


class MovedInstance(NamedTuple):
    """An instance of its state file. created_at: empty for one that came from its configuration."""

    spec: InstanceSpec
    created_at: str


def is_foreign(table: Mapping[str, Any]) -> bool:
    """Whether a parsed state file is tei-manager's."""
    return "last_updated" in table and "generation" not in table and isinstance(table.get("instances"), list)


def instances_of(table: Mapping[str, Any]) -> list[MovedInstance]:
    """The instances of its state file. Raises: Problem that names the one that cannot be one of ours, and why."""
    return [moved(entry, place) for place, entry in enumerate(table["instances"])]


def moved(entry: Any, place: int) -> MovedInstance:
    try:
        body = dict(check.table(entry))
        created_at = body.pop("created_at", "")
        return MovedInstance(InstanceSpec.parse(with_fields_for_flags(body)), as_date(created_at))
    except (ValueError, Problem) as error:
        name = quoted(entry["name"]) if isinstance(entry, Mapping) and "name" in entry else "without a name"
        why = error.message if isinstance(error, Problem) else error
        raise invalid(f"instances[{place}] ({name}): {why}") from None


def as_date(value: Any) -> str:
    """A date in TOML's form or as text; empty for what is none."""
    text = value.isoformat() if isinstance(value, datetime) else str(value)
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return ""
    return text if len(text) <= 64 else ""


def number(text: str) -> int | str:
    value = check.decimal(text)
    return text if value is None else value


# A flag in extra_args, which came last on its command line and so decided, and the field that it is here.
FLAG_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--revision": ("revision", str),
    "--dtype": ("dtype", str),
    "--pooling": ("pooling", str),
    "--max-batch-tokens": ("max_batch_tokens", number),
    "--max-concurrent-requests": ("max_concurrent_requests", number),
    "--prometheus-port": ("prometheus_port", number),
}


words = check.sequence_of(argument, 256)


def with_fields_for_flags(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body whose extra_args set none of our fields. Other owned flags are left, for `InstanceSpec` to refuse."""
    own, kept = dict(body), []
    arguments = list(words(body.get("extra_args", ())))
    while arguments:
        given = arguments.pop(0)
        flag, equals, value = given.partition("=")
        if flag in FLAG_FIELDS and (equals or arguments):
            key, spelled = FLAG_FIELDS[flag]
            own[key] = spelled(value if equals else arguments.pop(0))
        elif flag != "--json-output":  # which every replica gets
            kept.append(given)
    return own | {"extra_args": kept}
