"""Folders of other programs."""

from pathlib import Path


def is_of_transformers(folder: Path) -> bool:
    """Whether a folder contains a model of transformers or an adapter of PEFT."""
    return any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
