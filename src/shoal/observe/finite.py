"""Values that JSON can hold."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, with None, also in nested lists and dicts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
