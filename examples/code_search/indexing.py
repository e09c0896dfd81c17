"""Makes an index equal to its files: writes the chunks that it lacks, and deletes those that are no more.

Each batch is written as soon as it is embedded, and a chunk that is there is not asked for: so an indexing that was
interrupted goes on where it stopped, without a note of how far it came.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from examples.code_search import files, syntax
from examples.code_search.cutting import cut
from examples.code_search.embedding import Gateway, Reply
from examples.code_search.index import Entry, Index
from examples.code_search.problems import Busy, Problem
from examples.code_search.savings import Savings

BATCH = 64  # chunks a request: some seconds of a processor, so that progress is seen
MOST = 200_000  # chunks: all texts are held at once
READ_NOTE = 50  # files between two words about them
TRIES = 20  # of one batch while the gateway is busy

T = TypeVar("T")


class Progress(NamedTuple):
    """total: chunks of the source: ``kept`` were there before, ``written`` are new. deleted: chunks of files
    that are no more, or have changed. texts: files that were read; left_out: others. note: what is waited for."""

    total: int = 0
    kept: int = 0
    written: int = 0
    deleted: int = 0
    texts: int = 0
    left_out: tuple[files.LeftOut, ...] = ()
    note: str = ""
    finished: bool = False


def entries(folder: Path) -> Iterator[Entry | files.LeftOut | files.Text]:
    """Each file, or why it is left out; after a file its chunks."""
    for found in files.read(folder):
        yield found
        if isinstance(found, files.Text):
            language = syntax.language_of(found.path)
            for chunk in cut(found.text, syntax.outline(found.text, language)):
                yield Entry(found.path, language, chunk)


def patiently(ask: Callable[[], T]) -> Iterator[Busy | T]:
    """The answer, and before it each refusal of a busy gateway, whose time is then waited for."""
    for left in reversed(range(TRIES)):
        try:
            yield ask()
            return
        except Busy as busy:
            if not left:
                raise
            yield busy
            time.sleep(busy.seconds)


def answered(ask: Callable[[], T]) -> T:
    """The answer, for somebody to whom nothing is told in between."""
    *_, answer = patiently(ask)
    assert not isinstance(answer, Busy)  # the last is the answer, or was raised
    return answer


def update(
    index: Index, gateway: Gateway, savings: Savings, collection: str, folder: Path, rebuild: bool = False
) -> Iterator[Progress]:
    """rebuild: embeds and writes all chunks again, over the old ones, which can be searched all the while."""
    wanted: dict[str, Entry] = {}
    left_out: list[files.LeftOut] = []
    texts = 0
    for found in entries(folder):
        if isinstance(found, files.LeftOut):
            left_out.append(found)
        elif isinstance(found, files.Text):
            texts += 1
            if texts % READ_NOTE == 0:
                yield Progress(len(wanted), texts=texts, note=f"Reads the files: {found.path}")
        else:
            wanted[found.key] = found
        if len(wanted) > MOST:
            raise Problem(f"The source has more than {MOST:,} chunks: name a folder of it.")
    there = index.keys(collection)
    missing = [entry for key, entry in wanted.items() if rebuild or key not in there]
    progress = Progress(len(wanted), len(wanted) - len(missing), texts=texts, left_out=tuple(left_out))
    yield progress

    for batch in batches(missing):
        for reply in patiently(lambda batch=batch: gateway.embed([entry.text for entry in batch])):
            if isinstance(reply, Busy):
                yield progress._replace(note=f"{reply} Asks again in {reply.seconds:g} s.")
            else:
                _keep(index, collection, batch, reply, rebuild)
                savings.add(len(batch), reply.cache, reply.seconds)
        progress = progress._replace(written=progress.written + len(batch))
        yield progress

    gone = there - wanted.keys()
    index.delete(collection, gone)
    yield progress._replace(deleted=len(gone), finished=True)


def batches(found: Sequence[Entry]) -> Iterator[list[Entry]]:
    """All of them in order, the last batch as long as what is left."""
    left = iter(found)
    while batch := list(islice(left, BATCH)):
        yield batch


def _keep(index: Index, collection: str, batch: Sequence[Entry], reply: Reply, rebuild: bool) -> None:
    if rebuild and not index.fits(collection, reply.vectors.shape[1]):
        index.drop(collection)  # of another model: nothing in it can be searched any more
    index.write(collection, batch, reply.vectors)
