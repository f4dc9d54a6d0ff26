"""Horovod's module names, mapped to hvdtrain's modules.

`finder` maps the names to modules. The directory `on_path` is put on the path of a script that
imports Horovod: `import horovod` then finds the package that installs the finder.
"""
