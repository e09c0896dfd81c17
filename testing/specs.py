"""Values for property tests: what people may write into a spec, hostile text included."""

from typing import Any

from hypothesis import settings as examples
from hypothesis import strategies as st

from appliance.core import settings
from appliance.core.instance import PROGRAMS, InstanceSpec
from appliance.core.settings import Settings
from appliance.core.state import Instance

LAW = examples(derandomize=True, deadline=None, max_examples=60)

# Each of these once broke somebody's config writer: expansions, comment characters, quotes, odd white space, sections.
# "%(here)s" is not among them: it has tests of its own.
HOSTILE = [
    *("%", "%%", "%s", "%d", "100%", "%(x)s", "%(ENV_HOME)s", "%(program_name)s", "%(process_num)02d", "%("),
    *(";", "#", " ;", " #", "a ; b # c", "  ;;  ##", "\u00a0;x", "\u2003#x", "\u3000;", "\u202f#", "\u1680;", "x ';"),
    *("'", '"', "''", '""', "it's", "\"both' ;", "\\", "\\\\", "\\'", '\\"', "a\\ b", "'\"'\"'", "' ;'", '" #"'),
    *("a=b", "=", ":", "[program:evil]", "[include]", "key=value ; comment", "$HOME", "`id`", "$(id)", "~", "*", "&&"),
    *(" lead", "trail ", "  ", "", "-", "--", "日本語 モデル", "é\u0301", "\ufeff", "\u202e", "\u200b", "💥"),
    "x" * 4000,
]
ODD_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029"), max_size=20)
TEXT = st.lists(st.sampled_from(HOSTILE) | ODD_TEXT, max_size=4).map("".join).map(lambda text: text[:4096])
NAMES = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_-]{0,63}\Z").filter(lambda name: name not in PROGRAMS)
ARGUMENTS = st.lists(TEXT.filter(lambda text: not text.startswith("-")), max_size=5)


@st.composite
def given_specs(draw: st.DrawFn) -> dict[str, Any]:
    """A request body that must be accepted."""
    optional = {
        "revision": TEXT.map(lambda text: text[:200]).filter(lambda text: bool(text) and text[0] != "-"),
        "port": st.integers(1024, 30000),
        "prometheus_port": st.integers(30100, 65000),
        "replicas": st.integers(1, 64),
        "max_batch_tokens": st.integers(1, 2**31 - 1),
        "max_concurrent_requests": st.integers(1, 100_000),
        "pooling": st.sampled_from(["cls", "mean", "splade", "last-token"]),
        "dtype": st.sampled_from(["float16", "float32"]),
        "startup_timeout_secs": st.integers(1, 3600),
        "engine": st.sampled_from(["tei", "embedded"]),
        "token_ids": st.sampled_from(["accept", "refuse"]),
        "extra_args": ARGUMENTS,
        "gpu_id": st.integers(0, 7),
    }
    if draw(st.booleans()):
        del optional["gpu_id"]
        optional["gpu_ids"] = st.lists(st.integers(0, 7), max_size=4)
    chosen = draw(st.sets(st.sampled_from(sorted(optional))))
    model = draw(TEXT.map(lambda text: ("m" + text)[:500] + "m"))
    return {"name": draw(NAMES), "model_id": model, **{key: draw(optional[key]) for key in sorted(chosen)}}


def configured(**keys: Any) -> Settings:
    return settings.parse(keys, {}, {}, "/data")


def spec(name: str = "a", **fields: Any) -> InstanceSpec:
    return InstanceSpec.parse({"name": name, "model_id": "org/model", **fields})


def instance(given: InstanceSpec, **fields: Any) -> Instance:
    count = given.replicas
    return Instance(given, tuple(range(8080, 8080 + count)), tuple(range(8700, 8700 + count)), "now", **fields)
