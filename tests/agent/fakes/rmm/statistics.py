from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    current_bytes: int = 0
    current_count: int = 0
    peak_bytes: int = 0
    peak_count: int = 0
    total_bytes: int = 0
    total_count: int = 0

    def add(self, nbytes: int, count: int) -> None:
        self.current_bytes += nbytes
        self.current_count += count
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        self.total_count += nbytes > 0
