"""`shoal.comm.device_utils`: another name of `shoal.comm.launch.device_utils`, for the same module object."""

import sys

from shoal.comm.launch import device_utils
from shoal.comm.launch.device_utils import *  # noqa: F403  (for type checkers)

sys.modules[__name__] = device_utils
