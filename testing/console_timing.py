"""How soon a page of the console can be used, in a browser without windows. Run in .venv-demo; prints JSON.

python -m testing.console_timing URL TIMES
"""

import json
import statistics
import sys

from testing.console_browser import chromium

SINCE_NAVIGATION = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
SENT = "performance.getEntries().reduce((sum, entry) => sum + (entry.transferSize || 0), 0)"


def main() -> None:
    """ms: until its scripts have run, of a browser that was there before. bytes: over the network, of a first visit."""
    url, times = sys.argv[1], int(sys.argv[2])
    took, sent = list[float](), list[float]()
    with chromium() as browser:
        for _ in range(times):
            context = browser.new_context()
            page = context.new_page()
            page.goto(url)
            took.append(page.evaluate(SINCE_NAVIGATION))
            sent.append(page.evaluate(SENT))
            context.close()
    print(json.dumps({"ms": statistics.median(took), "bytes": max(sent)}))


if __name__ == "__main__":
    main()
