"""Finds and restores what a test leaves changed in the process and in libraries: no test depends on those before it."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, reduce
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

OURS = {"lib", "agent", "servers", "planner", "rewards", "tools", "benchmarks", "grpo", "ppo", "remax", "dapo"}
LIBRARIES = {
    *("os", "time", "subprocess", "socket", "threading", "fcntl", "psutil", "builtins", "tyro._parsers"),
    *("torch", "torch.cuda", "torch.accelerator", "torch.nn.functional", "torch.multiprocessing"),
    *("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.checkpoint"),
    *("transformers.modeling_utils", "transformers.masking_utils", "transformers.conversion_mapping"),
    *("datasets.config", "huggingface_hub.constants", "transformers.utils.hub"),
    *("vllm.distributed.parallel_state", "vllm.v1.engine.utils", "vllm.platforms"),
}
AUTO = "transformers.models.auto"
REGISTRIES = {  # {module: the paths of dicts in it}
    "transformers.modeling_utils": ("AttentionInterface._global_mapping",),
    "transformers.masking_utils": ("AttentionMaskInterface._global_mapping",),
    f"{AUTO}.configuration_auto": ("CONFIG_MAPPING._extra_content",),
    f"{AUTO}.modeling_auto": tuple(
        f"MODEL_{of}MAPPING._extra_content" for of in ("", "FOR_CAUSAL_LM_", "FOR_IMAGE_TEXT_TO_TEXT_")
    ),
    "vllm.model_executor.models.registry": ("ModelRegistry.models",),
}
TORCH = {  # function: the one that says what it has set
    "set_default_dtype": "get_default_dtype",
    "set_default_device": "get_default_device",
    "set_num_threads": "get_num_threads",
    "set_grad_enabled": "is_grad_enabled",
    "use_deterministic_algorithms": "are_deterministic_algorithms_enabled",
    "set_float32_matmul_precision": "get_float32_matmul_precision",
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
OF_LIBRARIES = ("VLLM_", "TORCHINDUCTOR_", "TRITON_", "TILELANG_", "PYTORCH_NVML_", "WANDB_SERVICE", "PYTEST_")
MISSING = object()


@lru_cache(1)
def _watched(_: int) -> list[ModuleType]:
    """The argument, a number of imported modules, keeps the list until there is another one."""
    return [module for name, module in sys.modules.items() if name in LIBRARIES or name.partition(".")[0] in OURS]


def state() -> SimpleNamespace:
    torch = sys.modules.get("torch")
    registries = {
        f"{module}.{path}": reduce(getattr, path.split("."), sys.modules[module])
        for module, paths in REGISTRIES.items()
        if module in sys.modules
        for path in paths
    }
    return SimpleNamespace(  # without the variables that a library sets once for the process, and its own folders
        environment={name: value for name, value in os.environ.items() if not name.startswith(OF_LIBRARIES)},
        path=[folder for folder in sys.path if "site-packages" not in folder],
        folder=Path.cwd(),
        handlers={number: signal.getsignal(number) for number in SIGNALS},
        torch={} if torch is None else {setter: getattr(torch, getter)() for setter, getter in TORCH.items()},
        registries={name: (registry, dict(registry)) for name, registry in registries.items()},
        modules=[(module, dict(vars(module))) for module in _watched(len(sys.modules))],
    )


def restore(before: SimpleNamespace) -> list[str]:
    """Puts back what has changed since; returns the patches. What our programs set for their process is no fault."""
    for module, _ in before.modules:
        sys.modules[module.__name__] = module
    changed = state()
    for name in _changed(before.environment, changed.environment):
        os.environ.pop(name, None)
        if name in before.environment:
            os.environ[name] = before.environment[name]
    os.chdir(before.folder)
    if changed.path != before.path:
        sys.path[:] = [*before.path, *(folder for folder in sys.path if folder not in changed.path)]
    for number in _changed(before.handlers, changed.handlers):
        signal.signal(number, before.handlers[number])
    patched = []
    for setter in _changed(before.torch, changed.torch) if before.torch else ():  # else the test has imported torch
        patched.append(f"torch.{setter}")
        getattr(sys.modules["torch"], setter)(before.torch[setter])
    for name, (registry, copy) in before.registries.items():
        for key in _changed(copy, registry) if registry != copy else ():
            # lib registers for the whole process: functions of its own, and masks of transformers under new names
            if _origin(registry.get(key)) in OURS or (key not in copy and _origin(registry[key]) == "transformers"):
                continue
            patched.append(f"{key!r} in {name}")
            registry.pop(key, None)
            if key in copy:
                registry[key] = copy[key]
    for module, attributes in before.modules:
        now = vars(module)
        try:
            if now == attributes:  # three times as fast as to compare one after the other
                continue
        except Exception:  # noqa: BLE001  tensors have no single answer
            pass
        is_ours = _origin(module) in OURS
        for name, value in attributes.items():
            is_watched = not name.startswith("_") and (callable(value) or (is_ours and name.isupper()))
            if is_watched and now.get(name, MISSING) is not value and _origin(now.get(name)) != "vllm":
                patched.append(f"{module.__name__}.{name}")  # vLLM patches torch when it is imported
                setattr(module, name, value)
    return patched


def _changed(before: dict, now: dict) -> list:
    return [key for key in before.keys() | now.keys() if before.get(key, MISSING) != now.get(key, MISSING)]


def _origin(value: Any) -> str:
    """The package of a module, a function or a class."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]


@contextmanager
def all_restored(whose: str) -> Iterator[None]:
    before = state()
    yield
    if patched := restore(before):
        pytest.fail(f"{whose} leaves patched: {', '.join(patched)}", pytrace=False)
