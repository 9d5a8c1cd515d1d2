"""torchrun for --nproc, without torchrun's report of a failure: the ranks have printed theirs."""

import logging
import socket
import sys

from torch.distributed import TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from isogpt.common import console
from isogpt.launch.network import LOOPBACK


def main() -> None:
    """
    Run torchrun with the arguments of this process. Exits with status 1 if a rank fails. A rank that was
    killed has printed nothing, so that the signal is printed here.

    torchrun's own stores listen at all addresses of the machine, and whoever reaches a store can run code
    here. This one is reached from this machine alone. The static rendezvous uses the store that serves its
    port in this process (multi_tenant), and opens no other.
    """
    logging.disable(logging.ERROR)
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    options = {"multi_tenant": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = TCPStore(LOOPBACK, port, is_master=True, **options)
    # all of them, since variables such as PET_NNODES, which Kubeflow sets, are torchrun's defaults
    rendezvous = ["--nnodes=1", "--node-rank=0", "--rdzv-backend=static"]
    try:
        run.main([*rendezvous, f"--rdzv-endpoint={LOOPBACK}:{store.port}", *sys.argv[1:]])
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        if failure.exitcode < 0:
            console.print_error(f"rank {rank} was ended by {failure.signal_name()}")
        sys.exit(1)
    except SignalException:  # the ranks have saved the run and exited
        sys.exit(1)
