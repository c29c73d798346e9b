"""The CPU use of other processes, from the kernel's counters."""

import time
from pathlib import Path

STAT = Path("/proc/stat")
TICKS_PER_S = 100  # USER_HZ, the unit of /proc/stat, fixed by the kernel's interface to programs


def busy_s(text: str) -> float:
    """Returns the busy seconds of all CPUs together since boot, from the text of /proc/stat.

    Busy is user, nice, system, irq, softirq and steal; idle and iowait are not. Guest time is part of user.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


class Load:
    """Measures the CPU use of everything but the measured steps, including that of this process between
    them.
    """

    def __init__(self, stat: Path = STAT) -> None:
        self.stat = stat
        self.start()

    def start(self) -> None:
        """Begin a window."""
        self.began, self.busy = time.monotonic(), busy_s(self.stat.read_text())

    def outside(self, own_cpu_s: float) -> float:
        """Returns the cores that others used since `start`: busy seconds without `own_cpu_s`, over the
        elapsed time.
        """
        busy = busy_s(self.stat.read_text()) - self.busy
        return max(0.0, (busy - own_cpu_s) / (time.monotonic() - self.began))
