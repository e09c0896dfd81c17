"""What the texts of a batch cost, as their replicas count it, put together in one `tei.v1.Metadata`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from appliance.core.cachekey import CachedEmbedding
from appliance.wire import rowusage
from appliance.wire.rowusage import LARGEST_COUNT, RowUsage
from appliance.wire.tei.v1 import tei_pb2 as tei


class Usage:
    """One line for each text. Written from several threads, each its own lines."""

    def __init__(self, texts: int) -> None:
        self.counts = np.zeros((texts, 6), np.int64)

    def note(self, text: int, metadata: tei.Metadata) -> None:
        self.counts[text, :5] = (
            metadata.compute_chars,
            metadata.compute_tokens,
            metadata.tokenization_time_ns,
            metadata.queue_time_ns,
            metadata.inference_time_ns,
        )

    def note_computed_before(self, texts: Sequence[int], entries: Sequence[CachedEmbedding]) -> None:
        """No time was spent on these texts."""
        self.counts[texts, :2] = [(entry.chars, entry.tokens) for entry in entries]
        self.counts[texts, 5] = 1

    def each(self, text_of_row: np.ndarray) -> str:
        """For each row what `wire.rowusage` tells of it; nothing for null rows (-1)."""
        of_text = [RowUsage(line[0], line[1], line[5]) for line in self.counts.tolist()]
        of_text.append(RowUsage(0, 0, 0))  # of -1
        return rowusage.packed(of_text[text] for text in text_of_row.tolist())

    def total(self, text_of_row: np.ndarray, took_secs: float) -> tei.Metadata:
        """For all rows; text_of_row: -1 for null rows. Counts are sums, times are means, as TEI has it."""
        rows = self.counts[text_of_row[text_of_row >= 0]]
        chars, tokens, tokenization, waiting, inference, _ = rows.sum(axis=0).tolist()
        return tei.Metadata(
            compute_chars=min(chars, LARGEST_COUNT),
            compute_tokens=min(tokens, LARGEST_COUNT),
            total_time_ns=int(took_secs * 1e9),
            tokenization_time_ns=tokenization // max(1, len(rows)),
            queue_time_ns=waiting // max(1, len(rows)),
            inference_time_ns=inference // max(1, len(rows)),
        )
