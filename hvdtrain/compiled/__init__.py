"""What is compiled: kernels before hvdtrain is installed, and the rest when it is used."""
