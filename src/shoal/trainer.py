"""What `shoal train` runs, as a library; it lives in `shoal.train.loop`."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "shoal.train.loop.config": ("Config",),
        "shoal.train.loop.metrics": ("Metrics", "exact_auc"),
        "shoal.train.loop.toml": ("load_config",),
        "shoal.train.loop.trainer": ("Trainer", "train"),
    },
)
