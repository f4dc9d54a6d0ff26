"""Horovod's module names, answered with hvdtrain's modules.

`finder` knows which module answers which name. The folder `on_path` goes on the path of a script
that imports Horovod: `import horovod` then finds what installs the finder.
"""
