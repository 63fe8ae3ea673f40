"""OpenForge: train agents by reinforcement learning inside the harness they ship in."""

__version__ = "0.1.0"
