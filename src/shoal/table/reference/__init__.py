"""What tables mean, in plain numpy: the documentation of every formula, and the judge of the native core."""

from shoal.table.reference.optimizers import reference_optimizer
from shoal.table.reference.table import ReferenceTable

__all__ = ["ReferenceTable", "reference_optimizer"]
