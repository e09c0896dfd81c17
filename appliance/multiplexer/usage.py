"""What the rows of a batch cost, as their replicas metadata it, put together in one `tei.v1.Metadata`."""

from __future__ import annotations

import numpy as np

from appliance.wire.tei.v1 import tei_pb2 as tei


class Usage:
    """One line for each distinct text. Written from several threads, each its own lines."""

    def __init__(self, distinct: int) -> None:
        self.counts = np.zeros((distinct, 5), np.int64)

    def note(self, text: int, metadata: tei.Metadata) -> None:
        self.counts[text] = (
            metadata.compute_chars,
            metadata.compute_tokens,
            metadata.tokenization_time_ns,
            metadata.queue_time_ns,
            metadata.inference_time_ns,
        )

    def total(self, row: np.ndarray, took_secs: float) -> tei.Metadata:
        """For all rows; row: the distinct text of each, -1 for none. Counts are sums, times means, as TEI has it."""
        rows = self.counts[row[row >= 0]]
        chars, tokens = rows[:, :2].sum(axis=0).tolist()
        tokenization, waiting, inference = rows[:, 2:].sum(axis=0).tolist()
        return tei.Metadata(
            compute_chars=chars,
            compute_tokens=tokens,
            total_time_ns=int(took_secs * 1e9),
            tokenization_time_ns=tokenization // max(1, len(rows)),
            queue_time_ns=waiting // max(1, len(rows)),
            inference_time_ns=inference // max(1, len(rows)),
        )
