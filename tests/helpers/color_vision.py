"""Distances of colors as people with and without a deficient color vision see them."""

from __future__ import annotations

MIN_DISTANCE = 0.12


COLOR_VISION = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanope": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranope": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanope": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB."""


TO_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)


TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
"""OKLab, Ottosson 2020."""


Matrix = tuple[tuple[float, ...], ...]


def times(matrix: Matrix, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def to_oklab(color: str, eye: Matrix) -> list[float]:
    """Convert a color to OKLab."""
    rgb = times(eye, [linear(int(color[at : at + 2], 16) / 255) for at in (1, 3, 5)])
    cones = times(TO_CONES, [min(1.0, max(0.0, part)) for part in rgb])
    return times(TO_LAB, [part ** (1 / 3) for part in cones])


def distance(one: str, other: str, eye: Matrix) -> float:
    return float(sum((a - b) ** 2 for a, b in zip(to_oklab(one, eye), to_oklab(other, eye), strict=True)) ** 0.5)
