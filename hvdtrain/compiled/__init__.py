"""What is compiled: kernels when hvdtrain is installed, and the rest when it is first used."""
