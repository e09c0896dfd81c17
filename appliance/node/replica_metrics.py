"""TEI's own metrics of replicas, as one page."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from appliance.core.state import Instance
from appliance.drivers.scraping import metrics_page
from appliance.node.context import Node
from appliance.wire.exposition import relabelled

SCRAPE_SECS = 1.0
SCRAPES = 16


class Source(NamedTuple):
    """A replica whose metrics are asked for. mark: what its processes bear."""

    labels: dict[str, str]
    port: int
    mark: str


def page(node: Node, instances: Iterable[Instance]) -> str:
    """The `te_*` metrics of all replicas that answer, with the labels `instance` and `replica`; those of another
    program that has taken a port for metrics are not ours to show."""
    sources = [
        Source({"instance": each.name, "replica": str(replica)}, port, node.marker(each, replica))
        for each in instances
        if each.wanted == "running" and not each.spec.metrics_off
        for replica, port in enumerate(each.prometheus_ports)
    ]

    table = node.listening()

    def own(source: Source) -> str:
        return (node.listeners.proved(source.port, source.mark, table) and metrics_page(source.port, SCRAPE_SECS)) or ""

    with ThreadPoolExecutor(SCRAPES) as pool:
        texts = list(pool.map(own, sources))
    return relabelled([(source.labels, text) for source, text in zip(sources, texts, strict=True)], "te_")
