"""Generate appliance/wire from protos/ (`make protos`).

The generated modules are committed, so that installing the package needs no compiler; tests/wire compares them with
a fresh run. protoc writes imports from the root of the proto tree, so they are moved into our package afterwards.
"""

import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent


def generate(target: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto"))
    target.mkdir(parents=True, exist_ok=True)
    options = [f"--python_out={target}", f"--pyi_out={target}", f"--grpc_python_out={target}"]
    includes = [f"-I{ROOT / 'protos'}", f"-I{files('grpc_tools') / '_proto'}"]
    if status := protoc.main(["protoc", *includes, *options, *protos]):
        sys.exit(status)
    for path in target.rglob("*_pb2*.py*"):
        ours = r"^from (tei|tei_appliance|tei_multiplexer)\."
        text = re.sub(ours, r"from appliance.wire.\1.", path.read_text(), flags=re.M)
        path.write_text(text)
        for folder in (path.parent, path.parent.parent):
            if folder != target:
                (folder / "__init__.py").touch()


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "appliance" / "wire")
