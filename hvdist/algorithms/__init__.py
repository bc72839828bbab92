"""The algorithms, one file each. A new one is its file, a line here, and an entry in the shared property suite."""

from hvdist.algorithms.asgd import ASGD, DCASGD
from hvdist.algorithms.sync import Sync
from hvdist.roles import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in (Sync, ASGD, DCASGD)}
