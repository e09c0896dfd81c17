"""Every line of a file is in exactly one chunk, whatever its syntax."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from examples.code_search.cutting import LIMIT, Block, Chunk, cut
from testing.specs import LAW

LINES = st.lists(
    st.one_of(
        st.sampled_from(["", "   ", "def f():", "    return 1", "}", "<script>"]),
        st.builds(lambda word, times: word * times, st.sampled_from(["a", "word ", "ü"]), st.integers(1, 2500)),
    ),
    max_size=60,
)


@st.composite
def outlines(draw: st.DrawFn, first: int, last: int, depth: int = 3) -> list[Block]:
    """Blocks in order, as a syntax has them; some overlap in a line, some leave lines out."""
    starts = sorted(draw(st.lists(st.integers(first, last), max_size=5)))
    ends = [draw(st.integers(start, last)) for start in starts]
    return [
        Block(start, end, draw(outlines(start, end, depth - 1)) if depth else ())
        for start, end in zip(starts, ends, strict=True)
    ]


@LAW
@given(LINES, st.data())
def test_every_line_is_in_exactly_one_chunk(lines: list[str], data: st.DataObject) -> None:
    text = "\n".join(lines)
    chunks = list(cut(text, data.draw(outlines(0, max(0, len(lines) - 1)))))
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    end = 0
    for chunk in chunks:
        begin = starts[chunk.first - 1] + chunk.column
        assert begin >= end  # nothing twice
        end = begin + len(chunk.text)
        assert chunk.text == text[begin:end]
        assert 0 < len(chunk.text) <= LIMIT
        assert chunk.last - chunk.first == chunk.text.count("\n")
    assert sum(len("".join(chunk.text.split())) for chunk in chunks) == len("".join(text.split()))  # nothing lost
    keys = [chunk.key("a.py") for chunk in chunks]
    assert len(set(keys)) == len(keys)


def test_a_key_is_of_the_path_the_lines_and_the_text() -> None:
    chunk = Chunk(3, 4, 0, "x = 1")
    same = Chunk(3, 4, 0, "x = 1").key("a.py")
    assert chunk.key("a.py") == same
    others = [Chunk(2, 4, 0, "x = 1"), Chunk(3, 5, 0, "x = 1"), Chunk(3, 4, 1, "x = 1"), Chunk(3, 4, 0, "x = 2")]
    assert len({same, chunk.key("b.py"), *(other.key("a.py") for other in others)}) == 6


def test_text_without_a_syntax_is_cut_between_its_paragraphs() -> None:
    paragraph = "\n".join(f"word {number} of many in this long paragraph" for number in range(18))
    chunks = list(cut("\n\n".join([paragraph] * 3)))
    assert [(chunk.first, chunk.last) for chunk in chunks] == [(1, 18), (20, 37), (39, 56)]
    assert {chunk.text for chunk in chunks} == {paragraph}


def test_short_neighbours_are_one_chunk() -> None:
    assert [chunk.text for chunk in cut("import a\n\nimport b\n")] == ["import a\n\nimport b"]
    assert list(cut("")) == list(cut(" \n\n")) == []
