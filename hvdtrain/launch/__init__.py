"""Launching ranks: mpirun command lines. Imports no MPI and no framework."""
