"""Helpers for our tests and our users' tests: ranks as processes, threads or MPI jobs, and scripted faults."""

from shoal.testing import faults
from shoal.testing.mpi import mpi_unavailable, run_mpi
from shoal.testing.ranks import RankFailed, run_ranks
from shoal.testing.threads import run_threads

__all__ = ["RankFailed", "faults", "mpi_unavailable", "run_mpi", "run_ranks", "run_threads"]
