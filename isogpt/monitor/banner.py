"""The first lines of a run, which say what it is about to do."""

from collections import Counter
from collections.abc import Iterator

from isogpt.common.console import RANKS_SHOWN, count_text, shortened
from isogpt.data.dataset import Dataset
from isogpt.data.mixture import PER
from isogpt.data.reader import Reader
from isogpt.launch.network import own_cores
from isogpt.launch.process_group import Ranks
from isogpt.parallel.compilation import compile_note
from isogpt.parallel.mesh import AXES, Mesh
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import about_unused_ranks, spell_shares
from isogpt.speed.devices import Peak


def about_model(data: Dataset, plan: Plan, parameter_count: int, origin: str) -> Iterator[str]:
    """The data and the model; `origin` says where the weights come from."""
    args, active, folders = plan.model_args, "", str(data.folder)
    if data.parts:
        parts = [f"{one.folder} {quota}" for one, quota in zip(data.parts, data.quotas, strict=True)]
        folders = f"of each {PER:,} sequences {', '.join(parts)}"
    yield f"data:    {folders}, {len(data.train):,} training tokens, vocabulary size {args['vocab_size']}"
    for one in data.sources:
        if one.windows.digest:
            yield f"windows: {one.name}: {one.windows.about()}"
    if experts := plan.counts.experts:
        unused = experts - experts * args["n_expert_active"] // args["n_expert"]
        active = f", {(parameter_count - unused) / 1e6:.2f}M for each token"
    yield f"model:   {parameter_count / 1e6:.2f}M parameters{active}, from {origin}"


def topology(ranks: Ranks) -> str:
    """Machines x processes: '4 = 2 nodes (a, b) x 2', or '3 = 1 node x 3'."""
    sizes = [*Counter(ranks.machines).values()]
    nodes = count_text(len(sizes), "node")
    if len(sizes) > 1:
        nodes += f" ({shortened([*dict.fromkeys(ranks.hosts)], 4)})"
    return f"{ranks.world_size} = {nodes} x {' or '.join(map(str, dict.fromkeys(sizes)))}"


def about_ranks(ranks: Ranks, plan: Plan, mesh: Mesh) -> Iterator[str]:
    """The processes, and how they divide the work."""
    sharding = f", zero {plan.zero}" if plan.zero else ""
    where = f"{topology(ranks)} on {ranks.device.type}, {ranks.network}"
    yield f"ranks:   {where}, {plan.dtype}{sharding}; {compile_note(ranks.device, plan)}"
    if degrees := [f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1]:
        yield f"mesh:    {' x '.join(degrees)}"


def about_step(config: dict, reader: Reader) -> Iterator[str]:
    """The sequences of a step, and a warning if ranks have nothing to compute."""
    share = reader.share
    rows = shortened([*map(str, dict.fromkeys(share.rows_of))], RANKS_SHOWN)
    rows += " row" if rows == "1" else " rows"
    padding = f" ({count_text(share.padding(), 'row')} of padding)" if share.padding() else ""
    batch = f"{count_text(share.sequences, 'sequence')} x {reader.block_size}"
    tokens = f"{share.sequences * reader.block_size:,} tokens"
    steps = count_text(share.micro_steps, "micro-step")
    yield f"step:    {batch} = {tokens}, on each rank {steps} x {rows}{padding}"
    if config["shares"] == "auto":
        yield f"shares:  in proportion to measured speeds, as --shares={spell_shares(reader.speeds)}"
    if unused := about_unused_ranks(share, reader.plan.batch_size, reader.plan.pp):
        yield f"warning: {unused}"


def peak_text(peak: Peak) -> str:
    """The peak of the devices and its source."""
    return f"{peak.flops / 1e12:.3g} TFLOP/s ({peak.source})" if peak.flops else "unknown, no mfu"


def about_machine(ranks: Ranks, plan: Plan, peak: Peak) -> Iterator[str]:
    """The peak of the devices, the micro-batches and the cores."""
    yield f"peak:    {peak_text(peak)}"
    if plan.micro_batch < plan.batch_size:
        sizes = f"{plan.micro_batch} instead of {plan.batch_size}"
        yield f"memory:  micro-batches of {sizes}, since a previous attempt ran out of memory"
    cores = len(own_cores())
    if ranks.device.type == "cpu" and ranks.core_sharers > cores:
        shared = f"{ranks.core_sharers} processes share {cores} CPU cores"
        yield f"cores:   {shared}: this tests a layout, and is slower than --nproc={cores}"
