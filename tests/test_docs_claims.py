"""What the pages claim agrees with the code and with each other: no feature is denied, and numbers are the code's.

A check takes the text of a page and returns complaints: so a test can plant an error in a page, and see it found.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from appliance.control import __main__ as control
from appliance.control import models as control_models
from appliance.control import resources
from appliance.control.routes import ROUTES as MANAGING
from appliance.core import access, budget, busy, health, instance, suspects
from appliance.core.settings import KNOBS, Settings
from appliance.drivers import grpccalls, journal, keysfile, logs, memory
from appliance.engine import model
from appliance.files import transferlimits
from appliance.gateway import __main__ as gateway
from appliance.gateway import bodies, multiplexer_calls, multiplexer_channels, shapes
from appliance.gateway.routes import ROUTES as SERVING
from appliance.multiplexer import arrivals, arrow, caller, stream_progress
from appliance.node import conditions
from appliance.wire.methods import METHODS
from tests.pages import PAGES, ROOT, prose

OTHERS = {
    name: (ROOT / name).read_text()
    for name in (
        "CHANGELOG.md",
        "Dockerfile",
        "etc/appliance.toml",
        "etc/tei-appliance.service",
        "etc/supervisord.conf",
    )
}
TEXTS = {**PAGES, **OTHERS}
PATHS = {route.path for route in MANAGING} | {route.path for route in SERVING}


# -- what is denied although it is there ------------------------------------------------------------------------------


class Feature(NamedTuple):
    """words: how pages call it. exists: whether the code has it."""

    words: str
    exists: bool


FEATURES = (
    Feature(r"authenticat\w+|API keys?|authoriz\w+|access control", "keys" in KNOBS),
    Feature(r"roles?", len(access.ROLES) > 1),
    Feature(r"TLS|encrypt\w+|client certificates?", "tls" in KNOBS),
    Feature(r"audit", "audit.jsonl" in Settings(data_dir="/data").layout.audit),
    Feature(r"metrics|Prometheus", "/metrics" in PATHS),
    Feature(r"CORS", "cors_allow_origins" in KNOBS),
    Feature(r"rerank\w*", any(method.name == "Rerank" for method in METHODS)),
    Feature(r"sparse vectors?|SPLADE", any(method.name == "EmbedSparse" for method in METHODS)),
    Feature(r"stream\w*", any(method.name == "EmbedStream" for method in METHODS)),
    Feature(r"downloads?|offline|archives?", "/archives" in PATHS),
    Feature(r"aliases", "aliases" in instance.CHECKS),
    Feature(r"GPU placement|placement", "gpu_ids" in instance.CHECKS),
    Feature(r"dry runs?|logs|events", {"/events", "/instances/{name}/logs"} <= PATHS),
    Feature(r"OpenAPI|reflection", "/openapi.json" in PATHS),
)
# "no authentication", "TLS is not supported", "reranking is planned", "roles will come", "without metrics so far"
DENIALS = (
    r"\b(?:there (?:is|are)|has|have|had|offers|knows?) (?:as )?(?:yet )?(?:no|neither) (?:\w+ )?(?:{0})\b",
    r"\b(?:no|without|lacks?|missing:?) (?:\w+ )?(?:{0})\b[^.]*\b(?:yet|so far|for now|at the moment|at present)\b",
    r"\b(?:{0})\b (?:\w+ ){{0,2}}(?:is|are|does|do) not (?:yet )?(?:supported|implemented|available|possible|exist)\b",
    r"\b(?:{0})\b[^.]*\b(?:is planned|are planned|will (?:come|follow|be added)|in a later release|comes? later)\b",
    r"\b(?:not|nobody is) (?:yet )?(?:authenticated|encrypted|audited)\b",
)
TRUE = ("REST has no CORS",)  # the gateway has it
OPEN = re.compile(r"\bmay do everything\b|\basks? for nothing\b|\bopen to (?:all|everybody)\b")
CONDITIONS = re.compile(r"\b(?:until|without|unless|where|when|while|before|out of the box|role)\b", re.IGNORECASE)
PUT_OFF = re.compile(
    r"\b(?:TODO|FIXME|not (?:yet )?implemented|work in progress|coming soon|to be written)\b", re.IGNORECASE
)


def sentences(text: str) -> Iterator[str]:
    plain = re.sub(r"^(?:# ?|; ?)(?=\w)", "", prose(text), flags=re.M)
    for part in re.split(r"\n\s*\n|\n(?=[|#-])|(?<=[a-z`)])[.](?=\s)", plain):
        if words := " ".join(part.split()):
            yield words


def denials(text: str) -> list[str]:
    """Sentences that say of something that there is that there is none, or that it comes later."""
    found = []
    for sentence in sentences(text):
        if any(known in sentence for known in TRUE):
            continue
        for feature in FEATURES:
            denied = any(re.search(form.format(feature.words), sentence, re.IGNORECASE) for form in DENIALS)
            found += [f"there is that, though: {sentence}"] * (denied and feature.exists)
    return sorted(set(found))


def unconditional(text: str) -> list[str]:
    """Sentences by which everybody may come in, without a word on when that is so."""
    return [each for each in sentences(text) if OPEN.search(each) and not CONDITIONS.search(each)]


def put_off(text: str) -> list[str]:
    return [each for each in sentences(text) if PUT_OFF.search(each)]


CHECKED: tuple[Callable[[str], list[str]], ...] = (denials, unconditional, put_off)


@pytest.mark.parametrize("check", CHECKED)
@pytest.mark.parametrize("name", TEXTS)
def test_no_text_denies_what_there_is(name: str, check: Callable[[str], list[str]]) -> None:
    assert check(TEXTS[name]) == []


# -- numbers ----------------------------------------------------------------------------------------------------------

MIB, KIB = 2**20, 2**10
SETTINGS = Settings()
TIMEOUT_STOP = re.search(r"TimeoutStopSec=(\d+)", OTHERS["etc/tei-appliance.service"])
assert TIMEOUT_STOP
WORDS = "none one two three four five six seven eight nine ten".split()
THREADS = control.WORKERS * control.THREADS
LOG_MB = SETTINGS.log_bytes // MIB
CLAIMS: tuple[tuple[str, str, object], ...] = (
    ("README.md", "rotated at {} MB, three kept", LOG_MB),
    ("README.md", "rotated at 10 MB, {} kept", WORDS[SETTINGS.log_backups]),
    ("security.md", "the logs of a replica have {} MB at most", LOG_MB * (1 + SETTINGS.log_backups)),
    ("deployment.md", "rotated at {} MB. `GET", LOG_MB),
    ("README.md", "| `control` | {} |", SETTINGS.api_port),
    ("README.md", "| `multiplexer-0`, … | {} |", SETTINGS.grpc_port),
    ("README.md", "| `gateway` | {} |", SETTINGS.http_port),
    ("README.md", "| {} | `NAME-0`", f"{SETTINGS.instance_port_start}\u2013{SETTINGS.instance_port_end - 1}"),
    ("README.md", "up to {} texts and 64 MiB a request", f"{shapes.MOST_TEXTS:,}"),
    ("README.md", "up to 100,000 texts and {} MiB a request", bodies.LARGEST_BYTES // MIB),
    ("README.md", "the last log of deleted instances, {} at most", {20: "twenty"}[logs.KEPT_ASIDE]),
    ("README.md", "| no answer within {} s, and", f"{health.DEADLINE_SECS:g}"),
    ("README.md", "At most after 1, 2, 4 … {} s", f"{health.LONGEST_BACKOFF_SECS:g}"),
    ("README.md", "{} deaths in ten minutes", WORDS[health.MOST_DEATHS]),
    ("README.md", "five deaths in {} minutes", WORDS[int(health.DEATHS_SECS / 60)]),
    ("README.md", "{} times what is expected, at most five minutes", WORDS[busy.MULTIPLE]),
    ("README.md", "ten times what is expected, at most {} minutes", WORDS[int(busy.MOST_SECS / 60)]),
    ("operations.md", "it is refused for {} minutes, and these deaths", WORDS[int(suspects.CONVICTED_SECS / 60)]),
    ("operations.md", "it died {} times in ten minutes", WORDS[health.MOST_DEATHS]),
    ("operations.md", "Events are kept in two files of {} MB", journal.RING_BYTES // MIB),
    ("operations.md", "The monitor has not written for {} s", f"{conditions.SILENT_SECS:g}"),
    ("operations.md", "After {} times what that should take, or five", WORDS[busy.MULTIPLE]),
    (
        "grpc.md",
        "with `x-tei-code: ENDS_REPLICAS`, and the same request is refused for {} minutes",
        WORDS[int(suspects.CONVICTED_SECS / 60)],
    ),
    ("grpc.md", "away for less than {} s", f"{arrivals.RETURN_SECS:g}"),
    ("design.md", "waits up to {} s (at first 3) for another", f"{arrivals.RETURN_SECS:g}"),
    ("design.md", "out of its reach for {} s", f"{caller.SECOND_REPLICA_SECS:g}"),
    ("design.md", "inference steps back (nice {}, batches 10)", model.SINGLE_NICE),
    ("design.md", "inference steps back (nice 5, batches {})", model.BATCH_NICE),
    ("design.md", "ten times what is expected, {} s to 5 minutes", f"{busy.LEAST_SECS:g}"),
    ("security.md", "tried again {} times a second", WORDS[round(1 / keysfile.AGAIN_SECS)]),
    ("security.md", "each of the {} gateway workers", WORDS[gateway.WORKERS]),
    ("security.md", "`/docs` | one of {} threads", gateway.WORKERS * gateway.THREADS),
    ("security.md", "`/models/{model_id}:9000` | one of {} threads", THREADS),
    ("security.md", "`/events:9000` | one of {} threads, and", THREADS),
    ("security.md", "`/archives:9000` | one of {} threads; the disk", THREADS),
    ("security.md", "one of {} threads that wait for jobs", control.WORKERS * control_models.WAITERS),
    ("security.md", "until the job ends, {} hour at most", {3600: "an"}[int(control_models.LONGEST_WAIT_SECS)]),
    ("security.md", "the journal {} MB", 2 * journal.RING_BYTES // MIB),
    ("security.md", "a body of {} MiB; the lock", resources.BODY_LIMIT // MIB),
    ("security.md", "| a body of {} MiB, on disk until it is there", bodies.LARGEST_BYTES // MIB),
    ("security.md", "one of {} places from 1 MiB", WORDS[bodies.LARGE_REQUESTS]),
    ("security.md", "places from {} MiB or 2,048 texts", bodies.SMALL_BYTES // MIB),
    ("security.md", "places from 1 MiB or {} texts", f"{multiplexer_calls.WHOLE_ROWS:,}"),
    ("security.md", "{} times the body and 40 bytes for each thing", WORDS[budget.BODY]),
    ("security.md", "four times the body and {} bytes for each thing", budget.ITEM),
    ("security.md", "{} times the vectors, 1.25 times where", WORDS[multiplexer_calls.OF_VECTORS]),
    ("security.md", "six times the vectors, {} times where", multiplexer_calls.OF_VECTORS_IN_PIECES),
    ("security.md", "the same body; {} times the replies", multiplexer_calls.OF_OBJECTS),
    ("security.md", "{} times its texts, and 1 KiB for each", WORDS[budget.GATHERED]),
    ("security.md", "four times its texts, and {} KiB for each", budget.MESSAGE // KIB),
    ("security.md", "{} times what a message is when expanded", WORDS[budget.READ]),
    ("security.md", "when expanded, {} bytes a row", budget.ROW),
    ("security.md", "bytes a row, {} times its vectors", WORDS[budget.ANSWERED]),
    ("security.md", "at most {} messages' worth expanded", arrow.EXPANSION),
    ("security.md", "each; from {} KiB on they are booked", budget.KEPT_BYTES // KIB),
    ("security.md", "A call that finds no room waits for {} second", {1: "a"}[int(memory.WAIT_SECS)]),
    ("security.md", "one that is under way for {} second counts", {1: "a"}[int(grpccalls.MOMENT_SECS)]),
    ("security.md", "no more places when he is {} second behind", {1: "a"}[int(stream_progress.UNREAD_SECS)]),
    ("security.md", "| {} s and a second for each 64 KiB of the body", f"{transferlimits.GRACE_SECS:g}"),
    ("security.md", "10 s and a second for each {} KiB of the body", transferlimits.SLOWEST_BYTES // KIB),
    ("security.md", "(a ring of two files, {} MB each)", journal.RING_BYTES // MIB),
    ("security.md", "{} unless `min_version` says 1.3", SETTINGS.tls.min_version),
    ("deployment.md", "within `graceful_shutdown_timeout_secs` ({})", SETTINGS.graceful_shutdown_timeout_secs),
    (
        "deployment.md",
        "If you raise `graceful_shutdown_timeout_secs` above {}",
        SETTINGS.graceful_shutdown_timeout_secs,
    ),
    ("deployment.md", "`--stop-timeout {}` gives long", TIMEOUT_STOP[1]),
    ("moving-in.md", "metrics ports begin at {} (`prometheus_port_start`)", SETTINGS.prometheus_port_start),
    ("moving-in.md", "`bind`, {} unless set", SETTINGS.bind),
    ("moving-in.md", "files work for all {} RPCs", len(METHODS) + 2),  # the two of whole Arrow batches besides
    ("metrics.md", "behind a text of more than {} s counts as missed", f"{health.DEADLINE_SECS:g}"),
    ("CHANGELOG.md", "wait {} seconds for it instead of 5", f"{multiplexer_channels.RECONNECT_SECS:g}"),
    ("CHANGELOG.md", "`prometheus_port_start` is {};", SETTINGS.prometheus_port_start),
)


def wrong_numbers(name: str, text: str) -> list[str]:
    """Claims of a page whose number is another one in the code, or that the page does not have any more."""
    plain, found = " ".join(text.split()), []
    for page, words, value in CLAIMS:
        before, after = map(re.escape, words.split("{}"))
        told = re.search(rf"{before}(\S+){after}", plain)
        number = told[1].rstrip(".,;:") if told else "not there any more"
        if page == name and number != str(value):
            found.append(f"{words}: {value} in the code, {number}")
    return found


@pytest.mark.parametrize("name", sorted({page for page, _, _ in CLAIMS}))
def test_the_numbers_of_a_page_are_those_of_the_code(name: str) -> None:
    assert wrong_numbers(name, TEXTS[name]) == []


# -- planted errors ---------------------------------------------------------------------------------------------------

DENYING = (
    "There is no authentication yet: put a proxy in front.",
    "The management API has no authentication.",
    "TLS is not supported.",
    "Connections are not encrypted.",
    "Client certificates are planned.",
    "Roles will follow in a later release.",
    "There is no audit.",
    "Prometheus metrics are planned.",
    "Reranking is not yet implemented.",
    "It has no streaming.",
    "The gateway offers no CORS.",
    "Aliases are not supported.",
    "Without SPLADE at the moment.",
    "Requests are not authenticated.",
)
OPENED = ("Whoever reaches the ports may do everything: publish them on 127.0.0.1.", "The appliance asks for nothing.")


@pytest.mark.parametrize("name", ["README.md", "deployment.md"])
@pytest.mark.parametrize("sentence", DENYING)
def test_a_planted_denial_is_found(name: str, sentence: str) -> None:
    text = f"{TEXTS[name]}\n{sentence} And so on.\n"
    assert any(sentence[:-1].lower() in each.lower() for each in [*denials(text), *put_off(text)])


@pytest.mark.parametrize("sentence", OPENED)
def test_a_planted_open_door_is_found(sentence: str) -> None:
    assert len(unconditional(f"{TEXTS['security.md']}\n{sentence}\n")) == 1


@pytest.mark.parametrize("sentence", ["TODO: say how.", "Deleting is not implemented.", "This page is to be written."])
def test_a_planted_gap_is_found(sentence: str) -> None:
    assert len(put_off(f"{TEXTS['operations.md']}\n{sentence}\n")) == 1


@pytest.mark.parametrize(("name", "words", "value"), CLAIMS)
def test_another_number_is_found(name: str, words: str, value: object) -> None:
    """The sentence with a number that is wrong, in the place of the right one."""
    plain = " ".join(TEXTS[name].split())
    right, wrong = words.replace("{}", str(value)), words.replace("{}", f"1{value}")
    assert right in plain
    assert len(wrong_numbers(name, plain.replace(right, wrong, 1))) >= 1
