"""
Measure how fast train.py runs on this machine: launch it for a few steps and read what it recorded.
train.py's configs and settings are also accepted. If they do not choose a model, a GPU trains GPT-2 124M in
micro-batches that fill its memory, other devices a small model of 10.65M parameters, which takes a minute:
--dataset=shakespeare_char --n_layer=6 --n_head=6 --n_embd=384 --block_size=256 --batch_size=8.

    python bench.py config/train_shakespeare_char.py --batch_size=8    a config, with one setting changed
    python bench.py --nproc=2                               two processes; or torchrun ... bench.py
    python bench.py --nproc=1,2,4 --batch_size=4,8          every combination, in separate launches
    python bench.py --nproc=4 --tp=1,2 --pp=1,2             layouts of four processes; also cp, ep and zero
    python bench.py --comm --nproc=2                        the collectives, by message size
    python bench.py config/train_gpt2.py --plan --devices=64 --hardware=h100    predict the fastest layouts
    python bench.py config/train_gpt2.py --plan --devices=1,8 --hardware=l4,4090    compare GPUs and numbers
    python bench.py config/train_gpt2.py --tune             measure the plan's best few layouts here
    python bench.py --check                                 after an edit of model.py or train.py: what holds?
"""

import isogpt.launch.torch_import  # noqa: F401  (first: sets what must be set before torch is imported)

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed import DistError

from configurator import configure, fail, settings_of, with_equals_signs
from isogpt.check.comparisons import check_model
from isogpt.common import interrupt
from isogpt.common.console import discard_output, print_result
from isogpt.data.data_folder import write_random_tokens
from isogpt.lab.combinations import read_lists
from isogpt.launch.device import pick_device
from isogpt.launch.launchers import adopt_launcher_variables, rank_variables, start_workers
from isogpt.launch.network import own_cores
from isogpt.speed import reports
from isogpt.speed.devices import HARDWARE, KNOWN_CARDS
from isogpt.speed.launches import Launches
from isogpt.speed.memory import memory_estimate
from isogpt.speed.planner import flags_of
from isogpt.speed.trial_runs import DIFFERS
from isogpt.speed.workload import Workload, described_for_bench
from isogpt.training.precision import device_name
from isogpt.training.settings import report
from model import GPT

# -- what to run ---------------------------------------------------------------------------------------------
real_data = True  # False: random tokens, which are also used if the default data set is not prepared
nproc = 0  # processes to launch on this machine (0: one, or as many as the launcher started) [>= 0, <= 1024]
device = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
steps = 20  # steps to measure, after a quarter as many for warm-up [>= 1]
# -- what to report ------------------------------------------------------------------------------------------
weak = False  # with --nproc=1,2,4 or a plan: weak scaling, the global batch grows with the processes
comm = False  # measure the collectives' bandwidth and latency by message size; no training
plan = False  # predict time and memory of all layouts for the same global batch; no training
tune = False  # measure the best few plans for the launched processes, and print the fastest command
devices = ""  # to plan for: a number, or several (1,2,8), which are compared ("": the launched processes)
per_node = 8  # devices of each machine [>= 1]
hardware = "this"  # to plan for: a GPU such as h100 or 4090, several (l4,3090), cpu (a core), this (machine)
device_memory_gb = 0.0  # with a plan: memory of a card that is otherwise like hardware (0: same) [>= 0]
device_tflops = 0.0  # with a plan: 16-bit TFLOP/s on such a card's data sheet (0: as hardware) [>= 0]
device_bandwidth = 0.0  # with a plan: GB/s of its memory, on the data sheet (0: as hardware) [>= 0]
network = 0.0  # Gbit/s between machines (0: usual for the hardware) [>= 0]
check = False  # compare model.py and train.py, small, on every layout, resumed, exported ...; no training
profile = False  # also write a torch.profiler trace, bench_trace.json, and print the slowest operators
json_path = ""  # also write all results to this JSON file
estimate = False  # first print an estimate of the memory on each rank, without allocating it
estimate_world_size = 0  # estimate for so many processes, launching none (0: the launched ones) [>= 0]
# ------------------------------------------------------------------------------------------------------------
TRAIN_PY = Path(__file__).resolve().with_name("train.py")


def mistakes(lists: dict) -> Iterator[str]:
    """A sentence for each mistake in the settings that choose a report."""
    starters = [plan, tune, check, bool(lists)]
    if comm + sum(starters) > 1:
        yield "comm, plan, tune, check and lists such as --tp=1,2 are separate reports: type one"
    if is_launched and any(starters):
        yield "this report starts processes: start bench.py without a launcher"
    if check and nproc not in (0, 2, 4, 8):
        yield f"nproc is {nproc}: to check layouts, set --nproc=2, 4 or 8"
    if weak and lists and "nproc" not in lists:
        yield "weak scaling needs a list of nproc, such as --nproc=1,2,4"
    path = Path(json_path)
    if json_path and (path.is_dir() or not path.parent.is_dir()):  # it is written after the measurement
        yield f"json_path is {json_path!r}: name a file in a folder that exists"


def mistakes_in_devices(lists: dict) -> Iterator[str]:
    """A sentence for each mistake in the settings that describe devices, which need not be here."""
    for name, text in {"devices": devices, "nproc": ",".join(lists.get("nproc", []))}.items():
        if not re.fullmatch(r"([1-9]\d{0,5}(,|$))*", text):
            yield f"{name} is {text!r}: type numbers, such as --{name}=1,2,8"
    for n in map(int, re.findall(r"\d+", devices)):
        if n > per_node and n % per_node:
            yield f"devices is {n}: type a multiple of per_node, {per_node}"
    for card in {*hardware.split(",")} - {*HARDWARE, "this"}:
        yield f"hardware is {card!r}, which is not known: {KNOWN_CARDS}"
    is_described = devices or hardware != "this"
    predicts_one = tune or estimate or estimate_world_size
    if not plan and ("," in hardware or is_described and not predicts_one):
        yield "devices and hardware are for predictions: set --plan; to measure N processes, set --nproc=N"
    is_listed = plan and hardware in HARDWARE.keys() - {"cpu"}
    if (device_memory_gb or device_tflops or device_bandwidth) and not is_listed:
        names = "device_memory_gb, device_tflops and device_bandwidth"
        yield f"{names} change a listed card: set --plan --hardware=4090 or another"


def report_check(launches: Launches, workload: Workload) -> list[dict]:
    """Print what holds for the model on each layout, and for runs of train.py, and return the same."""
    rows = []
    for name, state, text in check_model(launches, workload, max(2, nproc)):
        print_result(f"{name:24} {state:8} {text}".rstrip())
        rows.append({"name": name, "state": state, "text": text})
    return rows


def print_estimate(workload: Workload, world_size: int, card: str) -> None:
    """Print the parts of the GB that a plan's table shows for a layout, without allocating them."""
    planned, hw = workload.plan(world_size, card), HARDWARE.get(card)
    parts = memory_estimate(planned, hw.memory_gb if hw else 0)
    if hw:
        parts |= {"process": hw.fixed_gb, "total": parts.pop("total") + hw.fixed_gb}
    print_result(f"estimated GB on each of {world_size} ranks, in micro-batches of {planned.micro_batch}:")
    row = {name: f"{gb:.3f}" for name, gb in parts.items()}
    reports.print_table([row | {"settings": flags_of(planned)}])


# ------------------------------------------------------------------------------------------------------------
try:
    # settings and processes
    adopt_launcher_variables()  # translates srun's and mpirun's variables to torchrun's
    rank, world_size, *_ = rank_variables()
    if rank > 0:
        discard_output()
    is_launched = "RANK" in os.environ
    train_settings = described_for_bench(settings_of(TRAIN_PY))
    words = with_equals_signs(sys.argv[1:], settings_of(__file__) | train_settings)
    lists, sys.argv[1:] = read_lists(words, train_settings)
    config = configure(globals(), extra=train_settings)
    # processes that are forked after CUDA's start could not compile
    local_device = torch.device("cpu") if check else pick_device(device, 0, 1)
    config["nproc"] = max(nproc, world_size)
    report([*mistakes_in_devices(lists), *mistakes(lists)])
    counts = [int(n) for n in devices.split(",") if n] or [config["nproc"]]
    cards = hardware.split(",")
    if is_launched:
        start_workers(nproc, __file__)  # the launcher has started the processes: this only checks nproc
    elif comm:  # torchrun replaces this process, and the workers come here
        start_workers(nproc or max(2, torch.cuda.device_count()), __file__)

    # the workload
    workload = Workload(config, train_settings, local_device, cards, GPT)
    settings = workload.settings
    if estimate or estimate_world_size:
        print_estimate(workload, estimate_world_size or workload.processes, cards[0])
    if estimate_world_size:
        sys.exit()
    result = {"machine": f"{device_name(local_device)}, {len(own_cores())} cores, torch {torch.__version__}"}
    print_result(result["machine"])

    # the reports, most of which launch train.py
    interrupt.raise_interrupt()  # the folder is deleted
    with TemporaryDirectory(prefix="isogpt-bench-", ignore_cleanup_errors=True) as folder:
        if workload.is_random and not comm:
            print_result(f"random tokens instead of {settings['dataset']}")
            write_random_tokens(Path(folder), settings["vocab_size"], 2**20 + settings["block_size"])
            settings["dataset"] = folder
        launches = Launches(TRAIN_PY, Path(folder), rank, is_launched)
        if comm:
            result["comm"] = reports.measure_collectives(device, settings)
        elif check:
            result["check"] = report_check(launches, workload)
        elif lists:
            result["sweep"] = reports.run_sweep(launches, workload, lists, steps)
        elif plan:
            result["plan"] = reports.report_plan(workload, counts, cards)
        elif tune:
            result["tune"] = reports.tune(workload, launches, cards[0])
        else:
            result["report"] = reports.report_step(launches, workload, steps)
except (ValueError, DistError) as e:
    fail(str(e))
except KeyboardInterrupt:
    raise SystemExit(130) from None
if json_path and rank == 0:
    Path(json_path).write_text(json.dumps(result, indent=2) + "\n")
differing = [row["name"] for row in result.get("check", []) if row["state"] == DIFFERS]
if differing:
    fail(f"results differ for {', '.join(differing)}: do not use these with this model.py and train.py")
