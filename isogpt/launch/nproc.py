"""torchrun for --nproc, without torchrun's report of a failure: the ranks have printed theirs."""

import isogpt.launch.torch_import  # noqa: F401  (first: sets what must be set before torch is imported)

import logging
import os
import socket
import sys

from torch.distributed import TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from isogpt.common import console
from isogpt.launch.launchers import stop_signals
from isogpt.launch.network import LOOPBACK


def main() -> None:
    """
    Run torchrun with the arguments of this process. Exits with status 1 if a rank fails. A rank that was
    killed has printed nothing, so the signal is printed here.
    """
    logging.disable(logging.ERROR)
    # 30 s after a signal, torchrun would kill ranks in a long step or checkpoint; those that hang end by
    # themselves, see Watchdog
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    arguments = sys.argv[1:]
    if arguments[0] == "--standalone":
        # torchrun's own stores listen at all addresses of the machine, and whoever reaches a store can run
        # code here; this one can be reached only from this machine. The static rendezvous uses the store that
        # serves its port in this process (multi_tenant), and opens no other
        listener = socket.create_server((LOOPBACK, 0))
        port, options = listener.getsockname()[1], {"multi_tenant": True, "wait_for_workers": False}
        store = TCPStore(LOOPBACK, port, is_master=True, master_listen_fd=listener.detach(), **options)
        # all of them, since variables such as PET_RDZV_BACKEND are torchrun's defaults
        rendezvous = ["--nnodes=1", "--node-rank=0", "--rdzv-backend=static"]
        arguments[:1] = [*rendezvous, f"--rdzv-endpoint={store.host}:{store.port}"]
    try:
        run.main([f"--signals-to-handle={','.join(s.name for s in stop_signals())}", *arguments])
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        if failure.exitcode < 0:
            console.print_error(f"rank {rank} was ended by {failure.signal_name()}")
        sys.exit(1)
    except SignalException:  # the ranks have saved the run and exited
        sys.exit(1)
