"""The first lines of a run, which say what it is about to do."""

from collections import Counter

from isogpt.common.console import RANKS_SHOWN, count_text, shortened
from isogpt.data.dataset import Dataset
from isogpt.data.mixture import PER
from isogpt.data.reader import Reader
from isogpt.launch import torch_import
from isogpt.launch.network import own_cores
from isogpt.launch.process_group import Ranks
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.plan import Plan
from isogpt.parallel.shares import about_unused_ranks, spell_shares
from isogpt.speed.devices import Peak


def about_model(data: Dataset, plan: Plan, parameter_count: int, origin: str) -> list[str]:
    """The data and the model; `origin` says where the weights come from."""
    args, active, folders = plan.model_args, "", str(data.folder)
    if experts := plan.counts.experts:
        unused = experts - experts * args["n_expert_active"] // args["n_expert"]
        active = f", {(parameter_count - unused) / 1e6:.2f}M for each token"
    if data.parts:
        parts = [f"{one.folder} {quota}" for one, quota in zip(data.parts, data.quotas, strict=True)]
        folders = f"of each {PER:,} sequences {', '.join(parts)}"
    return [
        f"data:    {folders}, {len(data.train):,} training tokens, vocabulary size {args['vocab_size']}",
        *(f"windows: {one.name}: {one.windows.about()}" for one in data.sources if one.windows.digest),
        f"model:   {parameter_count / 1e6:.2f}M parameters{active}, from {origin}",
    ]


def topology(ranks: Ranks) -> str:
    """Machines x processes: '4 = 2 nodes (a, b) x 2', or '3 = 1 node x 3'."""
    sizes = list(Counter(ranks.machines).values())
    nodes = "1 node"
    if len(sizes) > 1:
        nodes = f"{len(sizes)} nodes ({shortened([*dict.fromkeys(ranks.hosts)], 4)})"
    processes = sizes[0] if len(set(sizes)) == 1 else "+".join(map(str, sizes))
    return f"{ranks.world_size} = {nodes} x {processes}"


def about_ranks(ranks: Ranks, plan: Plan, mesh: Mesh, compile_note: str) -> list[str]:
    """The processes, and how they divide the work."""
    sharding = f", zero {plan.zero}" if plan.zero else ""
    lines = [
        f"ranks:   {topology(ranks)} on {ranks.device.type}, {ranks.network}, {plan.dtype}{sharding}; "
        f"{compile_note}"
    ]
    if mesh.splits_model or mesh.cp > 1:
        named = {"pp": mesh.pp, "dp": mesh.data_size, "cp": mesh.cp, "tp": mesh.tp}
        degrees = " x ".join(f"{name} {n}" for name, n in named.items() if n > 1)
        experts = f", in dp: ep {mesh.ep}" if mesh.ep > 1 else ""
        lines.append(f"mesh:    {ranks.world_size} processes = {degrees}{experts}")
    return lines


def about_network(config: dict, ranks: Ranks, mesh: Mesh) -> list[str]:
    """What crosses a slow network, if there are settings for one."""
    lines = []
    if mesh.islands > 1:
        size = ranks.world_size // mesh.islands
        lines.append(
            f"islands: {mesh.islands} of {count_text(size, 'process', 'processes')} each, which average "
            f"their weights every {count_text(config['local_steps'], 'step')}"
        )
    if (kind := config["grad_compression"]) != "none":
        use = f"sent as {kind}" if mesh.replicas.size > 1 else "not sent, since there is only one replica"
        lines.append(f"network: gradients are {use}")
    return lines


def about_step(config: dict, reader: Reader) -> list[str]:
    """The sequences of a step, and a warning if ranks have nothing to compute."""
    share, length = reader.share, reader.block_size
    tokens = share.sequences * length
    rows_of = share.rows_of if len(set(share.rows_of)) > 1 else [share.rows]
    rows = shortened([*map(str, rows_of)], RANKS_SHOWN)
    rows += " row" if rows == "1" else " rows"
    padding = f" ({count_text(share.padding(), 'row')} of padding)" if share.padding() else ""
    lines = [
        f"step:    {count_text(share.sequences, 'sequence')} x {length} = {tokens:,} tokens, on each "
        f"rank {count_text(share.micro_steps, 'micro-step')} x {rows}{padding}"
    ]
    if config["shares"] == "auto":
        lines.append(f"shares:  in proportion to measured speeds, as --shares={spell_shares(reader.speeds)}")
    if unused := about_unused_ranks(share, reader.plan.batch_size, reader.plan.pp):
        lines.append(f"warning: {unused}")
    return lines


def peak_text(peak: Peak) -> str:
    """The peak of the devices and its source."""
    return f"{peak.flops / 1e12:.3g} TFLOP/s ({peak.source})" if peak.flops else "unknown, no mfu"


def about_machine(ranks: Ranks, plan: Plan, peak: Peak) -> list[str]:
    """The peak of the devices, the micro-batches, the cores and the threads."""
    lines = [f"peak:    {peak_text(peak)}"]
    if plan.micro_batch < plan.batch_size:
        lines.append(
            f"memory:  micro-batches of {plan.micro_batch} instead of {plan.batch_size}, "
            "since a previous attempt ran out of memory"
        )
    processes, cores = ranks.core_sharers, len(own_cores())
    if ranks.device.type == "cpu" and processes > cores:
        lines.append(
            f"cores:   {processes} processes share {cores} CPU cores: this tests a layout, and is slower "
            f"than --nproc={cores}"
        )
    if torch_import.NOTE:
        lines.append(f"threads: {torch_import.NOTE}")
    return lines
