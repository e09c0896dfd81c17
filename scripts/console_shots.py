"""Pictures of every page of the console: build/console/PAGE-THEME-WIDTH.png (make console-shots)."""

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from testing import demo  # noqa: E402
from testing.markup import HOSTILE  # noqa: E402
from testing.running import TINY, RunningAppliance  # noqa: E402

SHOTS = ROOT / "build" / "console"


def main() -> None:
    shutil.rmtree(SHOTS, ignore_errors=True)
    SHOTS.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        hostile = Path(folder) / HOSTILE
        shutil.copytree(TINY, hostile)
        with RunningAppliance(Path(folder), seeds="") as box:
            url = box.url.replace("127.0.0.1", "localhost")
            gateway = url.replace(str(box.api_port), str(box.http_port))
            demo.program("testing.console_browser", url, gateway, TINY, hostile, SHOTS)
    print(f"{len(list(SHOTS.iterdir()))} pictures in {SHOTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
