"""The first lines of a run, which say what it is about to do."""

import math
from collections import Counter
from collections.abc import Iterator

from isogpt.common.console import RANKS_SHOWN, count_text, shortened
from isogpt.data.dataset import Dataset
from isogpt.data.mixture import PER
from isogpt.data.reader import Reader
from isogpt.launch.network import own_cores
from isogpt.launch.process_group import Ranks
from isogpt.nn.counts import Counts, ModelCounts
from isogpt.parallel.compilation import compile_note
from isogpt.parallel.mesh import AXES, Mesh
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import about_unused_ranks, spell_shares
from isogpt.speed.devices import Peak


def parameter_count(counts: ModelCounts) -> int:
    """The parameters of a model without position embeddings, as nanoGPT counts them."""
    positions = counts.outside.get("wpe", Counts())
    return counts.parameters - positions.parameters


def about_model(data: Dataset, plan: Plan, origin: str) -> Iterator[str]:
    """The data and the model; `origin` says where the weights come from."""
    args = plan.model_args
    folders = str(data.folder)
    if data.parts:
        quotas = zip(data.parts, data.quotas, strict=True)
        parts = ", ".join(f"{source.folder} {quota}" for source, quota in quotas)
        folders = f"of each {PER:,} sequences {parts}"
    tokens = f"{len(data.train):,} training tokens"
    yield f"data:    {folders}, {tokens}, vocabulary size {args['vocab_size']}"
    for source in data.sources:
        if source.windows.digest:
            yield f"windows: {source.name}: {source.windows.about()}"
    parameters = parameter_count(plan.counts)
    size = f"{parameters / 1e6:.2f}M parameters"
    if experts := plan.counts.experts:
        active = experts * args["n_expert_active"] // args["n_expert"]
        active += parameters - experts
        size += f", {active / 1e6:.2f}M for each token"
    yield f"model:   {size}, from {origin}"


def topology(ranks: Ranks) -> str:
    """Machines x processes: '4 = 2 nodes (a, b) x 2', or '3 = 1 node x 3'."""
    sizes = list(Counter(ranks.machines).values())
    nodes = count_text(len(sizes), "node")
    if len(sizes) > 1:
        hosts = list(dict.fromkeys(ranks.hosts))
        nodes += f" ({shortened(hosts, 4)})"
    processes = " or ".join(map(str, dict.fromkeys(sizes)))
    return f"{ranks.world_size} = {nodes} x {processes}"


def about_ranks(ranks: Ranks, plan: Plan, mesh: Mesh) -> Iterator[str]:
    """The processes, and how they divide the work."""
    sharding = f", zero {plan.zero}" if plan.zero else ""
    where = f"{topology(ranks)} on {ranks.device.type}, {ranks.network}"
    yield f"ranks:   {where}, {plan.dtype}{sharding}; {compile_note(ranks.device, plan)}"
    degrees = [f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1]
    if degrees:
        yield f"mesh:    {' x '.join(degrees)}"


def about_step(config: dict, reader: Reader) -> Iterator[str]:
    """The sequences of a step, how often the data is read, and a warning if ranks have nothing to compute."""
    share = reader.share
    sizes = map(str, dict.fromkeys(share.rows_of))
    rows = shortened([*sizes], RANKS_SHOWN)
    rows += " row" if rows == "1" else " rows"
    if share.padding():
        rows += f" ({count_text(share.padding(), 'row')} of padding)"
    batch = count_text(share.sequences, "sequence")
    tokens = share.sequences * reader.block_size
    steps = count_text(share.micro_steps, "micro-step")
    yield f"step:    {batch} x {reader.block_size} = {tokens:,} tokens, on each rank {steps} x {rows}"
    n_steps = config["max_iters"] + 1
    epochs = n_steps * tokens / len(reader.data.train)
    if 1 < epochs < math.inf and not config["eval_only"]:
        yield f"epochs:  {n_steps:,.0f} steps read the training tokens {epochs:,.1f} times"
    if config["shares"] == "auto":
        yield f"shares:  in proportion to measured speeds, as --shares={spell_shares(reader.speeds)}"
    if unused := about_unused_ranks(share, reader.plan.batch_size, reader.plan.pp):
        yield f"warning: {unused}"


def peak_text(peak: Peak) -> str:
    """The peak of the devices and its source."""
    if not peak.flops:
        return "unknown, no mfu"
    return f"{peak.flops / 1e12:.3g} TFLOP/s ({peak.source})"


def about_machine(ranks: Ranks, plan: Plan, peak: Peak) -> Iterator[str]:
    """The peak of the devices, the micro-batches and the cores."""
    yield f"peak:    {peak_text(peak)}"
    if plan.micro_batch < plan.batch_size:
        sizes = f"{plan.micro_batch} instead of {plan.batch_size}"
        yield f"memory:  micro-batches of {sizes}, since a previous attempt ran out of memory"
    cores = len(own_cores())
    sharers = ranks.core_sharers
    if ranks.device.type == "cpu" and sharers > cores:
        what = f"{sharers} processes share {cores} CPU cores"
        yield f"cores:   {what}: this tests a layout, and is slower than --nproc={cores}"
