"""A CPU platform and CPU engines for veRL, through its own registries; veRL itself is unpatched.

Import this module before anything else of veRL: it registers the platform, which veRL then detects where no
accelerator is found. Call `register_engines` once the process group stands. Both do nothing on a GPU.
"""

from __future__ import annotations

import os
import resource
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*_: Any, **__: Any) -> None:
    """What a CPU need not do."""


def peak_bytes(*_: Any, **__: Any) -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory(*_: Any, **__: Any) -> tuple[int, int]:
    """Free and total bytes of the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _device_module() -> types.ModuleType:
    """`torch.cpu` with the functions of `torch.cuda` that veRL calls on its device's module."""
    module = types.ModuleType("torch.cpu for veRL")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    shim: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: "cpu",
        "mem_get_info": _memory,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }
    noop = ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
    shim |= dict.fromkeys((*noop, "set_per_process_memory_fraction"), _nothing)
    peak = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
    shim |= dict.fromkeys(peak, peak_bytes)
    for name, function in shim.items():
        setattr(module, name, function)
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """veRL's platform interface, for a machine without an accelerator."""

    _module = _device_module()
    device_name = "cpu"
    vendor_name = "generic"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return not torch.cuda.is_available()

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def register_engines() -> None:
    """Register the engines of a language model and a value model for device "cpu", unless that is done or there is a
    GPU."""
    from verl.plugin.platform import get_platform

    if get_platform().device_name != "cpu":
        return
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

    from openforge.train.shared_prefix import SharedPrefixEngine

    class ValueEngine(FSDPEngineWithValueHead):  # type: ignore[misc]
        """veRL's engine of a value model, which asks for flash attention whatever the device is."""

        def _build_module(self) -> torch.nn.Module:
            from transformers import AutoModelForTokenClassification

            config = self.model_config.hf_config
            config.num_labels, config.classifier_dropout = 1, 0.0
            module = AutoModelForTokenClassification.from_pretrained(
                self.model_config.local_path, dtype=torch.float32, config=config
            )
            if self.model_config.enable_gradient_checkpointing:
                module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return module

    if "cpu" not in EngineRegistry._engines.get("language_model", {}).get("fsdp2", {}):
        EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(SharedPrefixEngine)
        EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")(ValueEngine)
