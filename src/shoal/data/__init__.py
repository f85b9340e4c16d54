"""Reading samples: files of clicks into batches of labels, numbers and ids, shuffled, sharded and resumable."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "shoal.data.features": (
            "Feature",
            "Number",
        ),
        "shoal.data.formats": (
            "FORMATS",
            "make_format",
        ),
        "shoal.data.generate": (
            "CriteoLike",
            "write_criteo",
        ),
        "shoal.data.prefetch": ("Prefetch",),
        "shoal.data.raw": (
            "Inputs",
            "make_inputs",
        ),
        "shoal.data.samples": ("Samples",),
        "shoal.data.schema": (
            "CRITEO",
            "Schema",
            "text_fid",
        ),
        "shoal.data.source": (
            "BadRow",
            "Cursor",
            "Format",
            "Unit",
        ),
        "shoal.data.stream": (
            "Batch",
            "Stream",
        ),
    },
)
