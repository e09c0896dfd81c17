"""TEI's own metrics of replicas, as one page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

from appliance.core.state import Instance
from appliance.drivers.scraping import AskedPages
from appliance.node.context import Node
from appliance.wire.exposition import JoinedPages

SCRAPE_SECS = 1.0


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

    @contextmanager
    def asked(self, instances: Iterable[Instance]) -> Iterator[Callable[[], str]]:
        """Ask for all pages; what is given reads and joins them. Whoever has other work does it in between: the
        replicas write their pages meanwhile."""
        sources = proved_sources(self.node, instances)
        with closing(AskedPages([each.port for each in sources], SCRAPE_SECS)) as pages:
            yield lambda: self.pages.text(
                (source.labels, text or "") for source, text in zip(sources, pages.read(), strict=True)
            )


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
