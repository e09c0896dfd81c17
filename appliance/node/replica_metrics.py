"""TEI's own metrics of replicas, as one page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from appliance.core.state import Instance
from appliance.drivers.scraping import metrics_pages
from appliance.node.context import Node
from appliance.wire.exposition import JoinedPages

SCRAPE_SECS = 1.0
SCRAPES = 64  # at once, each with a file descriptor


class Source(NamedTuple):
    """A replica whose metrics are asked for. mark: what its processes bear."""

    labels: dict[str, str]
    port: int
    mark: str


class ReplicaMetrics:
    """The `te_*` metrics of all replicas that answer, with the labels `instance` and `replica`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.pages = JoinedPages("te_")

    def text(self, instances: Iterable[Instance]) -> str:
        own = proved_sources(self.node, instances)
        texts = [
            text or ""
            for some in batched(own, SCRAPES)
            for text in metrics_pages([each.port for each in some], SCRAPE_SECS)
        ]
        return self.pages.text((source.labels, text) for source, text in zip(own, texts, strict=True))


def proved_sources(node: Node, instances: Iterable[Instance]) -> list[Source]:
    """Those of another program that has taken a port for metrics are not ours to show."""
    sources = [
        Source({"instance": each.name, "replica": str(replica)}, port, node.marker(each, replica))
        for each in instances
        if each.wanted == "running" and not each.spec.metrics_off
        for replica, port in enumerate(each.prometheus_ports)
    ]
    table = node.listening()
    return [source for source in sources if node.listeners.proved(source.port, source.mark, table)]


def batched(sources: list[Source], size: int) -> Iterator[list[Source]]:
    for first in range(0, len(sources), size):
        yield sources[first : first + size]
