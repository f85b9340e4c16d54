"""Shoal: sparse models that never stop learning, for PyTorch."""

from importlib.metadata import PackageNotFoundError, version

from shoal.lazy import exports

try:
    __version__ = version("shoal")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "shoal._core": (
            "set_num_threads",
            "num_threads",
        ),
        "shoal.ragged": ("Ragged",),
        "shoal.table.config.optim": (
            "Adadelta",
            "Adagrad",
            "Adam",
            "AdamW",
            "Amsgrad",
            "BatchSoftmax",
            "Ftrl",
            "GroupAdagrad",
            "GroupFtrl",
            "Lamb",
            "Momentum",
            "MovingAverage",
            "RmsProp",
            "RmsPropV2",
            "RowwiseAdagrad",
            "Sgd",
        ),
        "shoal.table.table": ("HashTable",),
        "shoal.comm": ("comm",),
        "shoal.data": ("data",),
        "shoal.errors": ("errors",),
        "shoal.fid": ("fid",),
        "shoal.gather": ("gather",),
        "shoal.models": ("models",),
        "shoal.nn": ("nn",),
        "shoal.ops": ("ops",),
        "shoal.serving": ("serving",),
        "shoal.sharded": ("sharded",),
        "shoal.table": ("table",),
        "shoal.testing": ("testing",),
        "shoal.train": ("train",),
        "shoal.trainer": ("trainer",),
    },
)
__all__ += ["__version__"]
