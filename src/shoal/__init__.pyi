"""The public names, for type checkers and for `shoal.lazy`, which imports each on first use."""

from shoal import comm as comm
from shoal import data as data
from shoal import errors as errors
from shoal import fid as fid
from shoal import gather as gather
from shoal import models as models
from shoal import nn as nn
from shoal import ops as ops
from shoal import serving as serving
from shoal import sharded as sharded
from shoal import table as table
from shoal import testing as testing
from shoal import train as train
from shoal import trainer as trainer
from shoal._core import num_threads as num_threads
from shoal._core import set_num_threads as set_num_threads
from shoal.ragged import Ragged as Ragged
from shoal.table.budget.limits import MemoryBudget as MemoryBudget
from shoal.table.budget.policies import EpochLfu as EpochLfu
from shoal.table.budget.policies import EpochLru as EpochLru
from shoal.table.budget.policies import Lfu as Lfu
from shoal.table.budget.policies import Lru as Lru
from shoal.table.budget.policies import Score as Score
from shoal.table.budget.policies import Slru as Slru
from shoal.table.config.optim import *
from shoal.table.table import HashTable as HashTable

__version__: str
