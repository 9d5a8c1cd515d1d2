"""
Run train.py with many settings on a pretended GPU, compare each curve with the CPU's, and print how often the
host waits in a step, and where.

    python tests/pretend_cuda/rehearse.py                   all cases
    python tests/pretend_cuda/rehearse.py "2 pp" "zero 3"   only these
    python tests/pretend_cuda/rehearse.py --table           only print the table of docs/benchmarks.md
    python tests/pretend_cuda/rehearse.py --json=FILE       also write what was found

A case fails if the run fails, if its losses are not the CPU's, if something is reported as a problem, or if
the host does not wait as often as `WAITS` says. The exit status is 1 if a case failed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

from runs import REPO, TINY, Run, Zygote, column, tiny_data

SLOTS = 2  # processes at a time
STEP = "2"  # the step whose waits are counted: no evaluation, nothing saved unless the case says so
SHORT = [*TINY, "--max_iters=3", "--eval_iters=1"]
ON_GPU = ["--device=auto", "--compile=False", "--dtype=tf32"]  # tf32 has the bits of float32 here
ON_CPU = ["--device=cpu", "--dtype=float32"]
# settings that a curve depends on
OF_A_MODEL = ("--arch", "--optim", "--muon", "--n_", "--bias", "--data_", "--max_")

H100 = {}
A100 = {
    "PRETEND_CUDA_CAPABILITY": "8.0",
    "PRETEND_CUDA_NAME": "NVIDIA A100-SXM4-40GB",
    "PRETEND_CUDA_GB": "40",
}
T4 = {"PRETEND_CUDA_CAPABILITY": "7.5", "PRETEND_CUDA_NAME": "Tesla T4", "PRETEND_CUDA_GB": "15"}

EXACT = 1e-4  # how far losses may be from the CPU's in float32
HALF = 0.03  # in bfloat16 and float16
NEAR = 0.3  # with gradients that are compressed, or weights that are averaged


@dataclass(frozen=True)
class Case:
    """A run of train.py. Without a limit, which dropout needs, the losses are not compared."""

    flags: str
    processes: int = 1
    limit: float | None = EXACT
    gpu: dict[str, str] = field(default_factory=dict)


MUON = "--arch=nanochat --optimizer=muon --muon_lr=0.005"
CASES = {
    # precision
    "plain": Case(""),
    "float32": Case("--dtype=float32"),
    "bf16": Case("--dtype=bfloat16", limit=HALF),
    "fp16": Case("--dtype=float16", limit=HALF, gpu=T4),
    "auto on a T4": Case("--dtype=auto", limit=HALF, gpu=T4),
    "auto on an A100": Case("--dtype=auto", limit=HALF, gpu=A100),
    "deterministic dropout": Case("--deterministic=True --dropout=0.1", limit=None),
    # one process, sharded
    "zero 2": Case("--zero=2"),
    "zero 3": Case("--zero=3"),
    "zero 3 bf16": Case("--zero=3 --dtype=bfloat16", limit=HALF),
    "zero 3 fp16": Case("--zero=3 --dtype=float16", limit=HALF, gpu=T4),
    "cpu_offload": Case("--zero=2 --cpu_offload=True"),
    "cpu_offload fp16": Case("--zero=3 --cpu_offload=True --dtype=float16", limit=HALF, gpu=T4),
    # architectures and optimizers
    "muon": Case(MUON),
    "muon fp16": Case(f"{MUON} --dtype=float16", limit=0.05, gpu=T4),
    "muon zero 3": Case(f"{MUON} --zero=3"),
    "llama gqa": Case("--arch=llama --n_kv_head=1"),
    "bias": Case("--bias=True"),
    "experts": Case("--n_expert=4"),
    "experts bf16": Case("--n_expert=4 --dtype=bfloat16", limit=HALF),
    "experts bf16 A100": Case("--n_expert=4 --dtype=bfloat16", limit=HALF, gpu=A100),
    "experts fp16": Case("--n_expert=4 --dtype=float16", limit=HALF, gpu=T4),
    "experts deterministic": Case("--n_expert=4 --deterministic=True"),
    # the same bits on any number of processes
    "exact": Case("--exact=True --batch_size=2 --gradient_accumulation_steps=4"),
    "exact experts bf16": Case("--exact=True --n_expert=4 --dtype=bfloat16", limit=HALF),
    # memory, the log, checks
    "recompute full": Case("--activation_checkpointing=full"),
    "recompute selective": Case("--activation_checkpointing=selective"),
    "recompute every:1 zero 3": Case("--activation_checkpointing=every:1 --zero=3"),
    "profile": Case("--profile=True --max_iters=9"),
    "check_ranks": Case("--check_ranks_interval=2"),
    "save_interval": Case("--save_interval=1"),
    "shuffle": Case("--data_order=shuffle"),
    # two processes
    "2 ddp": Case("", 2),
    "2 ddp fp16": Case("--dtype=float16", 2, HALF, T4),
    "2 zero 1": Case("--zero=1", 2),
    "2 zero 2": Case("--zero=2", 2),
    "2 zero 3": Case("--zero=3", 2),
    "2 zero 3 fp16": Case("--zero=3 --dtype=float16", 2, HALF, T4),
    "2 hsdp": Case("--zero=3 --dp_replicate=2", 2),
    "2 tp": Case("--tp=2", 2),
    "2 tp bf16": Case("--tp=2 --dtype=bfloat16", 2, HALF),
    "2 cp": Case("--cp=2", 2),
    "2 pp": Case("--pp=2", 2),
    "2 pp fp16": Case("--pp=2 --dtype=float16", 2, HALF, T4),
    "2 pp gpipe zero 2": Case("--pp=2 --pp_schedule=gpipe --zero=2", 2),
    "2 pp zbv": Case("--pp=2 --pp_schedule=zbv --n_layer=4", 2),
    "2 ep": Case("--n_expert=4 --ep=2", 2),
    "2 ep zero 3": Case("--n_expert=4 --ep=2 --zero=3", 2),
    "2 muon zero 1": Case(f"{MUON} --zero=1", 2),
    "2 muon tp": Case(f"{MUON} --tp=2", 2),
    "2 fp16 hook": Case("--grad_compression=fp16", 2, 2e-3),
    "2 int8": Case("--grad_compression=int8", 2, 0.02),
    "2 powersgd": Case("--grad_compression=powersgd:1", 2, NEAR),
    "2 islands": Case("--islands=2 --local_steps=2", 2, NEAR),
    "2 exact": Case("--exact=True --batch_size=2 --gradient_accumulation_steps=4", 2),
    "2 exact muon zero 1": Case(f"{MUON} --exact=True --zero=1", 2),
    "2 exact zero 3 fp16": Case("--exact=True --zero=3 --dtype=float16", 2, HALF, T4),
    "2 exact hsdp": Case("--exact=True --zero=3 --dp_replicate=2", 2),
    "2 exact pp": Case(f"{MUON} --exact=True --pp=2", 2),
    "2 shares": Case("--shares=auto", 2),
}
# How often the host waits for the GPU in a step, where that is not once, and why. Once is where it reads the
# numbers from which all ranks decide.
OFFLOAD = "FSDP waits for the copy of each gradient to the CPU, after the last backward pass"
TOKENS = "the number of tokens for other ranks, which the all-to-all needs on the CPU, once in each layer"
WAITS = {
    "cpu_offload": (16, OFFLOAD),
    "cpu_offload fp16": (19, f"{OFFLOAD}. The host also waits for the scale of the loss, which the CPU uses"),
    "check_ranks": (2, "the checksums of the weights"),
    "save_interval": (2, "the copies for the checkpoint"),
    "2 ep": (3, TOKENS),
    "2 ep zero 3": (3, TOKENS),
    "2 powersgd": (
        22,
        "PyTorch's PowerSGD hook draws the matrices on the CPU; 2 after the first compressed step",
    ),
}
# what `pytest` runs; `pytest -m slow` runs the others
DAILY = (
    "plain",
    "bf16",
    "fp16",
    "zero 3",
    "cpu_offload",
    "muon",
    "experts bf16",
    "deterministic dropout",
    "2 exact",
    "2 ddp",
    "2 zero 3 fp16",
    "2 tp",
    "2 cp",
    "2 pp",
    "2 ep",
    "2 exact zero 3 fp16",
)


@dataclass
class Found:
    """What a rehearsal has shown; `wrong` is empty if it passed."""

    wrong: str
    distance: float | None  # the largest difference between its losses and the CPU's
    waits: list[tuple[int, str, str]]  # (count, kind, place) in one step, of the rank that waits most
    text: str  # the output of all ranks

    @property
    def count(self) -> int:
        """How often the host waits in a step."""
        return sum(row[0] for row in self.waits)


def expected_waits(name: str) -> int:
    """How often the host waits in a step of this case."""
    return WAITS[name][0] if name in WAITS else 1


def prepared() -> Zygote:
    """A process whose forks can pretend to have a GPU."""
    return Zygote({"PRETEND_CUDA": "loaded", "PYTHONPATH": str(HERE)})


def model_flags(case: Case) -> tuple[str, ...]:
    """The settings that its curve depends on."""
    return tuple(flag for flag in case.flags.split() if flag.startswith(OF_A_MODEL))


def start(
    zygote: Zygote, work: Path, script: str, args: list[str], case: Case, **env: str
) -> tuple[Run, Path]:
    """
    Start a script on the pretended GPUs of a case; returns the run, and the file to which its processes
    report.
    """
    report = work / f"report{next(zygote.number)}.jsonl"
    report.touch()
    variables = {
        "PRETEND_CUDA_ROOT": str(REPO),
        "PRETEND_CUDA_REPORT": str(report),
        "PRETEND_CUDA_DEVICES": str(case.processes),
    }
    words = [str(REPO / script), *args]
    run = zygote.start(
        words, work, case.processes, "tests/pretend_cuda/run.py", env=variables | case.gpu | env
    )
    return run, report


def start_case(zygote: Zygote, work: Path, name: str, *more: str) -> tuple[Run, Path]:
    """Start train.py as a case says."""
    case = CASES[name]
    args = [*SHORT, *ON_GPU, *case.flags.split(), f"--out_dir={folder_of(name)}", *more]
    return start(zygote, work, "train.py", args, case)


def folder_of(name: str) -> str:
    """The run's folder of a case."""
    return name.replace(" ", "_").replace(":", "_")


def curves_on_a_cpu(
    zygote: Zygote, work: Path, names: Iterable[str]
) -> dict[tuple[str, ...], dict[int, float]]:
    """The losses of the same models on the CPU, by the settings that they depend on."""
    wanted = sorted({model_flags(CASES[name]) for name in names})
    for first in range(0, len(wanted), SLOTS):
        runs = []
        for number in range(first, min(first + SLOTS, len(wanted))):
            args = [*SHORT, *wanted[number], f"--out_dir=cpu{number}"]
            runs.append(zygote.start(args, work))
        for run in runs:
            run.wait()
    return {flags: column(work / f"cpu{number}", "loss") for number, flags in enumerate(wanted)}


def judged(work: Path, name: str, run: Run, report: Path, curve: dict[int, float]) -> Found:
    """Compare a run that has ended with the CPU's curve and with the table of waits."""
    case = CASES[name]
    text = run.text()
    reports = [json.loads(line) for line in report.read_text().splitlines()]
    steps = [found["waits"].get(STEP, []) for found in reports]
    found = Found("", None, max(steps, key=lambda rows: sum(row[0] for row in rows), default=[]), text)
    if any(run.codes):
        lines = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or line.startswith("error")]
        found.wrong = f"exit {run.codes}: {(errors or lines or ['no output'])[0][:400]}"
        return found
    if problems := sorted({problem for r in reports for problem in r["problems"]}):
        found.wrong = "; ".join(problems)
    elif len(reports) != case.processes:
        found.wrong = f"{len(reports)} of {case.processes} processes reported"
    elif "grad norm nan" in text:
        found.wrong = "the gradient's norm is nan"  # float16 skips such steps without a word
    elif found.count != expected_waits(name):
        found.wrong = f"the host waits {found.count} times in a step, and not {expected_waits(name)}"
    if case.limit is not None:
        losses = column(work / folder_of(name), "loss")
        found.distance = max(abs(losses[step] - curve[step]) for step in curve)
        if found.distance > case.limit:
            found.wrong = f"its losses are {found.distance:.2g} from the CPU's"
    return found


def rehearse(
    zygote: Zygote, work: Path, names: Iterable[str], timeout: float = 300
) -> Iterator[tuple[str, Found]]:
    """
    Run cases, at most SLOTS processes at a time, in a folder with the data set tiny. Yields (case, what was
    found) when a case ends.
    """
    curves = curves_on_a_cpu(zygote, work, names)
    waiting = list(names)
    running = {}
    end = time.monotonic() + timeout
    while waiting or running:
        used = sum(CASES[name].processes for name in running)
        while waiting and used + CASES[waiting[0]].processes <= SLOTS:
            name = waiting.pop(0)
            running[name] = start_case(zygote, work, name)
            used += CASES[name].processes
        for name, (run, report) in list(running.items()):
            if run.poll():
                del running[name]
                yield name, judged(work, name, run, report, curves[model_flags(CASES[name])])
        if time.monotonic() > end:
            for run, _ in running.values():
                run.kill()
            raise AssertionError(f"still running after {timeout} s: {', '.join(running)}")
        time.sleep(0.01)


def table() -> str:
    """The table of docs/benchmarks.md, from CASES and WAITS: first the cases that wait once."""
    names_of = {}  # {(waits, reason): names}
    for name in sorted(CASES, key=expected_waits):
        names_of.setdefault(WAITS.get(name, (1, "")), []).append(name)
    rows = ["| waits | cases | reason |", "|---|---|---|"]
    rows += [f"| {count} | {', '.join(names)} | {reason} |" for (count, reason), names in names_of.items()]
    return "\n".join(rows)


def print_case(name: str, result: Found) -> None:
    """What was found, and the lines that wait."""
    said = f"FAILED: {result.wrong}" if result.wrong else "ok"
    if result.distance is not None:
        said += f", {result.distance:.1e} from the CPU"
    print(f"{name:28} {said}; in a step the host waits {result.count} times", flush=True)
    for count, kind, place in result.waits:
        print(f"{'':32}{count} x {kind}: {place}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {', '.join(CASES)}")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case is named {', '.join(unknown)}; there are {', '.join(CASES)}")
    if options.table:
        print(table())
        return
    zygote = prepared()
    found = {}
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        tiny_data(folder)
        for name, result in rehearse(zygote, Path(folder), options.cases or list(CASES), timeout=3600):
            found[name] = result
            print_case(name, result)
    zygote.close()
    if options.json:
        options.json.write_text(json.dumps({name: vars(result) for name, result in found.items()}, indent=1))
    sys.exit(any(result.wrong for result in found.values()))


if __name__ == "__main__":
    main()
