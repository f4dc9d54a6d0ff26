"""The command line that starts ranks, for each launcher. Pure: nothing is run or looked up."""
