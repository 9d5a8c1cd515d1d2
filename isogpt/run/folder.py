"""Enter the run's folder, and open what writes to it."""

from typing import Any

from isogpt.checkpoint.folder import claim_folder
from isogpt.checkpoint.mirror import open_mirror
from isogpt.checkpoint.save import Saver
from isogpt.checkpoint.state import TrainState
from isogpt.launch.process_group import Ranks
from isogpt.run.resolve import Run
from isogpt.speed.clock import Clock


def open_folder(run: Run, ranks: Ranks, state: TrainState, logger: Any, clock: Clock) -> Saver:
    """
    Claim the run's folder, open the files of the logger, and return what saves the state (all ranks; rank 0
    writes). A new run moves an earlier one aside. First of all, start what may lack a package, a network or a
    login: wandb, and the copies of checkpoints to a URL. Exits with a message if something cannot be used.

    Args:
        state: that the run starts from, which is not saved.
        logger: a monitor.log.Logger, whose room comes after this one.
    """
    resumed = run.start.resumed
    logger.start_services(run.recorded)
    mirror = open_mirror(run.config, resumed)
    folder = claim_folder(run.config, resumed, ranks, run.plan, run.mesh)
    logger.open_files(run.recorded, folder.owner, run.data)
    return Saver(
        folder, run.plan, run.mesh, run.recorded, run.vocabulary, logger, state.step, mirror, clock.part
    )
