"""The mpi engine: MPI through mpi4py, and shared memory within nodes."""
