"""The public names, for type checkers and for `shoal.lazy`, which imports each on first use."""

from shoal.train.loop.config import Config as Config
from shoal.train.loop.measure.metrics import Metrics as Metrics
from shoal.train.loop.measure.metrics import exact_auc as exact_auc
from shoal.train.loop.toml import load_config as load_config
from shoal.train.loop.trainer import Trainer as Trainer
from shoal.train.loop.trainer import train as train
