"""What `GET /cache` tells of a store."""

from pathlib import Path

import pytest

from appliance.node import cache_overview
from appliance.node.context import Node
from testing.redisserver import RedisServer
from testing.running import eventually
from testing.specs import configured


@pytest.mark.processes
def test_a_store_that_is_read_and_takes_nothing_new_says_so(tmp_path: Path) -> None:
    with RedisServer(maxmemory="1kb") as server:
        settings = configured(data_dir=str(tmp_path), cache={"store": "redis", "url": server.url()})
        node = Node.at(settings)
        # A busy server is asked again: it has a twentieth of a second.
        eventually(lambda: told(node).startswith("nothing new is kept (full)"))


def told(node: Node) -> str:
    return str(cache_overview.show(node).failure)
