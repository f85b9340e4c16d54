"""`shoal.comm.distribution_utils`: another name of `shoal.comm.horovod.distribution_utils`, the same module object."""

import sys

from shoal.comm.horovod import distribution_utils
from shoal.comm.horovod.distribution_utils import *  # noqa: F403  (for type checkers)

sys.modules[__name__] = distribution_utils
