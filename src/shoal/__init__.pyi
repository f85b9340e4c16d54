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
from shoal.table.config.optim import Adadelta as Adadelta
from shoal.table.config.optim import Adagrad as Adagrad
from shoal.table.config.optim import Adam as Adam
from shoal.table.config.optim import AdamW as AdamW
from shoal.table.config.optim import Amsgrad as Amsgrad
from shoal.table.config.optim import BatchSoftmax as BatchSoftmax
from shoal.table.config.optim import Ftrl as Ftrl
from shoal.table.config.optim import GroupAdagrad as GroupAdagrad
from shoal.table.config.optim import GroupFtrl as GroupFtrl
from shoal.table.config.optim import Lamb as Lamb
from shoal.table.config.optim import Momentum as Momentum
from shoal.table.config.optim import MovingAverage as MovingAverage
from shoal.table.config.optim import RmsProp as RmsProp
from shoal.table.config.optim import RmsPropV2 as RmsPropV2
from shoal.table.config.optim import RowwiseAdagrad as RowwiseAdagrad
from shoal.table.config.optim import Sgd as Sgd
from shoal.table.table import HashTable as HashTable

__version__: str
