"""Search code by what it does, over the embeddings of an appliance: a page in the browser.

Needs `make demo`, and an appliance that is up:

    .venv-demo/bin/python -m examples.code_search --gateway http://127.0.0.1:9002 --model minilm .
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.code_search", description="Search code by what it does.")
    parser.add_argument("source", nargs="?", default="", help="a folder, or the URL of a git repository")
    parser.add_argument("--gateway", default=os.environ.get("TEI_GATEWAY", "http://127.0.0.1:9002"), help="its URL")
    parser.add_argument("--model", default=os.environ.get("TEI_MODEL", "minilm"), help="the instance that embeds")
    parser.add_argument("--reranker", default="", help="an instance that ranks; without it there is no reranking")
    data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "code-search"
    parser.add_argument("--data", type=Path, default=data, help="folder of the index and the clones")
    parser.add_argument("--index", help="URL of a Qdrant, instead of a folder in --data")
    parser.add_argument("--port", type=int, default=7860, help="of the page")
    options = parser.parse_args()

    from examples.code_search.embedding import Gateway
    from examples.code_search.index import Index
    from examples.code_search.page import STYLE, THEME, Desk, build
    from examples.code_search.problems import Problem

    gateway = Gateway(options.gateway, options.model, options.reranker, os.environ.get("TEI_APPLIANCE_KEY", ""))
    place = options.index or str(options.data / "index")
    try:
        index = Index(place)
    except Problem as problem:
        sys.exit(str(problem))
    page = build(Desk(index, gateway, options.data / "clones"), options.source, place)
    try:
        # On loopback alone: whoever reaches the page may read folders of this machine.
        page.launch(
            server_name="127.0.0.1",
            server_port=options.port,
            share=False,
            quiet=True,
            footer_links=[],
            ssr_mode=False,
            theme=THEME,
            css_paths=STYLE,
            prevent_thread_lock=True,
        )
        print(f"Code search: http://127.0.0.1:{options.port}/ (Ctrl-C ends it)", flush=True)
        page.block_thread()
    except OSError:  # all that gradio says of a port that is taken
        sys.exit(f"Port {options.port} of 127.0.0.1 cannot be had: give another --port.")
    finally:
        index.close()


if __name__ == "__main__":
    main()
