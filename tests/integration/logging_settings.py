# SPDX-License-Identifier: Apache-2.0
"""Announces something under each of many logging settings, one process each, and writes what they printed to a file.

The settings are those that frameworks and users make between the import of DeepSpeed and the training.
"""

from __future__ import annotations

import io
import json
import logging
import logging.config
import logging.handlers
import os
import queue
import sys
import tempfile
from collections.abc import Callable

import deepspeed
import rich.console
import rich.logging

from tencache_ds.config import Log, TenCacheConfig
from tencache_ds.integration.reporting import announce

LOGGER = deepspeed.utils.logger


def at_info(*handlers: logging.Handler) -> None:
    """DeepSpeed's logger at INFO, with these handlers in place of its own."""
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(logging.INFO)


def root_at_info() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    at_info()
    LOGGER.propagate = True


def propagation_alone() -> None:
    LOGGER.handlers.clear()
    LOGGER.propagate = True


def hide_by_filter() -> None:
    for handler in LOGGER.handlers:
        handler.addFilter(lambda record: False)


SETTINGS: dict[str, Callable[[], object]] = {
    "untouched": lambda: None,
    "logger at info": lambda: LOGGER.setLevel(logging.INFO),
    "handler at info": lambda: LOGGER.handlers[0].setLevel(logging.INFO),
    "logger and handler at info": lambda: deepspeed.utils.set_log_level_from_string("info"),
    "logger at error": lambda: LOGGER.setLevel(logging.ERROR),
    "logger at critical": lambda: LOGGER.setLevel(logging.CRITICAL),
    "no handler": lambda: LOGGER.handlers.clear(),
    "no handler, logger at info": at_info,
    "no handler, propagation": propagation_alone,
    "root at info": root_at_info,
    "rich": lambda: at_info(rich.logging.RichHandler(console=rich.console.Console(width=300))),
    "into nothing": lambda: at_info(logging.NullHandler()),
    "into a queue": lambda: at_info(logging.handlers.QueueHandler(queue.Queue())),
    "into a text": lambda: at_info(logging.StreamHandler(io.StringIO())),
    "into a file": lambda: at_info(logging.FileHandler("training.log")),
    "filter": hide_by_filter,
    "logging disabled": logging.disable,
    "logger disabled": lambda: setattr(LOGGER, "disabled", True),
    "dictConfig": lambda: logging.config.dictConfig({"version": 1}),
}


def say_something() -> None:
    announce("TenCache is active", TenCacheConfig())
    announce("TenCache was not quiet", TenCacheConfig(log=Log.quiet))
    LOGGER.warning("DeepSpeed warns")
    logging.getLogger("DeepSpeed.tencache.io").warning("TenCache warns")


def printed_with(setting: Callable[[], object]) -> str:
    """What a child of this process prints."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            setting()
            say_something()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0
        output.seek(0)
        return output.read().decode()


if __name__ == "__main__":
    deepspeed.init_distributed("gloo", verbose=False)
    logging.getLogger("DeepSpeed.tencache.io")  # as after the import of TenCache's modules: dictConfig disables it
    with open(sys.argv[1], "w") as file:
        json.dump({name: printed_with(setting) for name, setting in SETTINGS.items()}, file)
