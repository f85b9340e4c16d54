"""A local Ray for tests."""

import os

import shoal


def start_ray():
    """A local Ray whose workers import the sources that are tested here.

    Its own servers have 15 and 30 s to come up, which on a busy machine is not always enough.
    """
    import ray

    source = os.path.dirname(os.path.dirname(os.path.abspath(shoal.__file__)))
    for attempt in range(5):
        try:
            return ray.init(
                num_cpus=4, include_dashboard=False, log_to_driver=False,
                runtime_env={"env_vars": {"PYTHONPATH": f"{source}:{os.getcwd()}"}},
            )  # fmt: skip
        except Exception as error:
            if attempt == 4 or "timed out" not in str(error).lower():
                raise
            ray.shutdown()
    return None
