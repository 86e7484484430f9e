"""Quantities of Kubernetes, such as 250m and 1Gi. Pure."""

import re
from decimal import ROUND_CEILING, Decimal

from fusermount3_controller.faults import quoted

#: k8s.io/apimachinery, resource.Quantity, without a sign.
_QUANTITY = re.compile(r"([0-9]{1,30}(?:\.[0-9]{0,9})?)(m|[kMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?")
#: The greatest one: what is greater stands for this (resource.Quantity: "capped").
_MOST = Decimal(2**63 - 1)
_SUFFIXES = {"m": Decimal("0.001"), None: Decimal(1)}
_SUFFIXES |= {suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)}
_SUFFIXES |= {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)}


def quantity(text: str) -> Decimal:
    """Return the number that a quantity of Kubernetes stands for. Raises ValueError."""
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ValueError(f"must be a quantity such as 250m or 1Gi, not {quoted(text)}")
    number, suffix = match[1], match[2]
    if suffix and suffix not in _SUFFIXES:
        return min(Decimal(f"{number}{suffix}"), _MOST)
    return min(Decimal(number) * _SUFFIXES[suffix], _MOST)


def size_or_none(value: object) -> int | None:
    """Return the bytes that a quantity stands for; None, if it is none."""
    try:
        return size(value)
    except ValueError:
        return None


def size(value: object) -> int:
    """Return the bytes that a quantity stands for, rounded up. Raises ValueError, also for less than one."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"must be a quantity such as 1Gi, not {quoted(value)}")
    result = int(quantity(str(value)).to_integral_value(ROUND_CEILING))
    if result < 1:
        raise ValueError(f"must be more than nothing, not {quoted(value)}")
    return result
