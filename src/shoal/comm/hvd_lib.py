"""`shoal.comm.hvd_lib`: another name of `shoal.comm.horovod.hvd_lib`, for the same module object."""

import sys

from shoal.comm.horovod import hvd_lib
from shoal.comm.horovod.hvd_lib import *  # noqa: F403  (for type checkers)

sys.modules[__name__] = hvd_lib
