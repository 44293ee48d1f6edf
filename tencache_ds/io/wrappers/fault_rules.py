# SPDX-License-Identifier: Apache-2.0
"""Fault rules that a user writes for :mod:`tencache_ds.io.wrappers.faults`.

``TENCACHE_FAULTS="op=write,kind=eio,after=100;op=read,kind=bitflip,match=optimizer"`` is a list of rules, separated by
semicolons, each a list of ``key=value``, separated by commas. The first rule that fires takes the request.

- ``kind`` (required): ``eio``, ``enospc``, ``eacces``, ``erofs``: fails with that errno, nothing is transferred;
  ``short``: only the first half is transferred, which is reported as an error; ``torn`` (writes): only the first half
  is transferred, success is reported; ``bitflip``: one bit of the data changes, success is reported; ``delay``: starts
  ``seconds`` later; ``lost``: this and every later request to the same folder fails with ENODEV; ``hang``: never ends,
  or with ``seconds`` completes after that time, and then writes to its buffer even if the backend was closed meanwhile.
- ``op``: ``read``, ``write`` or ``any`` (the default).
- ``match``: substring of the tag or the path, such as ``optimizer`` or a weight's name.
- ``rank``: only on this global rank.
- ``after``: number of matching requests to skip first (0); ``every``: then inject into every Nth matching request (1);
  ``times``: maximum number of injections (no limit).
- ``seconds``: duration of ``delay``, or of a ``hang`` that ends. ``seed``: selects the bit to flip (0).

The single word ``none`` installs the wrapper without a rule, for :meth:`.faults.FaultBackend.inject`. Halves are whole
4 KiB pages, rounded down: of a single page nothing is transferred.
"""

from __future__ import annotations

from dataclasses import dataclass

from tencache_ds.errors import ConfigError
from tencache_ds.io.backends.ticket import Operation
from tencache_ds.names import FAULTS_VARIABLE, StrEnum

VARIABLE = FAULTS_VARIABLE


class Kind(StrEnum):
    """The fault of a request; see the module's table."""

    eio = "eio"
    enospc = "enospc"
    eacces = "eacces"
    erofs = "erofs"
    short = "short"
    torn = "torn"
    bitflip = "bitflip"
    delay = "delay"
    lost = "lost"
    hang = "hang"


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule: the requests it selects, and their fault. The fields are the keys of the module's table.

    Attributes:
        operation: None for both.
        rank: None for all.
        times: None for no limit.
    """

    kind: Kind
    operation: Operation | None = None
    match: str = ""
    rank: int | None = None
    after: int = 0
    every: int = 1
    times: int | None = None
    seconds: float = 0.0
    seed: int = 0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The rules of a value of ``TENCACHE_FAULTS``.

    Raises:
        ConfigError: names the rule, its faulty part and the allowed values.
    """
    if text.strip() == "none":
        return ()
    return tuple(_parse_rule(rule.strip(), index) for index, rule in enumerate(text.split(";"), 1))


def _parse_rule(rule: str, index: int) -> Fault:
    where = f"{VARIABLE}, rule {index} ({rule!r})"
    given: dict[str, str] = {}
    for part in rule.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"{where}: {part.strip()!r} is not key=value")
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}. Allowed: {', '.join(_KEYS)}")
        if key in given:
            raise ConfigError(f"{where}: {key!r} is given twice")
        given[key] = value
    if "kind" not in given:
        raise ConfigError(f'{where}: "kind" is missing. Allowed: {", ".join(Kind)}')
    if given["kind"] not in list(Kind):
        raise ConfigError(f"{where}: kind cannot be {given['kind']!r}. Allowed: {', '.join(Kind)}")
    kind = Kind(given["kind"])
    operation = given.get("op", "any")
    if operation not in ("any", *(o.value for o in Operation)):
        raise ConfigError(f"{where}: op cannot be {operation!r}. Allowed: read, write, any")
    if kind is Kind.torn and operation != "write":
        raise ConfigError(f'{where}: only a write can be torn: add "op=write"')
    if (kind is Kind.delay) != ("seconds" in given) and not (kind is Kind.hang and "seconds" in given):
        raise ConfigError(f'{where}: "seconds" belongs to kind=delay, which needs it, and to kind=hang')
    return Fault(
        kind,
        None if operation == "any" else Operation(operation),
        given.get("match", ""),
        _whole(where, given, "rank", 0),
        _whole(where, given, "after", 0) or 0,
        _whole(where, given, "every", 1) or 1,
        _whole(where, given, "times", 1),
        _seconds(where, given),
        _whole(where, given, "seed", 0) or 0,
    )


_KEYS = ("kind", "op", "match", "rank", "after", "every", "times", "seconds", "seed")


def _whole(where: str, given: dict[str, str], key: str, least: int) -> int | None:
    if key not in given:
        return None
    value = given[key]
    if not (value.isascii() and value.isdigit() and int(value) >= least):
        raise ConfigError(f"{where}: {key} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def _seconds(where: str, given: dict[str, str]) -> float:
    value = given.get("seconds", "0")
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ConfigError(f"{where}: seconds must be a number from 0 to 1000000, not {value!r}")
    return seconds
