"""What lies here is found by Python where this folder is on its path: nothing but `horovod`."""
