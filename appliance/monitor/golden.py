"""Golden answers: what an instance said of a few fixed texts when it was new, and whether it still says so.

Wrong vectors with a green light are the worst fault of an embedding service. Cosine and norm of an answer move by
less than a thousandth between batches, machines and restarts; a broken device, driver or weight file moves them more.
A score next to zero has neither: the cosine of one number is its sign, and a rounding is many times its size. Scores
are right, too, within a hundredth of the largest golden one, or within 0.01 where all are below 1: they are logits, of
which 0.01 is a probability of 0.0025 at most.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from appliance.core.health import DEADLINE_SECS, ProbeResult
from appliance.core.instance import CHANGEABLE
from appliance.core.state import Instance
from appliance.files.replacement import replace_file
from appliance.files.signature import Signature, signature_or_none
from appliance.node.probe import Answer, Late, ProbeTarget, Said, content, numbers, said
from appliance.wire.calls import CallFailed, Code

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Où est la bibliothèque? 図書館はどこですか。",
    "In 1969, 3.14159 miles of cable cost $42 (tax not included).",
)
NOT_DECIDING = (*CHANGEABLE, "replicas")  # fields that decide no answer
MOST_RIGHT = 16  # of an instance: its replicas may round otherwise than each other
LEAST_COSINE = 0.999
NORM_TOLERANCE = SCORE_TOLERANCE = 0.01


class Right(NamedTuple):
    """What was found to be the same as the golden answers of an instance, in bytes, with its cosine to them. file: that
    they stand in."""

    instance: Instance
    file: Signature
    contents: Mapping[tuple[bytes, ...], float]


class Comparison(NamedTuple):
    """With the golden answers. why: how these differ; empty when they do not. cosine: the least of all texts; NaN for
    scores, of which it says nothing."""

    why: str
    cosine: float


class Golden:
    """Golden answers of all generations of instances, one file each in ``folder``.

    digests: of the files of an instance's model, by name, as far as they were taken. They are kept with the answers.
    """

    def __init__(self, folder: Path, digests: Callable[[Instance], dict[str, str]]) -> None:
        self.folder = folder
        self.digests = digests
        self.lock = threading.Lock()
        self.right: dict[str, Right] = {}
        self.cosines: dict[str, dict[int, float]] = {}  # of each generation, by the port of the replica

    def check(self, instance: Instance, replica: ProbeTarget) -> tuple[ProbeResult, str]:
        """Compare, or keep the answers if these are the instance's first. Returns as `probe.probe` does."""
        until = time.monotonic() + DEADLINE_SECS
        try:
            messages = [said(replica, text, until) for text in TEXTS]
        except (Late, CallFailed, OSError, ValueError) as error:
            # TEI and the engine say so of a text that cannot be computed.
            cannot = isinstance(error, CallFailed) and error.status.code == Code.FAILED_PRECONDITION
            if cannot and self.kept(instance):
                return ProbeResult.MISSED, f"it does not answer a golden text any more: {error}"
            return ProbeResult.BUSY, ""  # it has just answered a probe; the next one shows whether it still does
        return self.judge(instance, replica.port, messages)

    def judge(self, instance: Instance, port: int, messages: Sequence[Said]) -> tuple[ProbeResult, str]:
        """As `check`. messages: what the replica on that port has said of `TEXTS`."""
        contents, file = tuple(map(content, messages)), signature_or_none(self.path(instance))
        known = self.found_right(instance, file).get(contents)
        found = Comparison("", known) if known is not None else self.compare(instance, list(map(numbers, messages)))
        self.cosines.setdefault(instance.stem, {})[port] = found.cosine
        if found.why:
            return ProbeResult.WRONG, found.why
        if known is None:
            self.note_right(instance, file, contents, found.cosine)
        return ProbeResult.ANSWERED, ""

    def distance(self, instance: Instance) -> float:
        """1 minus the least cosine of its replicas' last answers to the golden ones; NaN where none was compared."""
        cosines = self.cosines.get(instance.stem, {})
        found = [cosines[port] for port in instance.ports if port in cosines]
        return max(0.0, 1 - min(found)) if found and not any(map(math.isnan, found)) else math.nan

    def compare(self, instance: Instance, answers: list[Answer]) -> Comparison:
        """With the golden answers; they are the same where these are the first."""
        kept = self.kept_or_keep(instance, answers)
        return Comparison(self.strayed(instance, answers, kept), least_cosine(answers, kept))

    def strayed(self, instance: Instance, answers: list[Answer], kept: list[Answer]) -> str:
        """How the answers differ from the golden ones that are kept; empty when they do not."""
        scale = max(map(norm, kept))
        for text, now, then in zip(TEXTS, answers, kept, strict=True):
            if why := strayed(now, then, scale):
                why += self.changed(instance)
                return (
                    f'"{text[:20]}..." has {why}; if the model was replaced on purpose, delete the instance and '
                    "create it again"
                )
        return ""

    def found_right(self, instance: Instance, file: Signature | None) -> Mapping[tuple[bytes, ...], float]:
        """The answers that were right when they were compared with this very file. To read it and to compare all
        numbers takes 1.5 ms for vectors of 384, and from one minute to the next most answers are the same bytes."""
        found = self.right.get(instance.stem)
        return found.contents if found and (found.instance, found.file) == (instance, file) else {}

    def note_right(
        self, instance: Instance, file: Signature | None, contents: tuple[bytes, ...], cosine: float
    ) -> None:
        """file: as it was before the answers were compared."""
        with self.lock:
            found = self.found_right(instance, file)
            if file:
                others = found if len(found) < MOST_RIGHT else {}
                self.right[instance.stem] = Right(instance, file, {contents: cosine, **others})

    def kept_or_keep(self, instance: Instance, answers: list[Answer]) -> list[Answer]:
        """The golden answers; of several new replicas the first decides, whose answers are numbers."""
        with self.lock:
            if (kept := self.kept(instance)) is None and are_finite(answers):
                self.folder.mkdir(exist_ok=True)
                kept_with = {"identity": identity(instance), "digests": self.digests(instance), "texts": TEXTS}
                content = json.dumps({**kept_with, "answers": answers})
                replace_file(self.path(instance), content, durable=True)
        return kept or answers

    def changed(self, instance: Instance) -> str:
        """Which file of the model has another digest than when the answers were kept, in words."""
        try:
            then = json.loads(self.path(instance).read_text()).get("digests", {})
        except (OSError, ValueError):
            return ""
        now = self.digests(instance)
        other = sorted(name for name in then.keys() & now.keys() if then[name] != now[name])
        return f"; {other[0]} of the model is another file than then" if other else ""

    def path(self, instance: Instance) -> Path:
        return self.folder / f"{instance.stem}.json"

    def kept(self, instance: Instance) -> list[Answer] | None:
        """None unless there are answers of this very instance: same creation, same model, same way to compute."""
        try:
            stored = json.loads(self.path(instance).read_text())
        except (OSError, ValueError):
            return None
        own = {name: value for name, value in stored.get("identity", {}).items() if name not in NOT_DECIDING}
        same = own == identity(instance) and stored.get("texts") == list(TEXTS)
        return stored["answers"] if same and are_finite(stored["answers"]) else None

    def disagreement(self, one: Instance, other: Instance) -> str | None:
        """How the golden answers of a generation differ from those of another one; empty when they do not, None as long
        as not both are known."""
        answers, golden = self.kept(one), self.kept(other)
        if answers is None or golden is None:
            return None
        scale = max(map(norm, golden))
        whys = [strayed(now, then, scale) for now, then in zip(answers, golden, strict=True)]
        return next((f'"{text[:20]}..." has {why}' for text, why in zip(TEXTS, whys, strict=True) if why), "")

    def forget_others(self, stems: set[str]) -> None:
        """Delete the files of generations that are gone."""
        with self.lock:
            self.right = {stem: right for stem, right in self.right.items() if stem in stems}
            self.cosines = {stem: cosines for stem, cosines in self.cosines.items() if stem in stems}
        for path in self.folder.glob("*.json"):
            if path.stem not in stems:
                path.unlink(missing_ok=True)


def identity(instance: Instance) -> dict[str, Any]:
    """What decides an answer. JSON has no tuples, so it is compared as JSON gives it back."""
    deciding = {name: value for name, value in asdict(instance.spec).items() if name not in NOT_DECIDING}
    fields = {**deciding, "created_at": instance.created_at}
    plain: dict[str, Any] = json.loads(json.dumps(fields))
    return plain


def strayed(now: Answer, then: Answer, scale: float) -> str:
    """How ``now`` differs from the golden answer ``then``; empty when it does not. scale: the largest norm of the
    instance's golden answers."""
    alike, grown = cosine(now, then), norm(now) / norm(then) if norm(then) else 1.0
    if alike >= LEAST_COSINE and abs(grown - 1) <= NORM_TOLERANCE:
        return ""
    difference = (
        f"cosine {alike:.4f} to its golden answer (at least {LEAST_COSINE}) and {grown:.4f} times its norm (within "
        f"{NORM_TOLERANCE})"
    )
    if not scores(then):
        return difference
    moved = math.dist(*([one.get(name, 0.0) for name in now.keys() | then.keys()] for one in (now, then)))
    allowed = SCORE_TOLERANCE * max(scale, 1.0)
    return "" if moved <= allowed else f"{difference}, and is {moved:.4f} away from it (at most {allowed:.4f})"


def least_cosine(answers: Sequence[Answer], kept: Sequence[Answer]) -> float:
    """0 for an answer that is not finite; NaN for scores."""
    if any(map(scores, kept)):
        return math.nan
    return min(each if math.isfinite(each) else 0.0 for each in map(cosine, answers, kept))


def scores(answer: Answer) -> bool:
    """Whether these are scores under labels; the values of a vector stand under numbers."""
    return bool(answer) and not any(name.isdecimal() for name in answer)


def cosine(one: Answer, other: Answer) -> float:
    """Of two answers as vectors over all their names; 1 for two of zeros, NaN where one of them is not finite."""
    dot = sum(value * other.get(name, 0.0) for name, value in one.items())
    lengths = norm(one) * norm(other)
    return dot / lengths if lengths else float(not norm(one) and not norm(other))


def are_finite(answers: Sequence[Answer]) -> bool:
    return all(math.isfinite(value) for answer in answers for value in answer.values())


def norm(one: Answer) -> float:
    return math.sqrt(sum(value * value for value in one.values()))
