"""
The source code of Python's standard library at character level: a data set that needs no network. The library
is that of the interpreter that runs this script; the same interpreter always produces the same files.
"""

import re
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))  # data/
from bins import prepare_text, run

# Tests and bundled packages, and what differs between builds of the same version.
SKIPPED = re.compile(
    r"(^|/)(tests?|idle_test|__pycache__|site-packages|dist-packages|_bundled|config-[^/]*)/"
    r"|(^|/)(test_|_sysconfigdata|sitecustomize\.|usercustomize\.)[^/]*$"
)


def read_library(folder: Path) -> tuple[str, dict]:
    """
    Return the source files of this interpreter's library, sorted by path and separated by blank lines, and a
    description of their origin; `folder` is unused. Files with non-ASCII characters are skipped, since they
    would add many rare characters.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py") if path.is_file()}
    sources = [paths[name].read_bytes() for name in sorted(paths) if not SKIPPED.search(name)]
    texts = [source.decode("ascii") for source in sources if source.isascii()]
    text = "\n".join(texts).replace("\r\n", "\n").replace("\r", "\n")
    return text, {"name": "Python standard library", "version": sys.version, "files": len(texts)}


if __name__ == "__main__":
    run(prepare_text, __file__, __doc__, read_library)
