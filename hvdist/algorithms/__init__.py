"""The algorithms, one file each. A new one is its file, a line here, and an entry in the shared property suite."""

from hvdist.algorithm import Algorithm
from hvdist.algorithms.asgd import ASGD, DCASGD
from hvdist.algorithms.sync import Sync

ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in (Sync, ASGD, DCASGD)}
