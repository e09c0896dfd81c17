"""The engine's command line: TEI's flags, all of them; what has no meaning here is named, what is wrong is refused."""

import pytest

from appliance.core import engine_flags
from appliance.core.problems import Problem

# Every flag of text-embeddings-router 1.9 with a value that it takes.
TEI_FLAGS = {
    "--revision": "main",
    "--tokenization-workers": "2",
    "--dtype": "float32",
    "--served-model-name": "m",
    "--pooling": "cls",
    "--max-concurrent-requests": "1",
    "--max-batch-tokens": "1",
    "--max-batch-requests": "1",
    "--max-client-batch-size": "1",
    "--auto-truncate": "false",
    "--default-prompt-name": "query",
    "--default-prompt": "query: ",
    "--dense-path": "2_Dense",
    "--hf-token": "hf_x",
    "--hf-api-token": "hf_x",
    "--hostname": "127.0.0.1",
    "--port": "3000",
    "--uds-path": "/tmp/x",
    "--huggingface-hub-cache": "/cache",
    "--payload-limit": "2000000",
    "--api-key": "x",
    "--otlp-endpoint": "http://x:4317",
    "--otlp-service-name": "x",
    "--prometheus-port": "9000",
    "--cors-allow-origin": "*",
}
SWITCHES = ("--json-output", "--disable-spans", "--auto-truncate")


@pytest.mark.parametrize("flag", TEI_FLAGS)
def test_every_flag_of_tei_is_taken(flag: str) -> None:
    for given in ([flag, TEI_FLAGS[flag]], [f"{flag}={TEI_FLAGS[flag]}"]):
        parsed = engine_flags.of_instance("m", given)
        assert set(engine_flags.ignored(parsed)) == ({flag} & set(engine_flags.IGNORED))


@pytest.mark.parametrize("flag", SWITCHES)
def test_every_switch_of_tei_is_taken(flag: str) -> None:
    engine_flags.of_instance("m", [flag])


def test_an_origin_may_be_given_more_than_once() -> None:
    parsed = engine_flags.of_instance("m", ["--cors-allow-origin", "a", "--cors-allow-origin", "b"])
    assert list(engine_flags.ignored(parsed)) == ["--cors-allow-origin"]


@pytest.mark.parametrize(
    ("extra_args", "words"),
    [
        (["--nope"], "--nope"),
        (["--max-batch"], "--max-batch"),  # no abbreviations
        (["--max-batch-requests"], "--max-batch-requests"),
        (["--max-batch-requests", "0"], "positive"),
        (["--auto-truncate", "yes"], "true or false"),
        (["--runtime", "cuda"], "onnxruntime"),
        (["word"], "word"),
        (["--help"], "--help"),
        (["-h"], "-h"),
        (["--default-prompt", "a", "--default-prompt-name", "b"], "exclude each other"),
    ],
    ids=str,
)
def test_what_the_engine_would_refuse_is_a_problem_of_the_field(extra_args: list[str], words: str) -> None:
    with pytest.raises(Problem) as caught:
        engine_flags.of_instance("m", extra_args)
    assert 'Field "extra_args"' in caught.value.message
    assert words in caught.value.message
