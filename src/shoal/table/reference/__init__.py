"""The definition of tables, in plain numpy: it documents every formula, and tests compare the native core to it."""

from shoal.table.reference.optimizers import reference_optimizer
from shoal.table.reference.table import ReferenceTable

__all__ = ["ReferenceTable", "reference_optimizer"]
