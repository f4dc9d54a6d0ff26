"""Programs: most test one part of an installation, each in a process that may crash or hang.

`check` and `launch` start them as `python -m hvdtrain.probes.NAME`. Each prints one JSON object, or
ends with an error. Nothing imports them. `newcomer` is what engine mpi starts to join its ranks.
"""
