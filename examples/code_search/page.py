"""The page: what is typed and clicked, and what is shown for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from examples.code_search import repository, snippets
from examples.code_search.embedding import Gateway
from examples.code_search.index import Index
from examples.code_search.indexing import update
from examples.code_search.problems import Problem
from examples.code_search.savings import Savings
from examples.code_search.searching import search

STYLE = Path(__file__).parent / "style.css"
ALL = "all languages"
Update = dict[str, Any]
# Fonts of the machine: the themes' own ones would be fetched from elsewhere.
THEME = gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])


class Desk:
    """What the page's events do. clones: where repositories are cloned to."""

    def __init__(self, index: Index, gateway: Gateway, clones: Path) -> None:
        self.index, self.gateway, self.clones = index, gateway, clones
        # The newest measure: a rebuild that only hits has none of its own.
        self.seconds_per_text: float | None = None

    def run(self, source: str, rebuild: bool) -> Iterator[tuple[str, str]]:
        """(how far it has come, the numbers of the cache)"""
        savings, said = Savings(), ""
        try:
            name = repository.named(source)
            said = snippets.note(f"Fetches {repository.public(name)}")
            yield said, self.numbers(savings)
            folder = repository.fetched(name, self.clones)
            collection = self.collection(name)
            for now in update(self.index, self.gateway, savings, collection, folder, rebuild):
                said = snippets.progress(now, repository.public(name))
                yield said, self.numbers(savings)
        except Problem as problem:
            # How far it came stays: the next run goes on from there.
            yield snippets.problem(problem) + said, self.numbers(savings)

    def numbers(self, savings: Savings) -> str:
        self.seconds_per_text = savings.seconds_per_text or self.seconds_per_text
        return snippets.savings(savings, self.seconds_per_text)

    def ask(self, question: str, source: str, path: str, language: str, limit: int, rerank: bool) -> str:
        try:
            answer = search(
                self.index,
                self.gateway,
                self.collection(repository.named(source)),
                question,
                limit=int(limit),
                path=path,
                language="" if language == ALL else language,
                rerank=rerank,
            )
        except Problem as problem:
            return snippets.problem(problem)
        return snippets.hits(answer, question)

    def collection(self, name: str) -> str:
        return self.index.collection(name, self.gateway.model)

    def state(self, source: str) -> tuple[str, Update]:
        """What is in the index of a source, and the languages to choose from."""
        if not source.strip():
            return "", gr.update(choices=[ALL], value=ALL)
        try:
            collection = self.collection(repository.named(source))
            there, languages = len(self.index.keys(collection)), self.index.languages(collection)
        except Problem:
            there, languages = 0, []
        said = f"{there:,} chunks of this source are in the index." if there else "Nothing of this source is indexed."
        return snippets.note(said), gr.update(choices=[ALL, *languages], value=ALL)

    def choices(self, source: str, chosen: str) -> Update:
        _, found = self.state(source)
        return gr.update(choices=found["choices"], value=chosen if chosen in found["choices"] else ALL)


def build(desk: Desk, source: str, place: str) -> gr.Blocks:
    """source: what stands in its field at first. place: of the index, for the reader."""
    gateway = desk.gateway
    with gr.Blocks(title="Code search", analytics_enabled=False) as page:
        gr.Markdown("# Code search")
        gr.HTML(
            snippets.note(
                f"Finds code by what it does. Embeddings: instance {gateway.model} of the appliance at {gateway.url}"
                f"{f', ranks: {gateway.reranker}' if gateway.reranker else ''}. Index: Qdrant in {place}."
            )
        )
        where = gr.Textbox(
            source,
            label="Folder of this machine, or URL of a git repository",
            placeholder="/home/me/project or https://…",
            max_lines=1,
            elem_id="source",
        )
        with gr.Row():
            begin = gr.Button("Index", variant="primary", size="md", elem_id="index")
            again = gr.Button("Rebuild the index", size="md", elem_id="rebuild")
            stop = gr.Button("Stop", size="md", interactive=False, elem_id="stop")
        status = gr.HTML(elem_id="status")
        numbers = gr.HTML(desk.numbers(Savings()), elem_id="numbers")
        question = gr.Textbox(
            label="What do you look for?",
            placeholder="where a busy server is asked again",
            max_lines=1,
            elem_id="question",
        )
        with gr.Row(equal_height=True):
            path = gr.Textbox(label="Folder or file", placeholder="src/server", max_lines=1, elem_id="path")
            language = gr.Dropdown([ALL], value=ALL, label="Language", elem_id="language")
            limit = gr.Slider(1, 50, value=10, step=1, label="Results")
            rerank = gr.Checkbox(False, label="Rerank", visible=bool(gateway.reranker), elem_id="rerank")
        find = gr.Button("Search", variant="primary", size="md", elem_id="search")
        results = gr.HTML(elem_id="results")

        def indexes(rebuild: bool) -> Callable[[str], Iterator[tuple[str, str, Update]]]:
            def run(text: str) -> Iterator[tuple[str, str, Update]]:
                for said, told in desk.run(text, rebuild):
                    yield said, told, gr.update(interactive=True)

            return run

        def after(text: str, chosen: str) -> tuple[Update, Update]:
            return desk.choices(text, chosen), gr.update(interactive=False)

        # One after the other: two at once would embed the same chunks twice.
        runs = [
            button.click(
                indexes(rebuild),
                where,
                [status, numbers, stop],
                concurrency_id="index",
                concurrency_limit=1,
                show_progress="hidden",
                api_visibility="private",
            )
            for button, rebuild in ((begin, False), (again, True))
        ]
        for run in runs:
            run.then(after, [where, language], [language, stop], show_progress="hidden", api_visibility="private")
        stopped = snippets.note("Stopped. Index goes on where it stopped.")
        stop.click(
            lambda: (stopped, gr.update(interactive=False)),
            None,
            [status, stop],
            cancels=runs,
            show_progress="hidden",
            api_visibility="private",
        )
        gr.on(
            [question.submit, find.click],
            desk.ask,
            [question, where, path, language, limit, rerank],
            results,
            show_progress="minimal",
            api_visibility="private",
        )
        gr.on(
            [page.load, where.submit],
            desk.state,
            where,
            [status, language],
            show_progress="hidden",
            api_visibility="private",
        )
        where.blur(desk.choices, [where, language], language, show_progress="hidden", api_visibility="private")
    return page
