# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's tests are run with: every config that asks for ZeRO-3 is changed on its way into DeepSpeed.

:func:`forced` is pure; :meth:`Forcing.install` puts it before DeepSpeed's parser in one process.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tencache_ds.names import StrEnum

ZERO = "zero_optimization"
OFFLOADS = ("offload_param", "offload_optimizer")
TENCACHE_ON_NVME = {"host_memory": 0, "chunk_size": 2**16}
"""Small models have to leave RAM, in more than one chunk."""

_FORCED = "__forced_by_the_suite__"


class Mode(StrEnum):
    """What happens to the configs of one run of the tests."""

    stock = "stock"
    """Nothing, and TenCache is disabled."""

    line = "line"
    """A ZeRO-3 config that offloads gets the one line ``"offload_engine": "tencache"``."""

    nvme = "nvme"
    """Every ZeRO-3 config runs with TenCache, and with weights and optimizer on NVMe."""

    offload = "offload"
    """Stock DeepSpeed, TenCache disabled: the sections of ``nvme``, but with CPU offload. What fails here as well is
    what the test says about offload, not what TenCache does."""

    @property
    def with_tencache(self) -> bool:
        return self in (Mode.line, Mode.nvme)


class Seen(StrEnum):
    """What a test's configs asked for by themselves: whether a mode would change anything."""

    stage3 = "stage3"
    offload = "offload"


def seen_in(config: Mapping[str, Any]) -> set[Seen]:
    """What a config, as its test wrote it, asks for."""
    zero = config.get(ZERO)
    if not isinstance(zero, Mapping) or zero.get("stage") != 3:
        return set()
    devices = {(zero.get(section) or {}).get("device") for section in OFFLOADS}
    return {Seen.stage3} | ({Seen.offload} if devices - {None, "none"} else set())


DEPRECATED = ("cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory")
"""Older spellings of the offload sections."""


def changes(mode: Mode, seen: set[Seen]) -> bool:
    """Whether ``mode`` changes the configs of a test in which ``seen`` was found."""
    needed = {Mode.line: Seen.offload, Mode.nvme: Seen.stage3, Mode.offload: Seen.stage3}
    return mode in needed and needed[mode] in seen


def forced(config: Mapping[str, Any], mode: Mode, nvme_path: str) -> Mapping[str, Any]:
    """The config that DeepSpeed gets: ``config`` itself if ``mode`` leaves it alone, else a changed copy.

    Args:
        config: as the test wrote it.
        mode: how to change it.
        nvme_path: folder for weights and optimizer.
    """
    if not changes(mode, seen_in(config)):
        return config
    result = copy.deepcopy(dict(config))
    if mode.with_tencache:
        result["offload_engine"] = "tencache"
    if mode == Mode.line:
        return result
    zero = result[ZERO]
    where = {"device": "nvme", "nvme_path": nvme_path} if mode == Mode.nvme else {"device": "cpu"}
    for section in OFFLOADS:
        zero[section] = (zero.get(section) or {}) | where | {"pin_memory": False}
    for deprecated in DEPRECATED:  # which may not stand beside the sections
        zero.pop(deprecated, None)
    # Weights below the threshold stay with every rank, and those of the tests are all below the default.
    if "param_persistence_threshold" not in zero:  # its other name
        zero.setdefault("stage3_param_persistence_threshold", 0)
    # With offload DeepSpeed refuses the optimizer objects that tests hand over, unless told not to.
    result.setdefault("zero_force_ds_cpu_optimizer", False)
    if mode == Mode.nvme:
        result["tencache"] = TENCACHE_ON_NVME | (result.get("tencache") or {})
    return result


@dataclass(frozen=True, slots=True)
class Forcing:
    """The forcing of one test, in whatever process it takes place.

    Attributes:
        mode: how configs are changed.
        folder: the test's own: NVMe files go to ``nvme`` below it, records of the parsed configs to ``seen``.
    """

    mode: Mode
    folder: Path

    def install(self) -> None:
        """Puts the forcing before DeepSpeed's parser and ``zero.Init`` in this process, in place of an earlier one."""
        from deepspeed.runtime.config import DeepSpeedConfig
        from deepspeed.runtime.zero.partition_parameters import Init

        self._wrap(DeepSpeedConfig, self._config_init)
        self._wrap(Init, self._zero_init)
        make_cpu_do()
        make_older_tests_do()

    def seen(self) -> set[Seen]:
        """Records of the configs that the test's processes have parsed so far."""
        return {Seen(path.name) for path in (self.folder / "seen").iterdir()}

    @staticmethod
    def _wrap(cls: type, wrapper: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        original = getattr(cls.__init__, _FORCED, cls.__init__)
        replacement = functools.wraps(original)(wrapper(original))
        setattr(replacement, _FORCED, original)
        cls.__init__ = replacement  # type: ignore[misc]

    def _apply(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        for seen in seen_in(config):
            (self.folder / "seen" / seen).touch()
        return forced(config, self.mode, str(self.folder / "nvme"))

    def _config_init(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(instance: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            parsed = _parsed(config)
            given = config if parsed is None else self._apply(parsed)
            original(instance, given, *args, **kwargs)
            if parsed is not None and given is not parsed and self.mode.with_tencache:
                from tencache_ds.integration.config_checks import options_of

                if options_of(instance) is None:
                    raise RuntimeError("TenCache did not notice a config that asks for it: its hook is not installed")

        return __init__

    def _zero_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Constructor of ``zero.Init``: without a config its weights would stay where no mode could reach them."""

        def __init__(instance: Any, *args: Any, **kwargs: Any) -> None:
            names = ("config_dict_or_path", "config", "remote_device", "param_swapper")
            told = any(kwargs.get(name) is not None for name in names) or len(args) > 3
            if not told and self.mode in (Mode.nvme, Mode.offload):
                from deepspeed.accelerator import get_accelerator

                # The data type that Init takes without a config.
                half = "fp16" if get_accelerator().is_fp16_supported() else "bf16"
                kwargs["config_dict_or_path"] = {
                    "train_micro_batch_size_per_gpu": 1,
                    ZERO: {"stage": 3},
                    half: {"enabled": True},
                }
            elif not told:
                (self.folder / "seen" / Seen.stage3).touch()
            original(instance, *args, **kwargs)

        return __init__


def _parsed(config: Any) -> Mapping[str, Any] | None:
    """A config as a dict, whichever way it is given; None for what DeepSpeed should complain about itself."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str) or not Path(config).is_file():
        return None
    import hjson

    try:
        parsed = hjson.loads(Path(config).read_text())
    except hjson.HjsonDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None


def make_cpu_do() -> None:
    """Lets tests that were written for GPUs run on the CPU accelerator, in every mode alike.

    They name devices by number to ``torch.device`` and to ``DistributedDataParallel``, where only "cpu" will do, and
    gather tensors without a dimension, which gloo refuses.
    """
    import deepspeed.comm
    from deepspeed.accelerator import get_accelerator
    from torch.nn.parallel import DistributedDataParallel

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu" or hasattr(DistributedDataParallel.__init__, _FORCED):
        return
    type(accelerator).current_device = lambda self: "cpu"
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        numbers = {"device_ids": None, "output_device": None}
        original(self, module, *args, **kwargs | {name: numbers[name] for name in numbers if name in kwargs})

    setattr(__init__, _FORCED, original)
    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]
    gather = deepspeed.comm.all_gather_into_tensor

    @functools.wraps(gather)
    def all_gather_into_tensor(output: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return gather(output, tensor if tensor.dim() else tensor.reshape(1), *args, **kwargs)

    deepspeed.comm.all_gather_into_tensor = all_gather_into_tensor


def make_older_tests_do() -> None:
    """Lets the checkpoint tests of a checkout from before 0.19.8 compare an attribute that is gone since then."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):
        DeepSpeedEngine.sparse_tensor_module_names = frozenset()
