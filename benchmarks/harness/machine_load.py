"""How much of the machine others use, from the kernel's own count."""

import time
from pathlib import Path

STAT = Path("/proc/stat")
TICKS_PER_S = 100  # USER_HZ, the unit of /proc/stat, fixed by the kernel's interface to programs


def busy_s(text: str) -> float:
    """CPU seconds that all CPUs together were busy since boot, from the text of /proc/stat.

    Busy is user, nice, system, irq, softirq and steal; idle and waiting for disks are not. Guests are within
    user.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


class Load:
    """Watches the CPU that is used by anybody but the measured steps, this process's own waiting included."""

    def __init__(self, stat: Path = STAT) -> None:
        self.stat = stat
        self.start()

    def start(self) -> None:
        """Begin a window."""
        self.began, self.busy = time.monotonic(), busy_s(self.stat.read_text())

    def outside(self, own_cpu_s: float) -> float:
        """The cores that others kept busy since `start`: busy seconds without `own_cpu_s`, over the time that
        passed.
        """
        busy = busy_s(self.stat.read_text()) - self.busy
        return max(0.0, (busy - own_cpu_s) / (time.monotonic() - self.began))
