"""The HTML of results. All that comes from files, questions and servers is escaped here: a file may say anything."""

import html
import re
from collections.abc import Iterable

from pygments.lexers import get_lexer_by_name
from pygments.lexers.special import TextLexer
from pygments.token import STANDARD_TYPES, Token
from pygments.util import ClassNotFound

from examples.code_search.index import Hit
from examples.code_search.indexing import Progress
from examples.code_search.savings import Savings
from examples.code_search.searching import Answer

SHOWN_LEFT_OUT = 50
UNMARKED = frozenset("the and for are that this what where when which who how with from into does not".split())
LEXERS = {"proto": "protobuf", "csharp": "c#", "svelte": "html", "vue": "html"}  # where the grammars' names are others
FORMULA = (
    "Seconds saved = hits &times; the seconds that a computed text took &minus; the seconds that the hits took. What a "
    "computed text takes is measured where all texts of a request were computed; of a request with both, the hits took "
    "what the misses did not."
)


def hits(answer: Answer, question: str) -> str:
    """The list of results."""
    kind = "scores of the reranker" if answer.reranked else "scores are cosines"
    asked = f", the question's vector: cache {answer.cache}" if answer.cache else ""
    found = counted(len(answer.hits), "result") if answer.hits else "Nothing found, do the filters fit?"
    head = f"{found} ({answer.seconds:.2f} s, {kind}{asked}) for: {question.strip()}"
    words = sorted(set(re.findall(r"\w{3,}", question.lower())) - UNMARKED, key=len, reverse=True)
    return f'<div class="head">{html.escape(head)}</div>' + "".join(_hit(hit, words) for hit in answer.hits)


def _hit(hit: Hit, words: list[str]) -> str:
    entry, chunk = hit.entry, hit.entry.chunk
    place = f"{entry.path}:{chunk.first}" + (f"-{chunk.last}" if chunk.last > chunk.first else "")
    rows = "".join(
        f'<span class="line"><span class="number">{number}</span>{line}</span>'
        for number, line in enumerate(_lines(chunk.text, entry.language, words), chunk.first)
    )
    return (
        f'<div class="hit"><div class="place"><b>{html.escape(place)}</b>'
        f'<span class="language">{html.escape(entry.language)}</span><span class="score">{hit.score:.3f}</span></div>'
        f"<pre>{rows}</pre></div>"
    )


def _lines(text: str, language: str, words: list[str]) -> list[str]:
    """Each line with its colours, and the words of the question marked."""
    try:
        lexer = get_lexer_by_name(LEXERS.get(language, language), stripnl=False, ensurenl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False, ensurenl=False)
    marks = re.compile("|".join(map(re.escape, words)), re.IGNORECASE) if words else None
    lines = [""]
    for kind, value in lexer.get_tokens(text):
        while kind not in STANDARD_TYPES:
            kind = kind.parent or Token
        for at, part in enumerate(value.split("\n")):
            if at:
                lines.append("")
            if part:
                lines[-1] += f'<span class="{STANDARD_TYPES[kind]}">{_marked(part, marks)}</span>'
    return lines


def _marked(text: str, marks: re.Pattern[str] | None) -> str:
    if marks is None:
        return html.escape(text)
    found, end = "", 0
    for match in marks.finditer(text):
        found += f"{html.escape(text[end : match.start()])}<mark>{html.escape(match[0])}</mark>"
        end = match.end()
    return found + html.escape(text[end:])


def progress(now: Progress, source: str) -> str:
    """How far an indexing has come."""
    done = now.kept + now.written
    share = 100 if now.finished else 100 * done // max(now.total, 1)
    words = f"{done:,} of {counted(now.total, 'chunk')} of {counted(now.texts, 'file')}"
    if now.finished:
        words = f"{words} are in the index: {now.kept:,} were there, {now.written:,} written, {now.deleted:,} deleted"
    bar = f'<div class="bar"><div style="width:{share}%"></div></div>'
    lines = [f"<b>{html.escape(source)}</b>", bar, html.escape(words)]
    if now.note:
        lines.append(f'<span class="waits">{html.escape(now.note)}</span>')
    return f'<div class="progress">{"".join(f"<div>{line}</div>" for line in lines)}{_left_out(now)}</div>'


def _left_out(now: Progress) -> str:
    if not now.left_out or not now.finished:
        return ""
    rows = "".join(f"<li>{html.escape(f'{path}: {reason}')}</li>" for path, reason in now.left_out[:SHOWN_LEFT_OUT])
    more = len(now.left_out) - SHOWN_LEFT_OUT
    rest = f"<li>and {more:,} more</li>" if more > 0 else ""
    return f"<details><summary>{counted(len(now.left_out), 'file')} left out</summary><ul>{rows}{rest}</ul></details>"


def savings(found: Savings, seconds_per_text: float | None) -> str:
    """The three numbers of the cache, and how they come about."""
    saved = found.saved(seconds_per_text)
    tiles = {
        "cache hits": f"{found.hits:,}",
        "cache misses": f"{found.misses:,}",
        "seconds saved": "?" if saved is None else f"{saved:.1f}",
    }
    rows = "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles.items())
    return f'<div class="tiles">{rows}</div><div class="small">{"".join(_about(found, saved, seconds_per_text))}</div>'


def _about(found: Savings, saved: float | None, seconds_per_text: float | None) -> Iterable[str]:
    if found.asked and not found.hits + found.misses:
        yield "The gateway tells nothing of a cache: it has none, or it is off. "
    elif saved is None:
        yield "Nothing was computed since this page was started, so what the hits saved is not known. "
    elif seconds_per_text:
        yield f"A computed text took {1000 * seconds_per_text:.1f} ms. "
    yield FORMULA


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def note(text: object) -> str:
    return f'<div class="note">{html.escape(str(text))}</div>'


def problem(text: object) -> str:
    return f'<div class="problem" role="alert">{html.escape(str(text))}</div>'
