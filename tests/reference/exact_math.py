"""Plain twin of csrc/core/exact_math.hpp: log and exp as fixed sequences of IEEE operations, to compare bit by bit.

Python's own differ in the last place from one C library to another.
"""

from __future__ import annotations

import struct

_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_ROOT_HALF = 0x3FE6A09E667F3BCD


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _double(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def log(x: float) -> float:
    shifted = _bits(x) - _ROOT_HALF
    exponent = float(shifted >> 52)
    f = _double((shifted & 0x000FFFFFFFFFFFFF) + _ROOT_HALF) - 1.0
    s = f / (2.0 + f)
    z = s * s
    z2 = z * z
    odd = even = 0.0
    for n in (23, 19, 15, 11, 7, 3):
        odd = 1.0 / n + z2 * odd
    for n in (21, 17, 13, 9, 5):
        even = 1.0 / n + z2 * even
    tail = z * odd + z2 * even
    return exponent * _LN2_HIGH + ((s + s) + (s * (tail + tail) + exponent * _LN2_LOW))


def exp(x: float) -> float:
    if not x > -700.0:
        return 0.0
    n = (x * float.fromhex("0x1.71547652b82fep+0") + float.fromhex("0x1.8p52")) - float.fromhex("0x1.8p52")
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p, factorial = 0.0, 6227020800  # 13!
    for k in range(13, -1, -1):
        p = 1.0 / factorial + r * p
        factorial //= max(k, 1)
    return p * 2.0**n


def power(x: float, y: float) -> float:
    return exp(y * log(x))
