"""
Start runs without the seconds that `import torch` takes: import it once, then fork. runs.py starts this
process, writes one JSON request per line and reads one JSON reply per line. At the end of the input all
children are killed.

No torch operation has run before a fork, so there is no thread pool that a fork would break.

Unless a request says `whole`, a run saves two things that took half of a short run's time and that few tests
look at: the matmuls that measure the peak, and the pixels of the plot.
"""

import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

with suppress(ImportError):  # a GPU machine may lack it
    import matplotlib.backends.backend_agg
    import matplotlib.figure
import torch

# Two modules below ask torch.cuda.is_available() when they are imported. That asks the driver, after which no
# child could use the GPU; the name of a device file says the same.
ask_driver, torch.cuda.is_available = torch.cuda.is_available, Path("/dev/nvidiactl").exists
import torch._dynamo  # noqa: F401  (imported by the first step of AdamW)
import torch._subclasses.fake_tensor  # noqa: F401
import torch.distributed  # noqa: F401
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.optim  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import torch.distributed.tensor  # noqa: F401
import torch.nn.parallel  # noqa: F401

HOME = Path(__file__).resolve().parent.parent
# isoGPT's modules that each run must import: they note when and how the process has started
OF_A_PROCESS = ("isogpt.launch.torch_import", "isogpt.monitor")
PEAKS = "isogpt.speed.devices"


def import_isogpt():
    """Import the modules of isoGPT that are the same for all runs."""
    sys.path.insert(0, str(HOME))
    names = [".".join(path.relative_to(HOME).with_suffix("").parts) for path in HOME.glob("isogpt/*/*.py")]
    for name in ("model", "configurator", *sorted(names)):
        if not name.startswith(OF_A_PROCESS) and not name.endswith("__init__"):
            importlib.import_module(name)
    sys.path.remove(str(HOME))


def forget_isogpt():
    """For a script that replaces functions of modules before train.py imports the functions."""
    for name in [*sys.modules]:
        if name.split(".")[0] in ("isogpt", "model", "configurator") and name != PEAKS:
            del sys.modules[name]


def assumed_peak(device, dtype, budget=0.0):
    """FLOP/s, as isogpt.speed.devices.measured_matmul returns them."""
    return 1e11


def save_without_drawing(figure, file, **options):
    """In place of matplotlib's savefig: a file that begins as a PNG does."""
    file.write(b"\x89PNG")


def child(job, out):
    """Become one process of a run; does not return."""
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)
    if os.isatty(1):  # the zygote's streams may expect a file, which can seek
        sys.stdout = open(1, "w", buffering=1, closefd=False)
        sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.setpgid(0, 0)
    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    if "OMP_NUM_THREADS" in job["env"]:  # which torch has read before the fork
        torch.set_num_threads(int(job["env"]["OMP_NUM_THREADS"]))
    script = job["argv"][0]
    sys.argv = job["argv"]
    sys.path.insert(0, os.path.dirname(script))
    if os.path.dirname(script) != str(HOME):
        forget_isogpt()
    if not job.get("whole"):
        if PEAKS in sys.modules:  # saves 0.08 s of each rank; after a renaming, runs only take longer
            sys.modules[PEAKS].measured_matmul = assumed_peak
        if "matplotlib.figure" in sys.modules:
            matplotlib.figure.Figure.savefig = save_without_drawing
    code = 0
    try:
        # not runpy, which clears the script's globals before its excepthook can use them
        with open(script) as f:
            exec(compile(f.read(), script, "exec"), {"__name__": "__main__", "__file__": script})
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        import threading

        sys.stdout.flush()
        sys.stderr.flush()
        threading._shutdown()
    finally:
        os._exit(code)


def main():
    # isoGPT's modules are compiled once for all runs, also if PYTHONDONTWRITEBYTECODE is set
    sys.pycache_prefix = tempfile.mkdtemp()
    sys.dont_write_bytecode = False
    import_isogpt()
    torch.cuda.is_available = ask_driver
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the process that started this one closes the input
    gc.freeze()  # children need not look for garbage among what was imported
    alive = set()
    for line in sys.stdin:
        job = json.loads(line)
        if "argv" in job:
            pids = []
            for env, out in zip(job.pop("envs"), job.pop("outs"), strict=True):
                pid = os.fork()
                if pid == 0:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    child({**job, "env": env}, out)
                with suppress(ProcessLookupError):  # the child does the same: whichever is first
                    os.setpgid(pid, pid)
                pids.append(pid)
            alive.update(pids)
            reply = pids
        else:
            pid, status = os.waitpid(job["poll"], os.WNOHANG)
            reply = os.waitstatus_to_exitcode(status) if pid else None
            if pid:
                alive.discard(pid)
        print(json.dumps(reply), flush=True)
    for pid in alive:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with the processes that it has started, as for compiling
    shutil.rmtree(sys.pycache_prefix)


main()
os._exit(0)  # without the seconds that tearing down torch takes on a busy machine
