"""torchrun for --nproc, without torchrun's report of a failure: the ranks have printed theirs."""

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from isogpt.common import console
from isogpt.launch.launchers import stop_signals


def main() -> None:
    """
    Run torchrun with the arguments of this process. Exits with status 1 if a rank fails. A rank that was
    killed has printed nothing, so that the signal is printed here.
    """
    logging.disable(logging.ERROR)
    sys.argv.insert(1, f"--signals-to-handle={','.join(s.name for s in stop_signals())}")
    try:
        run.main()
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        if failure.exitcode < 0:
            console.print_error(f"rank {rank} was ended by {failure.signal_name()}")
        sys.exit(1)
    except SignalException:  # the ranks have saved the run and exited
        sys.exit(1)
