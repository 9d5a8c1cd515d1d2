"""The commands of README.md, docs/ and the other pages, for the tests that run or check the commands."""

import re
import shlex

from runs import REPO

SCRIPTS = ("train.py", "sample.py", "bench.py", "export.py", "compare.py", "sweep.py")
PROGRAMS = "python|torchrun|sbatch|accelerate|deepspeed|mpirun|srun|pytest"


def documents():
    """README.md, all pages of documentation and the lessons, also the page for programs."""
    others = [REPO / "data/README.md", REPO / "measure/README.md", REPO / "AGENTS.md"]
    pages = [page for folder in ("docs", "lessons") for page in sorted((REPO / folder).glob("*.md"))]
    return [REPO / "README.md", *pages, *others]


def files():
    """(name, content) of every file in the pages, a Python block that begins with its name in a comment."""
    for path in documents():
        yield from re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", path.read_text(), re.S | re.M)


def without_comment(line):
    """The line up to a # that starts a comment of the shell."""
    return re.split(r"(?:^|\s)#", line)[0].strip()


def commands():
    """(page, command) of every command in the shell blocks, also of notebooks, and between backquotes."""
    for path in documents():
        text, page = path.read_text(), str(path.relative_to(REPO))
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M):
            for line in block.replace("\\\n", " ").splitlines():
                for command in line.split("&&"):
                    if command := without_comment(command).removeprefix("!"):
                        yield page, command
        prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
        for command in re.findall(rf"`((?:{PROGRAMS}) [^`]+)`", prose):
            yield page, command.replace("\n", " ").replace(r"\|", "|")


def script_of(words):
    """Which script the words of a command run, if any."""
    return next((word for word in words if word in SCRIPTS), None)


def arguments(command, script):
    """The words that a command passes to this script; None if the command runs something else."""
    words = shlex.split(command.replace("$SMALL", "").replace(" CONFIG ", " config/train_gpt2.py "))
    if "cluster/slurm.sh" in words:  # passes its words on to train.py
        words[words.index("cluster/slurm.sh")] = "train.py"
    return words[words.index(script) + 1 :] if script_of(words) == script else None
