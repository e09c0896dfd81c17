"""Objects of Kubernetes as YAML: the same bytes for the same objects, and nothing in them but values.

Parsers of YAML differ about what a word is, so a string has to be written such that each takes it for a string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from appliance.core.kubernetes import GRPC_PORT, METRICS_PORT
from appliance.export.kubernetes import Rendered
from appliance.export.kubernetes_pods import Object

HEADER = "Written by `appliance export kubernetes`."
PORTS = f"Replicas listen on {GRPC_PORT} (gRPC) and {METRICS_PORT} (metrics), whatever ports they have elsewhere."
# Words of YAML 1.1, which parsers differ about, and what cannot be a number whatever follows.
WORDS = frozenset("y n yes no on off true false null".split())
SURE = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")


class ObjectDumper(yaml.SafeDumper):
    """Strings are quoted unless each parser takes them for strings: `1e3` and `y` are numbers and booleans to some, and
    Kubernetes' own parser is one of them. Nothing is shortened to a reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "|" if text.endswith("\n") else None if SURE.fullmatch(text) and text.lower() not in WORDS else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


ObjectDumper.add_representer(str, ObjectDumper.represent_text)


def document(content: Object) -> str:
    """ASCII alone: other characters are escaped, so that what is read is what there is."""
    text: str = yaml.dump(content, Dumper=ObjectDumper, sort_keys=False, width=2**30)
    return text


def stream(found: Sequence[Rendered]) -> str:
    """All of them as one text."""
    return f"# {HEADER}\n# {PORTS}\n" + "".join(f"---\n{text_of(each)}" for each in found)


def files(found: Sequence[Rendered]) -> dict[str, str]:
    """All of them as the files of a folder for `kubectl apply -k`, by their names."""
    listed = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [each.file_name for each in found],
    }
    texts = {each.file_name: text_of(each) for each in found} | {"kustomization.yaml": document(listed)}
    return {name: f"# {HEADER}\n{text}" for name, text in texts.items()}


def text_of(each: Rendered) -> str:
    """One YAML document, with what is to be known of it before it."""
    comments = "".join(f"# {' '.join(note.split())}\n" for note in each.notes)
    return comments + document(each.content)
